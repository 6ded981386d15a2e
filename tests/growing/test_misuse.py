"""What a stranger gets wrong is answered in one sentence: what was given, and what to give instead."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import esper
from esper.foundation.errors import UserError
from tests.growing import models

X, Y = models.table(24)
LOADER = DataLoader(TensorDataset(X, Y), 8)
FOREIGN = torch.optim.SGD([nn.Parameter(torch.zeros(1))], 0.1)


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


CASES: dict[str, dict[str, Any]] = {
    r"slots is the name '0'; give a list of names: \['0'\]": {"slots": "0"},
    "slot 'nope' is no submodule of Sequential; it has 0, 1, 2": {"slots": ["nope"]},
    "Linear has no submodule after which something could grow": {"model": nn.Linear(5, 3)},
    "model cannot be made .*; give an nn.Module, or a function without arguments": {"model": nn.Linear},
    "epochs is 2.5; give a whole number": {"epochs": 2.5},
    "step is a int; give a function": {"step": 3},
    "step raises ZeroDivisionError .* for the first batch of val": {"step": lambda model, batch: 1 / 0},
    "step gives a Tensor; it must return two things": {"step": loss_of},
    r"step gives a loss of shape \[8, 3\]; take its mean": {
        "step": lambda model, batch: (model(batch[0]), 0)
    },
    "the score of step is 'good'; it must be one number": {"step": lambda m, b: (loss_of(m, b), "good")},
    r"the score of step has the shape \[2\]": {"step": lambda m, b: (loss_of(m, b), torch.zeros(2))},
    "depends on no weight that is trained": {"step": lambda m, b: (loss_of(m, b).detach(), 0.5)},
    "the metric has the shape": {"metric": lambda outputs, targets: outputs, "engine": "live"},
    "train yields nothing": {"train": []},
    "train is None; give": {"train": None, "val": None},
    "val is missing and train cannot be divided": {"val": None},
    r"does not take the batches of train": {"train": [(X[:, :4], Y)]},
    "the targets run from 2 to 4, but the model has 3 outputs": {"train": [(X, Y % 3 + 2)]},
    "the loss of Sequential on the first batch of train is nan": {"train": [(X * torch.nan, Y)]},
    "make_optimiser gives None": {"make_optimiser": lambda groups: None},
    r"make_optimiser is SGD \(.*; allowed is a function": {"make_optimiser": FOREIGN},
    "holds none of the 6 parameters of the model": {"make_optimiser": lambda groups: FOREIGN},
    "device is 'gpu'; allowed are auto, cpu, cuda": {"device": "gpu"},
    "validation_samples is 5, and of a DataLoader no part can be drawn": {"validation_samples": 5},
}


@pytest.mark.parametrize("told", CASES)
def test_a_mistake_is_told_in_one_sentence(told: str) -> None:
    given = {"model": models.small_mlp(), "train": LOADER, "val": LOADER, "epochs": 1, **CASES[told]}
    with pytest.raises(UserError, match=told) as caught:
        esper.grow(progress=False, **given)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("optimiser", [None, torch.optim.SGD])
def test_a_grower_asks_for_an_optimiser(optimiser: Any) -> None:
    with pytest.raises(UserError, match=r"it must be an optimiser of torch\.optim"):
        esper.Grower(models.small_mlp(), optimiser, train=LOADER, val=LOADER)


def test_a_grower_asks_for_a_module() -> None:
    rule = torch.optim.SGD(models.small_mlp().parameters(), 0.1)
    with pytest.raises(UserError, match=r"model is a function; give an nn\.Module"):
        esper.Grower(models.small_mlp, rule, train=LOADER, val=LOADER)


class Breaking(nn.Sequential):
    """Gives NaN whenever it is trained."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(x)
        return out * torch.nan if self.training else out


@pytest.mark.parametrize("controller", ["static", None])
def test_a_training_that_always_breaks_is_an_error(controller: str | None) -> None:
    model = Breaking(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3))
    with pytest.raises(UserError, match="training broke in each of its 3 epochs: the loss was not finite"):
        esper.grow(model, train=LOADER, val=LOADER, controller=controller, epochs=3, progress=False)


def test_a_stated_part_of_the_validation_data_is_drawn_from_all_of_it() -> None:
    ordered = torch.arange(3).repeat_interleave(20)
    seen: list[Tensor] = []

    def step(model: nn.Module, batch: Any) -> tuple[Tensor, float]:
        if not model.training:
            seen.append(batch[1])
        return loss_of(model, batch), 0.5

    grown = esper.grow(
        models.small_mlp(),
        train=LOADER,
        val=(torch.randn(60, 5), ordered),
        step=step,
        controller="static",
        epochs=1,
        validation_samples=30,
        device=torch.device("cpu"),
        progress=False,
    )
    assert grown.engine == "live"
    last = seen[-1]
    assert len(last) == 30
    assert set(last.tolist()) == {0, 1, 2}


@pytest.mark.parametrize(
    "given",
    [
        {"schedule": "flat", "decay": 0.2},
        {"schedule": "cosine", "warmup": 0.1},
        {"validation_batch": 7},
        {"host_lr": 1e-3, "seed_lr": 1e-2},
        {"controller": "static"},
    ],
    ids=str,
)
def test_only_members_and_engine_choose_the_engine(given: dict[str, Any]) -> None:
    usual = esper.grow(models.small_mlp(), (X, Y), epochs=3, progress=False)
    grown = esper.grow(models.small_mlp(), (X, Y), epochs=3, progress=False, **given)
    assert grown.engine == usual.engine == "live"
    if "controller" not in given:
        assert [e.decision for e in grown.history] == [e.decision for e in usual.history]


def test_members_are_grown_as_rows() -> None:
    grown = esper.grow(models.small_mlp(), (X, Y), epochs=1, progress=False, members=2)
    assert grown.engine == "rows"


def test_rates_follow_the_schedule_and_decay_that_were_asked_for() -> None:
    rates: list[float] = []

    class Watched(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            rates.append(self.param_groups[0]["lr"])
            super().step(closure)

    def make(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return Watched(groups, lr=1.0)

    settings = {"schedule": "flat", "warmup": 0.0, "decay": 0.5, "make_optimiser": make}
    esper.grow(models.small_mlp(), LOADER, LOADER, controller="static", epochs=4, progress=False, **settings)
    assert rates == pytest.approx([1.0] * 6 + [1 - k / 6 for k in range(6)])
