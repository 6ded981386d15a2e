"""Every kind of growth in every floating dtype, with submodules in train and in eval mode."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import esper
from esper.growing.result import Grown
from esper.lifecycle.config import GateConfig, LifecycleConfig
from tests.growing import models

QUICK = LifecycleConfig(gates=GateConfig(training_epochs=1, min_health=0.0))
X, Y = models.table(32)
DTYPES = [
    (torch.float32, "cpu"),
    (torch.float64, "cpu"),
    (torch.bfloat16, "cpu"),
    pytest.param(torch.float16, "cuda", marks=pytest.mark.gpu),
    pytest.param(torch.bfloat16, "cuda", marks=pytest.mark.gpu),
]
SCHEDULES = ["schedule:mlp@0.1", "schedule:norm@0.1", "schedule:clone@0.1", "schedule:widen_full@0.1"]


def normed(outputs: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(5, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(6, outputs))


def grow(model: nn.Module, dtype: torch.dtype, **settings: Any) -> Grown:
    batches = [(X[k::2].to(dtype), Y[k::2]) for k in range(2)]
    scores = count()  # which only rise, so that the last epoch is the best

    def step(model: nn.Module, batch: tuple[Tensor, ...]) -> tuple[Tensor, float]:
        return F.cross_entropy(model(batch[0]), batch[1]), next(scores) / 1e6

    chosen = {"train": batches, "val": batches, "epochs": 5, "step": step, "lr": 1e-2, "lifecycle": QUICK}
    return esper.grow(model, **chosen | {"progress": False} | settings)


def norms(model: nn.Module) -> list[nn.BatchNorm1d]:
    return [module for module in model.modules() if isinstance(module, nn.BatchNorm1d)]


@pytest.mark.usefixtures("everything_stays")
@pytest.mark.parametrize("frozen", [False, True], ids=["train", "frozen"])
@pytest.mark.parametrize("controller", SCHEDULES)
@pytest.mark.parametrize(("dtype", "device"), DTYPES)
def test_what_grows_has_the_dtype_and_the_mode_of_what_it_is_added_to(
    dtype: torch.dtype, device: str, controller: str, frozen: bool
) -> None:
    model = normed().to(dtype)
    for norm in norms(model) if frozen else []:
        norm.eval()
    grown = grow(model, dtype, controller=controller, folds=1, device=device)
    assert grown.added or grown.folded, grown.report()
    assert {p.dtype for p in grown.model.parameters()} == {dtype}
    steps = {int(norm.num_batches_tracked) for norm in norms(grown.model)}
    assert steps == {0} if frozen else 0 not in steps, steps  # of a copied or wider norm too
    loss = F.cross_entropy(grown.model(X.to(dtype)).double(), Y).item()
    tolerance = 0.05 if torch.finfo(dtype).bits == 16 else 1e-4
    assert loss == pytest.approx(float(grown.record.loss[-1, 0]), rel=tolerance)


@pytest.mark.parametrize("controller", ["heuristic", "static", "random", None])
@pytest.mark.parametrize(("dtype", "device"), DTYPES[2:])
def test_any_controller_grows_a_model_of_any_dtype(
    dtype: torch.dtype, device: str, controller: str | None
) -> None:
    grown = grow(normed().to(dtype), dtype, controller=controller, device=device, epochs=3)
    assert {p.dtype for p in grown.model.parameters()} == {dtype}


@pytest.mark.parametrize("in_eval", [False, True])
def test_a_step_of_a_grower_leaves_every_module_in_its_own_mode(in_eval: bool) -> None:
    model, batch = normed(), (X, Y)
    rule = torch.optim.AdamW(model.parameters(), 1e-2)
    model.train(not in_eval)
    model[1].eval()
    settings = {"train": [batch], "val": [batch], "lifecycle": QUICK, "controller": "schedule:clone@0.1"}
    grower = esper.Grower(model, rule, epochs=6, **settings)
    modes = [module.training for module in model.modules()]
    before = model[1].running_mean.clone()
    for _ in range(4):
        F.cross_entropy(model(X), Y).backward()
        rule.step()
        grower.step()
        assert [module.training for module in model.modules()] == modes
    assert torch.equal(before, model[1].running_mean)


def test_a_model_in_eval_mode_is_trained_in_train_mode() -> None:
    """As from_pretrained gives it."""
    grown = grow(normed().eval(), torch.float32, controller="static", epochs=1)
    assert {int(norm.num_batches_tracked) for norm in norms(grown.model)} == {2}


def test_a_float16_model_learns_with_the_optimizer_that_is_made_here() -> None:
    """Adam's usual epsilon is 0 in float16."""
    grown = grow(normed().half(), torch.float16, controller="static")
    losses = [epoch.train_loss for epoch in grown.history]
    assert losses == sorted(losses, reverse=True), losses  # which no NaN is


class AsHalf(nn.Module):
    """A head in float32 behind a body in half precision."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.body, self.head = normed(6).to(dtype), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).float())


@pytest.mark.usefixtures("everything_stays")
def test_a_seed_in_a_model_of_two_dtypes_has_that_of_its_place() -> None:
    settings = {"controller": "schedule:mlp@0.1", "slots": ["body.5"]}
    grown = grow(AsHalf(torch.bfloat16), torch.bfloat16, **settings)
    assert grown.added
    assert {p.dtype for p in grown.model.body.parameters()} == {torch.bfloat16}
    assert {p.dtype for p in grown.model.head.parameters()} == {torch.float32}
