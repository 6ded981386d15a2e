"""Growth inside the trainers of other libraries, the real ones; saved and taken up to the same bits."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from esper.foundation.errors import UserError
from esper.lifecycle.config import GateConfig, LifecycleConfig
from esper.tamiyo.scripted import Scheduled
from tests.growing import models

QUICK = LifecycleConfig(gates=GateConfig(training_epochs=1, min_health=0.0))
EPOCHS = 7
X, Y = models.images()


def settings() -> dict[str, Any]:
    return {"controller": Scheduled(steps=(0,)), "lifecycle": QUICK}


def same(left: nn.Module, right: nn.Module) -> bool:
    a, b = left.state_dict(), right.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.usefixtures("everything_stays")
@pytest.mark.parametrize("own_generator", [False, True], ids=["torch's randomness", "the loader's own"])
def test_lightning_grows_a_module_and_goes_on_from_a_checkpoint_to_the_same_bits(
    tmp_path: Path, own_generator: bool
) -> None:
    lightning = pytest.importorskip("lightning.pytorch", reason="the extra lightning is not installed")
    from esper import LightningGrower

    def fit(epochs: int, name: str, checkpoint: Path | None = None) -> LightningGrower:
        torch.manual_seed(0)
        module = models.lightning_module(models.small_cnn())
        grower = LightningGrower(epochs=EPOCHS, **settings())
        keep = lightning.callbacks.ModelCheckpoint(tmp_path / name, save_top_k=-1, filename="{epoch}")
        trainer = lightning.Trainer(
            max_epochs=epochs,
            callbacks=[grower, keep],
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            accelerator="cpu",
        )
        draw = torch.Generator().manual_seed(1) if own_generator else None
        train = DataLoader(TensorDataset(X[:45], Y[:45]), 15, shuffle=True, generator=draw)
        val = DataLoader(TensorDataset(X[45:], Y[45:]), 15)
        trainer.fit(module, train, val, ckpt_path=checkpoint, weights_only=True)
        return grower

    whole = fit(EPOCHS, "whole")
    assert whole.decisions[-1] == "the end"
    assert len(whole.decisions) == EPOCHS
    assert any("grown" in name for name in whole.grown.state_dict())
    epoch = 3 if own_generator else 1  # a seed that is heard, one that learns alone
    again = fit(EPOCHS, "again", tmp_path / "whole" / f"epoch={epoch}.ckpt")
    assert again.decisions == whole.decisions[epoch + 1 :]
    assert same(again.grown, whole.grown)


def test_lightning_without_epochs_is_told() -> None:
    pytest.importorskip("lightning.pytorch", reason="the extra lightning is not installed")
    from esper import LightningGrower

    optimiser = torch.optim.SGD(models.small_cnn().parameters(), lr=0.1)
    with pytest.raises(UserError, match="max_epochs is -1"):
        LightningGrower().on_train_start(SimpleNamespace(optimizers=[optimiser], max_epochs=-1), None)
    with pytest.raises(UserError, match="the module has 2 optimisers"):
        LightningGrower().on_train_start(SimpleNamespace(optimizers=[optimiser] * 2), None)


def test_gradients_of_seeds_are_forgotten_before_every_step_of_the_trainer_of_transformers() -> None:
    """It forgets those of the model by `model.zero_grad()`, which does not reach seeds."""
    pytest.importorskip("transformers", reason="the extra transformers is not installed")
    from esper import TransformersGrower

    callback, weight = TransformersGrower(val=None), nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    callback.grower = SimpleNamespace(seed_parameters=[weight])
    callback.on_step_begin(None, None, None)
    assert weight.grad is None


class Sentences(Dataset[dict[str, Tensor]]):
    """Texts that count upwards."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = (torch.arange(8) + index) % 16
        return {"input_ids": ids, "labels": ids}


@pytest.mark.usefixtures("everything_stays")
def test_the_trainer_of_transformers_grows_a_model_and_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="the extra transformers is not installed")
    pytest.importorskip("accelerate", reason="the extra transformers is not installed")
    from esper import TransformersGrower

    shape = {"vocab_size": 16, "n_positions": 8, "n_embd": 8, "n_layer": 2, "n_head": 2}

    def fit(name: str, checkpoint: Path | None = None) -> TransformersGrower:
        torch.manual_seed(0)
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape))
        grower = TransformersGrower(Sentences(8), slots=["transformer.h"], blueprints=["LORA"], **settings())
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path / name),
            num_train_epochs=EPOCHS,
            per_device_train_batch_size=8,
            learning_rate=1e-2,
            save_strategy="epoch",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            logging_strategy="no",
        )
        trainer = transformers.Trainer(model, arguments, train_dataset=Sentences(24), callbacks=[grower])
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        return grower

    whole = fit("whole")
    assert whole.decisions[-1] == "the end"
    assert any("grown" in name for name in whole.grown.state_dict())
    again = fit("whole", tmp_path / "whole" / "checkpoint-12")  # of 4 epochs
    assert again.decisions == whole.decisions[4:]
    assert same(again.grown, whole.grown)
    for file in (tmp_path / "whole").glob("*/esper_growth.pt"):
        file.unlink()
    with pytest.raises(UserError, match=r"esper_growth.pt is not there"):
        fit("whole", tmp_path / "whole" / "checkpoint-6")
