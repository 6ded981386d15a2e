"""Models of other libraries, with no edit: they grow, train, come back as their own class, and export."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import esper
from esper.lifecycle.config import GateConfig, LifecycleConfig
from esper.tamiyo.scripted import Scheduled

QUICK = LifecycleConfig(gates=GateConfig(training_epochs=1, min_health=0.0))
PICTURES = (torch.randn(8, 3, 32, 32), torch.arange(8) % 3)
TOKENS = torch.randint(0, 20, (8, 6))


def timm_model(name: str, **options: Any) -> nn.Module:
    try:
        import timm
    except (ImportError, RuntimeError) as error:  # a torchvision that does not fit the torch that is here
        pytest.skip(f"timm cannot be imported: {error}")
    model: nn.Module = timm.create_model(name, num_classes=3, **options)
    return model


def grown_from(model: nn.Module, batches: list[Any]) -> tuple[nn.Module, esper.Grown]:
    before = copy.deepcopy(model.state_dict())
    grown = esper.grow(
        model,
        train=batches,
        val=batches,
        controller=Scheduled(steps=(0,), gates=QUICK.gates),
        epochs=9,
        lr=1e-3,
        lifecycle=QUICK,
        progress=False,
        engine="live",
    )
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert grown.added, grown.report()
    assert type(grown.model) is type(model)
    assert set(before) <= set(grown.model.state_dict())
    assert grown.history[-1].train_loss < grown.history[0].train_loss
    return grown.model, grown


@pytest.mark.usefixtures("everything_stays")
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("resnet10t", {}),
        ("mobilenetv3_small_050", {}),
        (
            "vit_tiny_patch16_224",
            {"img_size": 32, "patch_size": 8, "depth": 2, "embed_dim": 32, "num_heads": 2},
        ),
    ],
)
def test_networks_for_pictures(name: str, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model, _ = grown_from(timm_model(name, **options), [PICTURES])
    program = torch.export.export(
        model, (PICTURES[0][:4],), dynamic_shapes=({0: torch.export.Dim("batch", min=2)},)
    )
    found = program.module()(PICTURES[0])
    torch.testing.assert_close(found, model(PICTURES[0]), rtol=1e-3, atol=1e-4)


@pytest.mark.usefixtures("everything_stays")
@pytest.mark.parametrize("kind", ["gpt2", "bert"])
def test_networks_for_text(kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    if kind == "gpt2":
        config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=20, n_positions=16)
        model, labels = transformers.GPT2LMHeadModel(config), TOKENS.masked_fill(TOKENS == 0, -100)
    else:
        config = transformers.BertConfig(
            vocab_size=20, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32
        )
        config.num_labels = 3
        model, labels = transformers.BertForSequenceClassification(config), torch.arange(8) % 3
    grown, _ = grown_from(model, [{"input_ids": TOKENS, "labels": labels}])
    again = copy.deepcopy(grown)
    outputs: Tensor = grown(input_ids=TOKENS).logits
    torch.testing.assert_close(again(input_ids=TOKENS).logits, outputs, rtol=0, atol=0)
