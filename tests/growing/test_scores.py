"""What a model is judged by, measured over the whole of the validation data."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from sklearn.metrics import f1_score
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import esper
from esper.growing.result import Grown
from esper.utils.errors import UserError
from tests.growing import models

X, Y = models.table(90)


@pytest.fixture(autouse=True)
def _same_first_weights() -> None:
    torch.manual_seed(0)


def static(model: nn.Module, train: Any, val: Any = None, **settings: Any) -> Grown:
    chosen = {"controller": "static", "epochs": 3, "lr": 1e-2, "progress": False} | settings
    return esper.grow(model, train=train, val=val, **chosen)


def test_a_metric_that_does_not_average_is_measured_over_all_samples() -> None:
    def f1(outputs: Tensor, targets: Tensor) -> float:
        return float(f1_score(targets.numpy(), outputs.argmax(1).numpy(), average="macro", zero_division=0))

    grown = static(models.small_mlp(), (X[:40], Y[:40]), (X[40:], Y[40:]), metric=f1, validation_batch=7)
    assert grown.record.accuracy[-1, 0] == pytest.approx(f1(grown.model(X[40:]), Y[40:]), abs=1e-6)


def test_float_targets_with_a_loss_of_ones_own_are_scored_by_that_loss() -> None:
    several = F.one_hot(Y, 3).float()  # several yes-or-no questions at once
    grown = static(
        models.small_mlp(), (X, several), loss=F.binary_cross_entropy_with_logits, epochs=20, batch_size=8
    )
    assert grown.score_name == "share of the first loss gone"
    assert grown.record.accuracy[-1, 0] > grown.record.accuracy[0, 0] + 0.05


def test_outputs_and_targets_of_any_shape_with_functions_of_ones_own() -> None:
    def first_only(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.mse_loss(outputs[:, 0], targets)

    grown = static(models.small_mlp(), (X, X[:, 0]), loss=first_only, metric=lambda o, t: -first_only(o, t))
    assert grown.record.loss[-1, 0] < grown.record.loss[0, 0]


def test_a_loss_from_which_no_score_can_be_made_asks_for_a_metric() -> None:
    with pytest.raises(UserError, match="give metric="):
        static(models.small_mlp(), (X, X[:, :2]), loss=lambda o, t: -o.square().mean() - 1.0)


def test_class_sorted_validation_is_seen_whole() -> None:
    x, y = models.table(2300)
    order = y.argsort()
    grown = static(models.small_mlp(), (x[:200], y[:200]), (x[order], y[order]), epochs=1)
    measured = (grown.model(x).argmax(1) == y).float().mean().item()
    assert grown.record.accuracy[-1, 0] == pytest.approx(measured, abs=1e-5)


def test_minibatches_are_those_of_the_loader() -> None:
    model = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))
    grown = static(model, DataLoader(TensorDataset(X, Y), batch_size=9), (X, Y), epochs=2)
    assert int(grown.model.state_dict()["1.num_batches_tracked"]) == grown.epoch * 10


def test_bytes_reach_the_model_as_bytes() -> None:
    class Scaled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            assert x.dtype == torch.uint8
            return x.float().flatten(1) / 255.0

    model = nn.Sequential(Scaled(), nn.Linear(16, 6), nn.ReLU(), nn.Linear(6, 3))
    images = torch.randint(0, 256, (60, 1, 4, 4), dtype=torch.uint8)
    assert static(model, (images, Y[:60])).history


def test_the_device_may_be_found() -> None:
    assert static(models.small_mlp(), (X, Y), device="auto", epochs=1).history
