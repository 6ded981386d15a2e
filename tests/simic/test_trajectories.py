from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load

from esper.builders import make_environment
from esper.config import load_config
from esper.lifecycle.actions import Actions, Blueprint, Head, Op, Rate, Style
from esper.lifecycle.rates import LEAST_SCALE, MOST_SCALE
from esper.runs.trajectories import NO_BLUEPRINT, UNMEASURED, TrajectoryFolder
from esper.simic.rollout import EpisodeRecord, play
from esper.simic.telemetry import build_trajectories, describe_host, episode_events
from esper.tamiyo.policy.action_masks import ActionMasks
from esper.tamiyo.policy.features import Observation
from esper.tamiyo.scripted import Static
from tests.controllers import Scheduled
from tests.simic.test_rates import FLAT, rate_environment
from tests.simic.worlds import QUICK, make_residual
from tests.slots import actions_of
from tests.tiny import TINY


def test_trajectories_hold_what_the_episode_recorded(tmp_path: Path) -> None:
    environment = make_environment(load_config(overrides=[*TINY, "episode.steps=8"]))
    record = play(environment, Scheduled(range(0, 99, 2)), 0)
    folder = TrajectoryFolder(tmp_path)
    folder.write(build_trajectories(record, describe_host(environment.population), 5))
    columns = load(folder.read_bytes(5))
    np.testing.assert_array_equal(columns["stage"], record.stage)
    np.testing.assert_allclose(columns["alpha"] / 255, record.alpha, atol=0.002)
    np.testing.assert_array_equal(
        np.where(columns["blueprint"] == NO_BLUEPRINT, -1, columns["blueprint"].astype(int)), record.blueprint
    )
    np.testing.assert_array_equal(columns["op"], record.choices[:, :, Head.OP])
    measured = np.isfinite(record.contribution[:-1])
    np.testing.assert_array_equal(columns["contribution"] != UNMEASURED, measured)
    np.testing.assert_allclose(
        columns["contribution"][measured] / 100, record.contribution[:-1][measured], atol=0.006
    )
    np.testing.assert_array_equal(columns["parameters"], record.parameters)
    np.testing.assert_allclose(columns["spent"][-1], record.flops, rtol=1e-6)
    assert (np.diff(columns["spent"], axis=0) > 0).all()
    assert record.germinated.any()
    assert columns["seed_parameters"].shape == (environment.num_slots, len(Blueprint))


def test_a_slot_beyond_the_255th_keeps_its_number() -> None:
    environment = make_environment(load_config(overrides=list(TINY)))
    record = play(environment, Static(), 0)
    record.choices[:, :, Head.SLOT] = 300
    columns = build_trajectories(record, describe_host(environment.population), 1).columns
    assert (columns["op_slot"] == 300).all()


@pytest.mark.parametrize("blueprint", [Blueprint.WIDEN_FULL, Blueprint.NORM])
def test_the_parameters_of_an_event_are_those_that_the_network_gets(blueprint: Blueprint) -> None:
    """A seed that is blended through a gate has one more part, unless it grows the block ahead."""
    rules = QUICK.model_copy(update={"block_blueprints": ("norm", "widen_full")})
    environment = make_residual(members=(0,), steps=2, folds=0, lifecycle=rules)
    environment.reset(0)
    plant = {Head.OP: Op.GERMINATE, Head.BLUEPRINT: blueprint, Head.STYLE: Style.GATED_GATE}

    class Once(Static):
        def decide(self, observation: Observation, masks: ActionMasks, step: int) -> Actions:
            return actions_of([plant if step == 0 else {}])

    record = play(environment, Once(), 0)
    (event,) = episode_events(record, 1)
    assert event.numbers["parameters"] == record.parameters[1, 0] - record.host_parameters


def test_the_parts_of_a_host_add_up_to_it() -> None:
    environment = make_environment(load_config(overrides=list(TINY)))
    host = environment.population.network.host
    parts = describe_host(environment.population)
    assert len(parts) == host.num_slots + 1
    assert parts[-1].name == "head"
    assert sum(part.parameters for part in parts) == environment.host_parameters
    assert all(part.layers for part in parts)


# ---- learning rates that a controller sets ---------------------------------------------------------------


class Drawn(Static):
    """Does what was drawn to the rates, legal or not."""

    def __init__(self, choices: np.ndarray) -> None:
        self.choices = torch.from_numpy(choices)  # [T, N]

    def decide(self, observation: Observation, masks: ActionMasks, step: int) -> Actions:
        return Actions(Actions.wait(self.choices.shape[1]).choices, self.choices[step])


def changes_one_by_one(
    record: EpisodeRecord, asked: np.ndarray, n: int
) -> list[tuple[int, Rate, float, float]]:
    """What one member's rate goes through: step, choice, scale before and after."""
    assert record.rates is not None
    steps, scale, falls_at, found = len(asked), float(record.rates[0, n, 1]), 0.5, []
    for t in range(steps):
        now, choice, before = t / steps, Rate(int(asked[t, n])), scale
        if now >= falls_at or choice is Rate.KEEP:
            continue
        scale *= {Rate.DOUBLE: 2.0, Rate.HALVE: 0.5, Rate.DECAY: 1.0}[choice]
        if not LEAST_SCALE <= scale <= MOST_SCALE:
            scale = before
            continue
        falls_at = now if choice is Rate.DECAY else falls_at
        found.append((t, choice, before, scale))
    return found


@settings(max_examples=10, deadline=None)
@given(st.integers(2, 12), st.integers(0, 2**20), st.sampled_from([1.0, 1e4]))
def test_every_change_of_a_rate_is_an_event_and_a_mark(steps: int, seed: int, span: float) -> None:
    """Against a loop over one member, and against the rates that the optimizer uses."""
    # Most of the draws double, so that the largest scale is met.
    asked = np.random.default_rng(seed).choice(4, (steps, 3), p=[0.2, 0.6, 0.1, 0.1])
    environment = rate_environment(steps=steps, span=span, population=FLAT.model_copy(update={"warmup": 0.0}))
    trained = []

    def note(_: object) -> None:
        population = environment.population
        trained.append(population._scaled_rates(torch.full((1, 3), environment.clock / steps))[0])

    record = play(environment, Drawn(asked), 0, on_step=note)
    assert record.rates is not None
    np.testing.assert_allclose(record.rates[1:, :, 0], torch.stack(trained), rtol=1e-6, atol=1e-7)
    columns = build_trajectories(record, [], 1).columns
    np.testing.assert_array_equal(columns["rate"], record.rates[..., 0])
    events = [event for event in episode_events(record, 1) if event.kind == "rate_changed"]
    for n in range(3):
        expected = changes_one_by_one(record, asked, n)
        marks = columns["rate_choice"][:, n]
        assert [(t, Rate(int(marks[t]))) for t in np.flatnonzero(marks)] == [row[:2] for row in expected]
        told = [event for event in events if event.member == record.members[n]]
        assert [(event.step, event.rate) for event in told] == [(t, rate.name) for t, rate, *_ in expected]
        for event, (t, _, before, after) in zip(told, expected, strict=True):
            assert event.numbers["rate_before"] == pytest.approx(before)
            assert event.numbers["rate"] == pytest.approx(after)
            assert event.numbers["accuracy"] == pytest.approx(float(record.accuracy[t, n]))


def test_a_step_that_the_governor_took_back_changed_no_rate() -> None:
    environment = rate_environment(steps=4)
    record = play(environment, Drawn(np.full((4, 3), int(Rate.DOUBLE))), 0)
    panicked = record.panicked.copy()
    panicked[1, 2] = True
    told = episode_events(replace(record, panicked=panicked), 1)
    assert sum(event.kind == "rate_changed" for event in told) == 11
    assert not any(event.kind == "rate_changed" and (event.step, event.member) == (1, 2) for event in told)


def test_where_nobody_sets_rates_nothing_is_told_of_them() -> None:
    environment = rate_environment(steps=2, rates=False)
    record = play(environment, Static(), 0)
    assert record.rates is None
    assert not {"rate", "rate_choice"} & build_trajectories(record, [], 1).columns.keys()
    assert episode_events(record, 1) == []
