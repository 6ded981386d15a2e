"""Growth inside the trainers of other libraries, the real ones; saved and taken up to the same bits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from esper.utils.errors import UserError
from tests.controllers import Scheduled
from tests.growing import models
from tests.growing.models import QUICK

EPOCHS = 7
X, Y = models.images()


def same(left: nn.Module, right: nn.Module) -> bool:
    a, b = left.state_dict(), right.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


class Watching(Scheduled):
    """Plants at once, and keeps what it was shown of the seeds' gradients."""

    def begin(self, scene: Any) -> None:
        super().begin(scene)
        self.seen: list[Tensor] = []

    def state_dict(self) -> dict[str, Tensor]:
        return {**super().state_dict(), "seen": torch.stack(self.seen)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        super().load_state_dict(state)
        self.seen = list(state["seen"])

    def decide(self, observation: Any, masks: Any, step: int) -> Any:
        evidence = observation.evidence
        self.seen.append(torch.stack([evidence.gradient_norm, evidence.gradient_health]))
        return super().decide(observation, masks, step)


class Resumable:
    """A loader that says how far it has been read, and goes on from there once."""

    first = batch = 0

    def __len__(self) -> int:
        return BATCHES

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        first, self.first, self.batch = self.first, 0, self.first
        for start in range(15 * first, 15 * BATCHES, 15):
            self.batch += 1
            yield X[start : start + 15], Y[start : start + 15]

    def state_dict(self) -> dict[str, int]:
        return {"first": self.first or self.batch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.first = state["first"]


BATCHES = 2  # of an epoch


@pytest.mark.usefixtures("everything_stays")
@pytest.mark.parametrize(
    ("loader", "validates", "steps"),
    [
        ("torch's randomness", True, (1, 4, 5, 14)),
        ("torch's randomness", False, (6, 13)),
        ("the loader's own", True, (5,)),
        ("resumable", False, (5,)),
    ],
)
def test_lightning_goes_on_from_a_checkpoint_of_any_step_to_the_same_bits(
    tmp_path: Path, loader: str, validates: bool, steps: Sequence[int]
) -> None:
    lightning = pytest.importorskip("lightning.pytorch", reason="the extra lightning is not installed")
    from esper import LightningGrower

    def fit(checkpoint: Path | None = None) -> LightningGrower:
        torch.manual_seed(0)
        module = models.lightning_module(models.small_cnn())
        val = DataLoader(TensorDataset(X[30:], Y[30:]), 15)
        rules = {"controller": Watching(steps=(0,)), "lifecycle": QUICK, "slots": ["net.3"]}
        grower = LightningGrower(val=val, **rules)
        save = partial(lightning.callbacks.ModelCheckpoint, tmp_path, save_top_k=-1)
        saving = [save(filename="{step}", every_n_train_steps=1), save(filename="after-{epoch}")]
        trainer = models.lightning_trainer(EPOCHS, grower, [] if checkpoint else saving)
        draw = torch.Generator().manual_seed(1) if loader == "the loader's own" else None
        plain = DataLoader(TensorDataset(X[:30], Y[:30]), 15, shuffle=True, generator=draw)
        train = Resumable() if loader == "resumable" else plain
        trainer.fit(module, train, val if validates else None, ckpt_path=checkpoint, weights_only=False)
        return grower

    whole = fit()
    assert len(whole.decisions) == EPOCHS
    assert whole.decisions[-1] == "the end"
    assert any("grown" in name for name in whole.grown.state_dict())
    files = {tmp_path / f"step={step}.ckpt": (step - 1) // BATCHES for step in steps}
    files[tmp_path / "after-epoch=2.ckpt"] = 3
    for file, decided in files.items():
        again = fit(file)
        assert again.decisions == whole.decisions[decided:], file
        assert same(again.grown, whole.grown), file
        seen, wanted = again._settings["controller"].seen, whole._settings["controller"].seen
        torch.testing.assert_close(torch.stack(seen), torch.stack(wanted), rtol=0, atol=0, equal_nan=True)


def test_growth_may_last_for_fewer_epochs_than_lightning_trains() -> None:
    pytest.importorskip("lightning.pytorch", reason="the extra lightning is not installed")
    from esper import LightningGrower

    grower, loader = LightningGrower(epochs=2, controller="static"), DataLoader(TensorDataset(X, Y), 30)
    trainer = models.lightning_trainer(4, grower)
    trainer.fit(models.lightning_module(models.small_cnn()), loader, loader)
    assert grower.decisions == ["waited", "the end"]
    assert grower.grown is not None


def test_trainers_on_several_devices_without_epochs_or_with_two_optimizers_are_refused() -> None:
    pytest.importorskip("lightning.pytorch", reason="the extra lightning is not installed")
    pytest.importorskip("transformers", reason="the extra transformers is not installed")
    from esper import LightningGrower, TransformersGrower

    with pytest.raises(UserError, match="2 processes or devices train together"):
        LightningGrower().setup(SimpleNamespace(world_size=2), None, "fit")
    for world_size, n_gpu in ((2, 1), (1, 2)):
        arguments = SimpleNamespace(world_size=world_size, n_gpu=n_gpu)
        with pytest.raises(UserError, match="2 processes or devices train together"):
            TransformersGrower(val=None).on_train_begin(arguments, None, None)
    optimizer = torch.optim.SGD(models.small_cnn().parameters(), lr=0.1)
    with pytest.raises(UserError, match="max_epochs is -1"):
        LightningGrower().on_train_start(SimpleNamespace(optimizers=[optimizer], max_epochs=-1), None)
    with pytest.raises(UserError, match="the module has 2 optimizers"):
        LightningGrower().on_train_start(SimpleNamespace(optimizers=[optimizer] * 2), None)


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
def test_transformers_goes_on_from_a_checkpoint_of_any_step_to_the_same_bits(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="the extra transformers is not installed")
    pytest.importorskip("accelerate", reason="the extra transformers is not installed")
    from esper import TransformersGrower

    shape = {"vocab_size": 16, "n_positions": 8, "n_embd": 8, "n_layer": 2, "n_head": 2}

    def fit(strategy: str, checkpoint: str | None = None) -> TransformersGrower:
        torch.manual_seed(0)
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape))
        rules = {"controller": Watching(steps=(0,)), "lifecycle": QUICK, "slots": ["transformer.h"]}
        grower = TransformersGrower(Sentences(8), blueprints=["LORA"], **rules)
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path / strategy),
            num_train_epochs=EPOCHS,
            per_device_train_batch_size=8,
            learning_rate=1e-2,
            save_strategy=strategy,
            save_steps=1,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            logging_strategy="no",
        )
        trainer = transformers.Trainer(model, arguments, train_dataset=Sentences(16), callbacks=[grower])
        trainer.train(resume_from_checkpoint=checkpoint and str(tmp_path / strategy / checkpoint))
        return grower

    # By steps, a checkpoint of an epoch's last step holds no decision after that epoch; by epochs it does.
    for strategy, decided in (("steps", (0, 3, 4, 13)), ("epoch", [4])):
        whole = fit(strategy)
        assert len(whole.decisions) == EPOCHS
        assert any("grown" in name for name in whole.grown.state_dict())
        for count in decided:
            step, known = (count + 1, count // BATCHES) if strategy == "steps" else (2 * count, count)
            again = fit(strategy, f"checkpoint-{step}")
            assert again.decisions == whole.decisions[known:], step
            assert same(again.grown, whole.grown), step
            seen, wanted = again._settings["controller"].seen, whole._settings["controller"].seen
            torch.testing.assert_close(torch.stack(seen), torch.stack(wanted), rtol=0, atol=0, equal_nan=True)
    for file in tmp_path.glob("*/*/esper_growth.pt"):
        file.unlink()
    with pytest.raises(UserError, match=r"esper_growth.pt is not there"):
        fit("steps", "checkpoint-6")
