"""Models of other people, with no edit: they grow, train, fold, come back as their own class, and export."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import esper
from esper.growing.criterion import Criterion
from esper.growing.settings import check_settings
from esper.lifecycle.actions import Blueprint
from esper.tamiyo.schedule import Schedule, ScheduleLine
from tests.growing import models

X, Y = models.images(8)
PICTURES = (torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(0)), Y)
TOKENS = torch.randint(2, 20, (8, 6), generator=torch.Generator().manual_seed(0))
TABLE, TEXT = models.table(8), models.text(8)


@cache
def import_timm() -> Any:
    """timm, which imports torchvision; that of `make setup` stands apart and is made for a torch with CUDA.

    The models need none of its compiled operators, so two that it looks up when it is imported are declared.
    """
    apart = Path(sys.prefix) / "torchvision"
    if apart.is_dir():
        sys.path.append(str(apart))
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor a, Tensor b, float c) -> Tensor")
    return pytest.importorskip("timm", reason="timm is not installed", exc_type=(ImportError, RuntimeError))


def timm_model(name: str, **options: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        model: nn.Module = import_timm().create_model(name, num_classes=3, **options)
        return model

    return make


def gpt2() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 16, "vocab_size": 20, "n_positions": 32}
    model: nn.Module = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**sizes, bos_token_id=1, eos_token_id=1)
    )
    return model


def bert() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 20, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.BertConfig(**sizes, intermediate_size=32, num_labels=3)
    model: nn.Module = transformers.BertForSequenceClassification(config)
    return model


RESNET = timm_model("resnet10t", channels=(64, 32, 48, 64))
MOBILENET = timm_model("mobilenetv3_small_050")
TINY = {"img_size": 32, "patch_size": 8, "depth": 2, "embed_dim": 32, "num_heads": 2}
VIT = timm_model("vit_tiny_patch16_224", **TINY)
LABELS = TOKENS.masked_fill(TOKENS == 2, -100)
GPT2, BERT = {"input_ids": TOKENS, "labels": LABELS}, {"input_ids": TOKENS, "labels": Y}
# A model, a batch of its data, what grows (blocks that are repeated, layers that get wider, new modules), and
# where, if it is to be somewhere else than where it is found.
ZOO: list[tuple[str, Callable[[], nn.Module], Any, str, list[str] | None]] = [
    ("resnet", RESNET, PICTURES, "repeated wide CONV_SMALL", ["layer1.0", "layer3"]),
    ("mobilenet", MOBILENET, PICTURES, "repeated wide CONV_SMALL", ["blocks.2.1", "blocks.3.1"]),
    ("vit", VIT, PICTURES, "repeated wide LORA", None),
    ("gpt2", gpt2, GPT2, "repeated wide LORA", None),
    ("bert", bert, BERT, "repeated wide LORA", None),
    ("unet", models.UNet, (X, (X[:, 0] > 0.5).long()), "wide CONV_SMALL", None),
    ("lstm", models.Recurrent, (TEXT[0], TEXT[0][:, -1] % 3), "LORA", None),
    ("two inputs, dict output", models.TwoInputs, (TABLE[0], TABLE[0][:, :3], TABLE[1]), "wide LORA", None),
]


EXPORTED = {"vit", "unet", "lstm", "resnet", "gpt2"}  # between them these have every kind of grown part
LONG = {"bert", "mobilenet", "two inputs, dict output"}  # what grows in them grows in others too
CASES = [
    pytest.param(*row[1:], row[0] in EXPORTED, id=row[0], marks=[pytest.mark.long] if row[0] in LONG else [])
    for row in ZOO
]


@pytest.mark.parametrize(("make", "batch", "grows", "slots", "exported"), CASES)
def test_a_model_grows_folds_and_exports(
    make: Callable[[], nn.Module], batch: Any, grows: str, slots: list[str] | None, exported: bool
) -> None:
    torch.manual_seed(0)
    model = make()
    before = copy.deepcopy(model.state_dict())
    plain = ScheduleLine(0.35, Blueprint[grows.split()[-1]], slots=(0,))
    recipe = [ScheduleLine(0.1, Blueprint.CLONE), ScheduleLine(0.2, Blueprint.WIDEN_HALF), plain]
    settings = {"epochs": 8, "lr": 1e-3, "progress": False, "folds": 3, "step": models.rising_score()}
    grown = esper.grow(
        model, train=[batch], val=[batch], slots=slots, controller=Schedule(recipe), **settings
    )
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    for word in grows.split():
        assert any(word in line for line in grown.folded), grown.report()
    assert type(grown.model) is type(model)
    assert not any(type(part).__module__.startswith("esper") for part in grown.model.modules())
    assert set(before) <= set(grown.model.state_dict())
    assert grown.history[-1].train_loss < grown.history[0].train_loss
    judged = Criterion(check_settings({}))(grown.model, batch)
    assert judged.loss.item() == pytest.approx(grown.record.loss[-1, 0], rel=1e-4)
    assert sum(p.numel() for p in grown.model.parameters()) == grown.record.parameters[-1, 0]
    if exported:
        exports_as_it_says(grown.model, batch)


def exports_as_it_says(model: nn.Module, batch: Any) -> None:
    """torch.export gives the same outputs."""
    inputs = () if isinstance(batch, dict) else batch[:-1]
    named = {"input_ids": batch["input_ids"]} if isinstance(batch, dict) else {}
    if batch is GPT2:
        named["use_cache"] = False  # a cache is no output that can be exported
    model.eval()
    program = torch.export.export(model, inputs, named, strict=False)
    wanted, found = (run(*inputs, **named) for run in (model, program.module()))
    torch.testing.assert_close(logits(found), logits(wanted), rtol=1e-3, atol=1e-4)


def logits(output: Any) -> Tensor:
    found = output["logits"] if isinstance(output, dict) else getattr(output, "logits", output)
    assert isinstance(found, Tensor)
    return found


def test_a_deeper_gpt2_writes_with_its_cache_and_loads_where_esper_is_not(tmp_path: Any) -> None:
    torch.manual_seed(0)
    settings = {"epochs": 6, "lr": 1e-3, "progress": False, "folds": 2, "step": models.rising_score()}
    recipe = Schedule([ScheduleLine(0.1, Blueprint.CLONE), ScheduleLine(0.4, Blueprint.CLONE, slots=(1,))])
    model = esper.grow(gpt2(), train=[GPT2], val=[GPT2], controller=recipe, **settings).model
    assert model.config.n_layer == 5
    assert [block.attn.layer_idx for block in model.transformer.h] == [0, 1, 2, 3, 4]
    wrote = [
        model.generate(TOKENS[:1], max_new_tokens=8, do_sample=False, use_cache=cached)
        for cached in (True, False)
    ]
    assert torch.equal(*wrote)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    torch.testing.assert_close(again(TOKENS).logits, model(TOKENS).logits, rtol=1e-5, atol=1e-6)
