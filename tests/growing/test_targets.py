"""What targets are taken for, what the score is called, and data in dtypes other than the model's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from sklearn.metrics import r2_score
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import esper
from esper.growing.result import Grown
from esper.utils.errors import UserError
from tests.growing import models

X, Y = models.table(48)
ONE_HOT = F.one_hot(Y, 3).float()
SOFT = 0.8 * ONE_HOT + 0.2 / 3
NUMBERS = torch.stack([X[:, 0] + 5, 10 * X[:, 1], X[:, 2] ** 2], 1)


def grow(targets: Tensor, outputs: int = 3, **settings: Any) -> Grown:
    torch.manual_seed(0)
    chosen = {"train": (X, targets), "val": (X, targets), "epochs": 3, "batch_size": 10, "lr": 1e-2}
    chosen |= {"controller": "static", "progress": False}
    return esper.grow(models.small_mlp(outputs), **chosen | settings)


@pytest.mark.parametrize(
    ("targets", "settings", "name", "loss"),
    [
        (Y, {}, "accuracy", F.cross_entropy),
        (ONE_HOT, {}, "accuracy", F.cross_entropy),
        (ONE_HOT, {"objective": "regression"}, "R²", F.mse_loss),
        (SOFT, {"objective": "classification"}, "accuracy", F.cross_entropy),
        (SOFT, {}, "R²", F.mse_loss),
        (NUMBERS, {}, "R²", F.mse_loss),
        (NUMBERS[:, 0], {"outputs": 1}, "R²", lambda o, t: F.mse_loss(o.squeeze(1), t)),
        (
            Y,
            {"outputs": 1, "objective": "regression"},
            "R²",
            lambda o, t: F.mse_loss(o.squeeze(1), t.float()),
        ),
        (NUMBERS, {"loss": F.l1_loss}, "share of the first loss gone", F.l1_loss),
        (ONE_HOT, {"loss": F.l1_loss}, "share of the first loss gone", F.l1_loss),
        (ONE_HOT, {"loss": F.mse_loss, "objective": "classification"}, "accuracy", F.mse_loss),
    ],
)
def test_targets_decide_on_loss_and_score(
    targets: Tensor, settings: dict[str, Any], name: str, loss: Callable[..., Tensor]
) -> None:
    grown = grow(targets, **settings)
    outputs = grown.model(X).detach()
    assert grown.score_name == name
    assert f"validation {name} " in grown.report()
    assert float(grown.record.loss[-1, 0]) == pytest.approx(loss(outputs, targets).item(), rel=1e-4)
    wanted = None
    if name == "R²":
        columns = targets.view(len(X), -1)
        wanted = max(-1.0, r2_score(columns, outputs, multioutput="variance_weighted"))
    elif name == "accuracy":
        classes = targets if targets is Y else targets.argmax(1)
        wanted = (outputs.argmax(1) == classes).float().mean().item()
    assert wanted is None or float(grown.record.accuracy[-1, 0]) == pytest.approx(wanted, abs=1e-5)


def test_the_report_says_what_decimals_were_taken_for_unless_the_user_said_it() -> None:
    assert "the targets are one-hot rows: trained with cross-entropy" in grow(ONE_HOT).report()
    assert "the targets are decimals: trained with the squared error" in grow(NUMBERS).report()
    for said in (grow(Y), grow(ONE_HOT, objective="classification"), grow(NUMBERS, loss=F.mse_loss)):
        assert "the targets are" not in said.report()
    with pytest.raises(UserError, match=r"objective is 'classification' .*float32 of shape \[10\]"):
        grow(NUMBERS[:, 0], outputs=1, objective="classification")


def test_the_score_of_a_model_with_a_loss_of_its_own_is_called_what_it_is() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = models.small_mlp()

        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            return {"loss": F.cross_entropy(self.body(x), labels)}

    batches = [{"x": X, "labels": Y}]
    settings = {"epochs": 1, "controller": "static", "progress": False}
    grown = esper.grow(Own(), train=batches, val=batches, **settings)
    assert grown.report().startswith("validation e^−loss ")


# ---- dtypes of data ----------------------------------------------------------------------------------------

FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("given", FLOATS)
@pytest.mark.parametrize("own", FLOATS[:3])
def test_tensors_are_converted_to_the_dtype_of_the_model(own: torch.dtype, given: torch.dtype) -> None:
    seen: set[torch.dtype] = set()

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        seen.update((outputs.dtype, targets.dtype))
        return F.mse_loss(outputs, targets)

    data, settings = (X.to(given), NUMBERS.to(given)), {"epochs": 1, "controller": "static"}
    grown = esper.grow(models.small_mlp().to(own), train=data, loss=loss, progress=False, **settings)
    assert seen == {p.dtype for p in grown.model.parameters()} == {own}


def test_a_loader_in_another_dtype_than_the_model_is_refused_in_one_sentence() -> None:
    loader = DataLoader(TensorDataset(X.double(), Y), 16)
    wanted = (
        r"the batches of val hold torch.float64 and the weights of Sequential are torch.float32, .*; convert "
        r"the batches with .to\(torch.float32\), or the model"
    )
    with pytest.raises(UserError, match=wanted):
        esper.grow(models.small_mlp(), train=loader, val=loader, controller="static", progress=False)
