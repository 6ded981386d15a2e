"""What is offered to a controller, and done for it, is allowed and fits."""

from __future__ import annotations

from typing import Any

import pytest

import esper
from esper.lifecycle.actions import Blueprint
from esper.tamiyo.scripted import RandomLegal
from tests.growing import models


@pytest.mark.parametrize(
    "controller", ["schedule:widen_full@0.1+lora@0.4", RandomLegal(germination_rate=1.0)]
)
def test_a_run_stays_within_its_blueprints(controller: Any) -> None:
    limits = {"blueprints": ["LORA"], "epochs": 12, "progress": False}
    grown = esper.grow(models.small_mlp(), train=models.table(), controller=controller, **limits)
    planted = grown.record.seen_blueprint
    assert set(planted[planted >= 0].tolist()) == {int(Blueprint.LORA)}
