"""Models of other people, with no edit: they grow, train, fold, come back as their own class, and export."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import esper
from esper.growing.batches import Judge, UserStep
from esper.growing.settings import settings_of
from esper.tamiyo.schedule import Schedule
from tests.growing import models

X, Y = models.images(8)
PICTURES = (torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(0)), Y)
TOKENS = torch.randint(2, 20, (8, 6), generator=torch.Generator().manual_seed(0))
TABLE, TEXT = models.table(8), models.text(8)


def timm_model(name: str, **options: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        try:
            import timm
        except (ImportError, RuntimeError) as error:  # a torchvision that does not fit the torch that is here
            pytest.skip(f"timm cannot be imported: {error}")
        model: nn.Module = timm.create_model(name, num_classes=3, **options)
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


TINY = {"img_size": 32, "patch_size": 8, "depth": 2, "embed_dim": 32, "num_heads": 2}
LABELS = TOKENS.masked_fill(TOKENS == 2, -100)
GPT2, BERT = {"input_ids": TOKENS, "labels": LABELS}, {"input_ids": TOKENS, "labels": Y}
# A model, a batch of its data, and what grows: blocks that are repeated, layers that get wider, new modules.
ZOO: list[tuple[str, Callable[[], nn.Module], Any, str]] = [
    ("resnet", timm_model("resnet10t"), PICTURES, "repeated wide CONV_SMALL"),
    ("mobilenet", timm_model("mobilenetv3_small_050"), PICTURES, "repeated wide CONV_SMALL"),
    ("vit", timm_model("vit_tiny_patch16_224", **TINY), PICTURES, "repeated wide LORA"),
    ("gpt2", gpt2, GPT2, "repeated wide LORA"),
    ("bert", bert, BERT, "repeated wide LORA"),
    ("unet", models.UNet, (X, (X[:, 0] > 0.5).long()), "wide CONV_SMALL"),
    ("lstm", models.Recurrent, (TEXT[0], TEXT[0][:, -1] % 3), "LORA"),
    ("two inputs, dict output", models.TwoInputs, (TABLE[0], TABLE[0][:, :3], TABLE[1]), "wide LORA"),
]


def rising() -> UserStep:
    """A step with a score that only rises, so that the last epoch is the best."""
    judge, counted = Judge(settings_of({})), count()
    return lambda model, batch: (judge(model, batch).loss, next(counted) / 1e6)


@pytest.mark.parametrize(("make", "batch", "grows"), [row[1:] for row in ZOO], ids=[row[0] for row in ZOO])
def test_a_model_grows_folds_and_exports(make: Callable[[], nn.Module], batch: Any, grows: str) -> None:
    torch.manual_seed(0)
    model = make()
    before = copy.deepcopy(model.state_dict())
    plain = grows.split()[-1].lower()
    recipe = [(0.1, "clone", "all"), (0.2, "widen_half", "all"), (0.5, plain, [0])]
    settings = {"epochs": 12, "lr": 1e-3, "progress": False, "folds": 3, "step": rising()}
    grown = esper.grow(model, train=[batch], val=[batch], controller=Schedule(recipe), **settings)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    for word in grows.split():
        assert any(word in line for line in grown.folded), grown.report()
    assert type(grown.model) is type(model)
    assert not any(type(part).__module__.startswith("esper") for part in grown.model.modules())
    assert set(before) <= set(grown.model.state_dict())
    assert grown.history[-1].train_loss < grown.history[0].train_loss
    judged = Judge(settings_of({}))(grown.model, batch)
    assert judged.loss.item() == pytest.approx(grown.record.loss[-1, 0], rel=1e-4)
    assert sum(p.numel() for p in grown.model.parameters()) == grown.record.parameters[-1, 0]
    exports_as_it_says(grown.model, batch)


def exports_as_it_says(model: nn.Module, batch: Any) -> None:
    """torch.export gives the same outputs; for a model that branches on values, nothing does."""
    inputs = () if isinstance(batch, dict) else batch[:-1]
    named = {"input_ids": batch["input_ids"]} if isinstance(batch, dict) else {}
    if batch is GPT2:
        named["use_cache"] = False  # a cache is no output that can be exported
    if isinstance(model, models.TwoInputs):
        return
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
    settings = {"epochs": 6, "lr": 1e-3, "progress": False, "folds": 2, "step": rising()}
    recipe = Schedule([(0.1, "clone", "all"), (0.4, "clone", [1])])
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
