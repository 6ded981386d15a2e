"""No combination of open choices takes a member over its budget."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import esper
from esper.growing.settings import LimitedController
from esper.lifecycle.actions import STYLE_BLEND, Blend, Blueprint, Op, Style
from esper.lifecycle.config import LifecycleConfig
from esper.lifecycle.legality import holds_seed
from esper.lifecycle.slot_states import SlotRecord, SlotStates
from esper.lifecycle.stages import Stage
from esper.population.blueprints import gate_parameter_count, parameter_count
from esper.population.config import PopulationConfig
from esper.population.hosts import Host
from esper.population.population import Population
from esper.tamiyo.policy.action_masks import compute_batch_masks
from esper.tamiyo.scripted import RandomLegal, Static
from tests.growing import models
from tests.scenes import nothing_is_empty

WIDTHS = (4, 9)
HOST = Host([torch.nn.Identity(), torch.nn.Identity()], "cnn", torch.nn.Identity(), WIDTHS, 2)
BODIES = Population(lambda: HOST, PopulationConfig(), torch.arange(1))
RULES = LifecycleConfig()


def price(slot: int, blueprint: int, style: int) -> int:
    gated = STYLE_BLEND[Style(style)] is Blend.GATE
    return parameter_count(blueprint, "cnn", WIDTHS[slot], 2) + gated * gate_parameter_count(WIDTHS[slot])


@st.composite
def slots(draw: st.DrawFn) -> list[SlotRecord | None]:
    kinds = st.sampled_from([Stage.DORMANT, Stage.BLENDING, Stage.HOLDING, Stage.FOSSILIZED, Stage.TRAINING])
    row: list[SlotRecord | None] = []
    for _ in WIDTHS:
        stage = draw(kinds)
        blueprint = draw(st.sampled_from([1, 3, 5, 7]))
        empty = stage is Stage.DORMANT
        row.append(
            None if empty else SlotRecord(stage=stage, blueprint=blueprint, style=draw(st.integers(0, 3)))
        )
    return row


@given(slots(), st.integers(9, 2500))
@settings(deadline=None, max_examples=80)
def test_whatever_is_open_fits(row: list[SlotRecord | None], budget: int) -> None:
    states = SlotStates.from_records([row])
    spent = sum(price(s, r.blueprint, r.style) for s, r in enumerate(row) if r is not None)
    BODIES.prune(torch.ones(1, len(WIDTHS), dtype=torch.bool))
    BODIES.germinate(holds_seed(states), states.blueprint)
    limited = LimitedController(Static(), BODIES, budget)
    assert int(limited.parameters_left(states)) == budget - spent
    full = compute_batch_masks(states, None, RULES, "cnn")
    masks = limited.limit_masks(states, full)
    assert nothing_is_empty(masks)
    open_styles = masks.style[0].nonzero().flatten().tolist()
    for s in masks.slot_by_op[0, Op.GERMINATE].nonzero().flatten().tolist():
        for b, style in itertools.product(masks.blueprint[0].nonzero().flatten().tolist(), open_styles):
            assert spent + price(s, b, style) <= budget
    for s in masks.slot_by_op[0, Op.SET_ALPHA_TARGET].nonzero().flatten().tolist():
        record = row[s]
        assert record is not None
        grows = max(price(s, record.blueprint, style) for style in open_styles) - price(
            s, record.blueprint, record.style
        )
        assert grows <= 0 or spent + grows <= budget
    for s, b in itertools.product(range(2), (Blueprint.NORM,)):  # what is shut does not fit, or was not legal
        if full.slot_by_op[0, Op.GERMINATE, s] and spent + price(s, b, Style.LINEAR_ADD) <= budget:
            assert masks.slot_by_op[0, Op.GERMINATE, s]


@pytest.mark.parametrize(
    ("controller", "budget", "settings"),
    [
        ("schedule:widen_full@0.1+lora@0.4", 80, {"folds": 1, "epochs": 5}),  # which looks at no masks
        ("schedule:widen_full@0.1+lora@0.4", 200, {"folds": 1, "epochs": 5}),
        (RandomLegal(germination_rate=1.0), 120, {"epochs": 25}),
        (RandomLegal(germination_rate=1.0), None, {"epochs": 12, "blueprints": ["LORA"]}),
    ],
)
def test_a_run_stays_within_its_budget_and_its_blueprints(
    controller: Any, budget: int | None, settings: dict[str, Any]
) -> None:
    limits = {"budget": budget, "progress": False, **settings}
    grown = esper.grow(models.small_mlp(), train=models.table(), controller=controller, **limits)
    assert 0 < grown.record.parameters.max() - grown.host_parameters <= (budget or 10**9)
    planted = grown.record.seen_blueprint
    if budget is None:
        assert set(planted[planted >= 0].tolist()) == {int(Blueprint.LORA)}
