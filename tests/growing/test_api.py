"""Ten lines, from a model and data to a grown model."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import esper
from esper.growing.result import Grown
from esper.lifecycle.actions import Actions
from esper.lifecycle.config import GateConfig, LifecycleConfig
from esper.utils.errors import UserError
from tests.controllers import Scheduled
from tests.growing import models

QUICK = LifecycleConfig(gates=GateConfig(training_epochs=1, min_health=0.0))


def eager() -> Scheduled:
    """Plants at once, so that a few epochs see a whole life."""
    return Scheduled(steps=(0, 4))


def grow(model: Any, data: Any, **settings: Any) -> Grown:
    chosen = {
        "controller": eager(),
        "epochs": 10,
        "lr": 1e-2,
        "batch_size": 16,
        "lifecycle": QUICK,
    } | settings
    return esper.grow(model, train=data, progress=False, **chosen)


def test_running_statistics_are_those_of_training() -> None:
    grown = grow(models.small_cnn(), models.images())
    statistics = grown.model.state_dict()
    assert int(statistics["1.num_batches_tracked"]) == grown.epoch * (48 // 16)
    assert not torch.equal(statistics["1.running_mean"], torch.zeros(4))


def test_static_trains_and_adds_nothing() -> None:
    grown = grow(models.small_mlp(), models.table(), controller="static")
    assert not grown.added
    assert "nothing was added" in grown.diff()
    assert grown.model.state_dict().keys() == models.small_mlp().state_dict().keys()


def test_regression_with_loaders_and_one_output() -> None:
    x = models.table(64)[0]
    loader = DataLoader(TensorDataset(x, x[:, 0] * 2 + x[:, 1]), batch_size=16)
    grown = esper.grow(models.small_mlp(outputs=1), loader, loader, epochs=20, lr=2e-2, progress=False)
    assert grown.score_name == "R²"
    assert grown.record.accuracy[-1, 0] > 0.5


def test_the_loss_and_the_metric_may_be_the_users_own() -> None:
    def hinge(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.multi_margin_loss(outputs, targets)

    def hits(outputs: Tensor, targets: Tensor) -> float:
        return float(np.mean(outputs.numpy().argmax(1) == targets.numpy()))

    grown = grow(models.small_mlp(), models.table(), loss=hinge, metric=hits)
    assert grown.score_name == "hits"
    assert grown.history[-1].train_loss < grown.history[0].train_loss  # labels are random, so of training


@pytest.mark.usefixtures("everything_stays")
def test_report_diff_and_plot_tell_the_story() -> None:
    grown = grow(models.small_cnn(), models.images())
    report = grown.report()
    item = grown.added[0]
    assert f"+ after {item.slot}: {item.blueprint} ({item.module}), {item.parameters:,} parameters" in report
    assert math.isfinite(item.contribution)
    assert "validation accuracy" in report
    assert "planted CONV_LIGHT after 3" in report
    score_axis, size_axis = grown.plot().axes
    planted = [epoch.epoch for epoch in grown.history if epoch.decision.startswith("planted")]
    assert [line.get_xdata()[0] for line in score_axis.lines[1:]] == planted
    assert all(tick == int(tick) for tick in size_axis.get_xticks())


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"budget": 8}, "budget is 8 parameters and the smallest seed that fits this model has 13"),
        ({"blueprints": ["CONV_LIGHT"]}, "in a mlp allowed are NORM, LORA"),
        ({"controller": "gardener"}, "controller is 'gardener'; .*allowed are tamiyo"),
        ({"controller": object()}, "without begin and decide"),
        ({"epochs": 0}, "epochs is 0; give a whole number, at least 1"),
        ({"learning_rate": 1.0}, "no setting 'learning_rate'; allowed are objective"),
        ({"engine": "live"}, "engine is 'live', and esper.grow no longer takes it: .*; leave engine out"),
        ({"members": 8}, "members is 8, and esper.grow no longer takes it: .*; leave members out"),
        ({"control": "wider"}, "control is 'wider', and esper.grow no longer takes it"),
        ({"graphs": False}, "graphs has no effect in esper.grow; allowed are objective"),
        ({"lr": -1.0}, "lr is -1.0; allowed is a number above 0"),
        ({"objective": "regression"}, "give one output for each target"),
        ({"device": "abacus"}, "device is 'abacus'; allowed are auto"),
        ({"loss": lambda o, t: F.cross_entropy(o, t, reduction="none")}, "it must return one: take the mean"),
    ],
)
def test_bad_settings_are_told_in_one_sentence(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence) as told:
        grow(models.small_mlp(), models.table(), **settings)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    ("outputs", "targets", "sentence"),
    [
        (2, models.table()[1], "the targets run from 0 to 2, but the model has 2 outputs"),
        (3, models.text(60)[1], "end the model with one output for each class"),
    ],
)
def test_outputs_of_the_wrong_shape(outputs: int, targets: Tensor, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence) as told:
        grow(models.small_mlp(outputs), (models.table()[0], targets))
    assert "\n" not in str(told.value)


def test_the_shipped_controller_grows_a_model_of_ones_own() -> None:
    from esper.controllers import make_controller
    from esper.simic.learner import LearnedController

    controller = make_controller("tamiyo", torch.device("cpu"))
    assert isinstance(controller, LearnedController)
    grown = grow(models.small_mlp(), models.table(), controller=controller, epochs=3, force=True)
    assert len(grown.history) == 3


def test_import_is_quick_and_late() -> None:
    import subprocess
    import sys

    code = "import sys, esper; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match="no attribute 'shrink'; it has"):
        esper.shrink  # noqa: B018


class Waits:
    """Begins and decides, and says nothing of whether it looks."""

    def begin(self, scene: Any) -> None:
        self.actions = Actions.wait(scene.num_members, scene.device)

    def decide(self, observation: Any, masks: Any, step: int) -> Actions:
        return self.actions


def test_a_controller_of_ones_own_needs_to_begin_and_to_decide_alone() -> None:
    grown = grow(models.small_mlp(), models.table(), controller=Waits(), epochs=1)
    assert grown.diff().endswith("nothing was added")


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({}, "ask for it with controller='schedule:"),
        ({"controller": "tamiyo"}, "tamiyo does not grow here, because it was trained on hosts of esper"),
        ({"controller": "schedule"}, "schedule does not grow here"),
    ],
)
def test_where_growth_is_not_known_to_pay_nothing_grows_and_it_is_said(
    asked: dict[str, Any], said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    data, chosen = models.table(), {**asked, "epochs": 2}
    grown = esper.grow(models.small_mlp(), data, baseline=True, budget=1, **chosen)
    assert grown.diff().endswith("nothing was added")
    (told,) = [line for line in grown.report().splitlines() if said in line]
    assert told in capfd.readouterr().err, "beside the bar as well"
    assert grown.baseline is not None
    assert grown.baseline.record is grown.record, "nothing is trained twice"
    if asked.get("controller") == "tamiyo":
        forced = esper.grow(models.small_mlp(), data, force=True, progress=False, **chosen)
        assert said not in forced.report()


def test_a_grower_without_a_controller_says_why_nothing_grows() -> None:
    model = models.small_mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    grower = esper.Grower(model, optimizer, train=models.table(), epochs=2)
    first, second = grower.step(), grower.step()
    assert first == f"waited; {grower.remarks[0]}"
    assert second == "the end"
    assert "controller='schedule:" in first
