"""Controllers of the learning rate against slow references, and in a real environment."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from esper.controllers import load_controller
from esper.lifecycle.actions import Actions, Head, Op, Rate
from esper.lifecycle.config import LifecycleConfig
from esper.lifecycle.engine import apply
from esper.lifecycle.slot_states import SlotEvidence, SlotStates
from esper.simic.config import EpisodeConfig
from esper.simic.environment import GrowthEnvironment
from esper.tamiyo.controller import EpisodeInfo
from esper.tamiyo.policy.action_masks import compute_batch_masks
from esper.tamiyo.rates import RatePlans, ReactiveRate
from esper.utils.errors import UserError
from tests.lifecycle.strategies import fits_of
from tests.scenes import plain_observation
from tests.simic.worlds import make_residual

OPEN = torch.ones(1, 4, dtype=torch.bool)


def slow_rule(losses: list[float], fall: float, window: int) -> list[int]:
    """One member whose rate may always be changed: what the rule does after each validation."""
    done, changed = [], 0
    for t, loss in enumerate(losses):
        choice = Rate.KEEP
        if t - changed >= window and t >= window:
            fallen = 1.0 - loss / losses[t - window]
            if not fallen > fall:
                choice = Rate.DOUBLE if fallen >= 0 else Rate.HALVE
                changed = t
        done.append(int(choice))
    return done


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.sampled_from([0.25, 0.5, 0.75, 1.0, 2.0, math.nan]), min_size=1, max_size=12),
    st.sampled_from([0.0, 0.1, 0.3]),
    st.integers(1, 4),
    st.integers(0, 12),
)
def test_the_rule_follows_the_reference_also_when_it_is_resumed(
    losses: list[float], fall: float, window: int, stop: int
) -> None:
    states = SlotStates.empty(1, 2)
    masks = replace(compute_batch_masks(states), rate=OPEN)
    info = EpisodeInfo(torch.zeros(1, dtype=torch.long), 2, 0, torch.device("cpu"))
    rule, found = ReactiveRate(fall, window), []
    rule.begin(info)
    for t in range(len(losses)):
        if t == stop:
            saved, rule = rule.state_dict(), ReactiveRate(fall, window)
            rule.begin(info)
            rule.load_state_dict(saved)
        history = ([math.nan] * 5 + losses[: t + 1])[-5:]
        seen = plain_observation(states, loss_history=torch.tensor([history]))
        actions = rule.decide(seen, masks, t)
        assert actions.rate is not None
        assert not actions.choices.any()
        found.append(int(actions.rate))
    assert found == slow_rule(losses, fall, window)


def test_a_rule_keeps_what_is_not_legal_and_refuses_bad_settings() -> None:
    states = SlotStates.empty(1, 1)
    only_keep = replace(compute_batch_masks(states), rate=torch.tensor([[True, False, False, False]]))
    rule, seen = ReactiveRate(0.5, 1), plain_observation(states, loss_history=torch.ones(1, 5))
    rule.begin(EpisodeInfo(torch.zeros(1, dtype=torch.long), 1, 0, torch.device("cpu")))
    for t in range(4):
        actions = rule.decide(seen, only_keep, t)
        assert actions.rate is not None
        assert actions.rate.tolist() == [Rate.KEEP]
    with pytest.raises(UserError, match=r"set episode\.rates to true"):
        rule.decide(seen, compute_batch_masks(states), 4)
    with pytest.raises(ValueError, match="window is 5"):
        ReactiveRate(0.1, 5)
    named = load_controller("reactive:0.05")
    assert isinstance(named, ReactiveRate)
    assert (named.fall, named.window) == (0.05, ReactiveRate().window)
    with pytest.raises(UserError, match="the share by which the loss must fall"):
        load_controller("reactive:2")


def played(members: Sequence[int]) -> tuple[GrowthEnvironment, torch.Tensor, RatePlans]:
    """An episode of drawn plans, with what they asked for.  # choices and rate [T, N, heads + 1]"""
    episode = EpisodeConfig(steps=16, clock="steps", rates=True, rate_span=100.0)
    environment = GrowthEnvironment(replace(make_residual(members, 16).spec, episode=episode))
    plans, asked, observation = RatePlans(), [], environment.reset(3)
    plans.begin(EpisodeInfo(environment.members, environment.num_slots, 5, environment.device, 3))
    while not environment.done:
        masks = environment.masks()
        actions = plans.decide(observation, masks, environment.clock)
        assert masks.rate is not None
        assert actions.rate is not None
        assert masks.rate.gather(1, actions.rate.unsqueeze(1)).all()
        asked.append(actions.columns())
        result = environment.step(actions)
        assert result.outcome.legal.all()
        observation = result.observation
    return environment, torch.stack(asked), plans


def test_plans_lead_to_their_target_then_decay_and_sometimes_grow() -> None:
    environment, asked, plans = played(range(24))
    rates = environment.state.rates
    assert rates is not None
    octaves = (plans._target / rates.scale).log2()
    assert (octaves.abs() <= 0.5 + 1e-4).all(), "a target of 0.1 to 10 is reached"
    decays = (asked[..., -1] == Rate.DECAY).sum(0)
    assert torch.equal(decays, plans._decay.isfinite().long()), "once, where the plan says so"
    grown = (asked[..., Head.OP] == Op.GERMINATE).any(0)
    assert grown.any()
    assert not grown.all()
    environment, asked, plans = played([4] * 6)
    assert torch.equal(played([4] * 6)[1], asked)
    assert len(set(plans._target.tolist())) == 6, "a plan for each row of one member"


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 1000), st.integers(1, 6), st.integers(1, 4))
def test_where_growth_is_not_allowed_nothing_is_planted(seed: int, members: int, slots: int) -> None:
    rules, states = LifecycleConfig(allow_growth=False), SlotStates.empty(members, slots)
    masks = compute_batch_masks(states, config=rules, topology="mlp")
    assert not masks.op[:, Op.GERMINATE].any()
    assert torch.equal(masks.op.sum(1), torch.ones(members, dtype=torch.long)), "WAIT is left"
    choices = torch.from_numpy(np.random.default_rng(seed).integers(0, 3, (members, len(Head))))
    choices[:, Head.OP], choices[:, Head.SLOT] = int(Op.GERMINATE), 0
    evidence = SlotEvidence.unmeasured(members, slots)
    outcome = apply(states, Actions(choices), evidence, rules, fits_of(states, "mlp"))
    assert not outcome.germinated.any()
    assert not outcome.succeeded.any()
