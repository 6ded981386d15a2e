"""A living model goes back to what it was, in the same process or in another: weights, seeds and moments."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from esper.growing.batches import loaders_of
from esper.growing.live import LivePopulation
from esper.growing.live_environment import LiveEnvironment, LiveModel
from esper.growing.settings import settings_of
from esper.lifecycle.actions import Blueprint, Style
from esper.lifecycle.slot_states import SlotStates
from esper.lifecycle.stages import Stage
from esper.population.data import Clock
from tests.growing import models

CPU = torch.device("cpu")
X, Y = models.images(32)


def living(model: nn.Module, own: bool = True, **settings: Any) -> LivePopulation:
    """A population of one over these weights; with an optimiser of the user's where asked."""
    chosen = settings_of({"batch_size": 16, "lr": 1e-2, **settings})
    live = LiveModel(model, loaders_of([(X, Y)], [(X, Y)], chosen), chosen, CPU, ["3", "7"])
    rule = None if own else torch.optim.AdamW(model.parameters(), lr=1e-2)
    return LiveEnvironment(live, 8, rule).bodies


def states_of(live: LivePopulation, *stages: tuple[Stage, Blueprint, float]) -> SlotStates:
    """Slots in these stages, with these blueprints and strengths."""
    stage, blueprint, alpha = zip(*stages, strict=True)
    return SlotStates.empty(1, live.num_slots).replace(
        stage=torch.tensor([stage]),
        blueprint=torch.tensor([blueprint]),
        alpha=torch.tensor([alpha]),
        style=torch.full((1, live.num_slots), int(Style.LINEAR_ADD)),
    )


def train(live: LivePopulation, states: SlotStates, epoch: int) -> None:
    torch.manual_seed(epoch)
    if live.optimiser.owned:
        live.train_epoch(states, None, Clock(0, epoch, 8))
        return
    live.follow(states)
    live.optimiser.rule.zero_grad()
    live.judge(live.model, (X, Y)).loss.backward()
    live.optimiser.rule.step()
    live.train_isolated(states)


def assert_same(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, value in left.items():
        assert torch.equal(value, right[name]), name


@pytest.mark.parametrize("own", [True, False], ids=["ours", "the user's"])
@pytest.mark.parametrize("elsewhere", [False, True], ids=["rolled back", "in another process"])
def test_going_back_restores_moments_with_weights_so_that_training_repeats_to_the_bit(
    own: bool, elsewhere: bool
) -> None:
    torch.manual_seed(0)
    model = models.small_cnn()
    twin = copy.deepcopy(model)
    live = living(model, own)
    states = states_of(
        live, (Stage.TRAINING, Blueprint.CONV_LIGHT, 0.0), (Stage.BLENDING, Blueprint.NORM, 0.5)
    )
    live.germinate(states.stage > Stage.DORMANT, states.blueprint)
    train(live, states, 0)
    saved = live.snapshot()
    train(live, states, 1)
    wanted = {name: value.clone() for name, value in live.tensors().items()}
    if elsewhere:
        live = living(twin, own)
    else:
        live.prune(torch.tensor([[True, True]]))
    live.restore(saved)
    assert_same(live.tensors(), saved)
    train(live, states, 1)
    assert_same(live.tensors(), wanted)


def test_new_parameters_join_the_users_group_of_their_kind() -> None:
    model = models.small_cnn()
    chosen = settings_of({"batch_size": 16})
    live = LiveModel(model, loaders_of([(X, Y)], [(X, Y)], chosen), chosen, CPU, ["3", "7"])
    flat = [p for p in model.parameters() if p.ndim <= 1]
    thick = [p for p in model.parameters() if p.ndim > 1]
    rule = torch.optim.AdamW([{"params": flat, "weight_decay": 0.0}, {"params": thick, "weight_decay": 0.1}])
    bodies = LiveEnvironment(live, 8, rule).bodies
    states = states_of(
        bodies, (Stage.BLENDING, Blueprint.CONV_LIGHT, 0.5), (Stage.DORMANT, Blueprint(0), 0.0)
    )
    bodies.germinate(states.stage == Stage.BLENDING, states.blueprint)
    bodies.follow(states)
    assert {p.ndim for p in rule.param_groups[0]["params"]} == {1}
    assert min(p.ndim for p in rule.param_groups[1]["params"]) > 1
    assert sum(len(group["params"]) for group in rule.param_groups) > len(flat) + len(thick)
