"""No combination of open choices takes a member over its budget."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import esper
from esper.growing.settings import LimitedController
from esper.lifecycle.actions import STYLE_BLEND, Actions, Blend, Blueprint, Head, Op, Style
from esper.lifecycle.config import LifecycleConfig
from esper.lifecycle.legality import holds_seed
from esper.lifecycle.slot_states import SlotRecord, SlotStates
from esper.lifecycle.stages import Stage
from esper.population.blueprints import gate_parameter_count, parameter_count
from esper.population.config import PopulationConfig
from esper.population.hosts import Host
from esper.population.population import Population
from esper.tamiyo.controller import EpisodeInfo
from esper.tamiyo.policy.action_masks import compute_batch_masks
from esper.tamiyo.scripted import RandomLegal, Static
from esper.utils.errors import UserError
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


def test_a_run_stays_within_its_budget() -> None:
    grown = esper.grow(
        models.small_mlp(),
        train=models.table(),
        controller=RandomLegal(germination_rate=1.0),
        epochs=25,
        budget=120,
        batch_size=16,
        progress=False,
    )
    added = grown.record.parameters - grown.host_parameters
    assert added.max() > 0
    assert added.max() <= 120


@pytest.mark.parametrize("budget", [80, 200])
def test_a_controller_that_looks_at_no_masks_stays_within_the_budget_too(budget: int) -> None:
    grown = esper.grow(
        models.small_mlp(),
        train=models.table(),
        controller="schedule:widen_full@0.1+lora@0.4",
        epochs=5,
        budget=budget,
        folds=1,
        progress=False,
    )
    added = int(grown.record.parameters.max()) - grown.host_parameters
    assert 0 < added <= budget


def test_only_the_named_blueprints_grow() -> None:
    grown = esper.grow(
        models.small_mlp(),
        train=models.table(),
        controller=RandomLegal(germination_rate=1.0),
        epochs=12,
        blueprints=["LORA"],
        progress=False,
    )
    planted = grown.record.seen_blueprint
    assert set(planted[planted >= 0].tolist()) == {int(Blueprint.LORA)}


def test_a_budget_below_the_smallest_seed_is_refused() -> None:
    with pytest.raises(
        UserError, match=r"budget is 8 parameters and the smallest seed .* has 9; give a budget of"
    ):
        LimitedController(Static(), BODIES, 8)
    with pytest.raises(UserError, match="has 152"):
        LimitedController(Static(), BODIES, 100, ["CONV_LIGHT"])


def test_actions_pass_through() -> None:
    states = SlotStates.empty(1, 2)
    BODIES.prune(torch.ones(1, 2, dtype=torch.bool))
    limited = LimitedController(Static(), BODIES, 100)
    limited.begin(EpisodeInfo(torch.zeros(1, dtype=torch.long), 2, 0, torch.device("cpu")))
    masks = compute_batch_masks(states, None, RULES, "cnn")
    observation = type("Seen", (), {"slots": states})()
    actions = limited.decide(observation, masks, 0)
    assert isinstance(actions, Actions)
    assert int(actions[Head.OP]) == Op.WAIT
