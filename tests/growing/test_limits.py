"""What is offered to a controller, and done for it, is allowed and fits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import esper
from esper.growing.settings import LimitedController
from esper.lifecycle.actions import Actions, Blueprint, Head, Op
from esper.lifecycle.config import LifecycleConfig
from esper.lifecycle.slot_states import SlotStates
from esper.population.config import PopulationConfig
from esper.population.hosts import Host
from esper.population.population import Population
from esper.tamiyo.policy.action_masks import compute_batch_masks
from esper.tamiyo.scripted import RandomLegal, Static
from tests.growing import models
from tests.scenes import nothing_is_empty

HOST = Host([torch.nn.Identity(), torch.nn.Identity()], "cnn", torch.nn.Identity(), (4, 9), 2)
BODIES = Population(lambda: HOST, PopulationConfig(), torch.arange(1))


def test_what_is_not_allowed_is_neither_offered_nor_done() -> None:
    limited = LimitedController(Static(), BODIES, ["NORM"])
    masks = limited.limit_masks(compute_batch_masks(SlotStates.empty(1, 2), None, LifecycleConfig(), "cnn"))
    assert nothing_is_empty(masks)
    assert masks.blueprint[0].nonzero().flatten().tolist() == [Blueprint.NORM]
    assert bool(masks.slot_by_op[0, Op.GERMINATE].all())
    for blueprint, op in ((Blueprint.NORM, Op.GERMINATE), (Blueprint.CONV_LIGHT, Op.WAIT)):
        asked = Actions.wait(1, torch.device("cpu"))
        asked.choices[0, Head.OP], asked.choices[0, Head.BLUEPRINT] = Op.GERMINATE, blueprint
        assert int(limited.limit_actions(asked)[Head.OP]) == op


@pytest.mark.parametrize(
    "controller", ["schedule:widen_full@0.1+lora@0.4", RandomLegal(germination_rate=1.0)]
)
def test_a_run_stays_within_its_blueprints(controller: Any) -> None:
    limits = {"blueprints": ["LORA"], "epochs": 12, "progress": False}
    grown = esper.grow(models.small_mlp(), train=models.table(), controller=controller, **limits)
    planted = grown.record.seen_blueprint
    assert set(planted[planted >= 0].tolist()) == {int(Blueprint.LORA)}
