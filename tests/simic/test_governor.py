"""The governor against a slow one that looks at one member at a time."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace
from unittest import mock

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from esper.lifecycle.actions import Blueprint, Head, Op
from esper.lifecycle.stages import Stage
from esper.population.forms import NO_FORM
from esper.simic import governor
from esper.simic.config import GovernorConfig
from esper.simic.environment import GrowthEnvironment
from esper.simic.governor import Governor, LossHistory, grown_since, judge, roll_back
from tests.simic.worlds import make_environment, make_residual
from tests.slots import SlotRecord, actions_of, states_from_records

CHANCE = math.log(10)


class SlowGovernor:
    """One member. The rules as sentences."""

    def __init__(self) -> None:
        self.usual: list[float] = []
        self.spikes = 0
        self.learned = False

    def look(self, training_loss: float, loss: float) -> tuple[bool, bool]:
        """(panicked, good)"""
        finite = math.isfinite(training_loss) and math.isfinite(loss)
        spike = finite and self._is_spike(loss)
        self.spikes = self.spikes + 1 if spike else 0
        collapsed = self.learned and abs(loss - CHANCE) <= governor.COLLAPSE_BAND * CHANCE
        panicked = not finite or self.spikes >= governor.SPIKE_EPOCHS or collapsed
        if finite and loss < governor.LEARNED_SHARE * CHANCE:
            self.learned = True
        if panicked:
            self.spikes = 0
        good = finite and not spike and not panicked
        if good:
            self.usual = [*self.usual, loss][-governor.WINDOW :]
        return panicked, good

    def _is_spike(self, loss: float) -> bool:
        if len(self.usual) < governor.WINDOW_MIN or loss <= governor.SPIKE_LOSS:
            return False
        mean, deviation = statistics.fmean(self.usual), statistics.pstdev(self.usual)
        return loss > mean + governor.SPIKE_DEVIATIONS * deviation and loss > governor.SPIKE_RATIO * mean


losses = st.sampled_from([0.2, 1.0, 1.5, 2.2, CHANCE, 2.4, 3.0, 13.0, 30.0, 100.0, math.nan, math.inf])


@mock.patch.multiple(governor, WINDOW=6, WINDOW_MIN=3)  # so that short courses hold spikes
@settings(deadline=None, max_examples=150)
@given(st.lists(st.lists(losses, min_size=4, max_size=4), min_size=1, max_size=25))
def test_judge_equals_the_slow_governor(course: list[list[float]]) -> None:
    watch = LossHistory.empty(4, torch.device("cpu"))
    slow = [SlowGovernor() for _ in range(4)]
    for epoch in course:
        loss = torch.tensor(epoch, dtype=torch.float64)
        watch, panicked, good = judge(watch, loss.clamp(max=1e6), loss, CHANCE)
        expected = [member.look(value, value) for member, value in zip(slow, epoch, strict=True)]
        assert list(zip(panicked.tolist(), good.tolist(), strict=True)) == expected


def test_grown_since_finds_what_is_new_louder_or_further_on() -> None:
    seed = {"blueprint": Blueprint.CONV_LIGHT}
    saved = [
        None,
        SlotRecord(stage=Stage.TRAINING, age=3, **seed),
        SlotRecord(stage=Stage.BLENDING, age=6, alpha=0.4, **seed),
        SlotRecord(stage=Stage.HOLDING, age=9, alpha=1.0, **seed),
        SlotRecord(stage=Stage.BLENDING, age=9, alpha=0.8, **seed),
        SlotRecord(stage=Stage.TRAINING, age=9, **seed),
        SlotRecord(stage=Stage.HOLDING, age=9, alpha=1.0, **seed),
    ]
    now = [
        SlotRecord(stage=Stage.GERMINATED, age=1, **seed),  # new
        SlotRecord(stage=Stage.BLENDING, age=4, alpha=0.1, **seed),  # further on
        SlotRecord(stage=Stage.BLENDING, age=7, alpha=0.6, **seed),  # louder
        SlotRecord(stage=Stage.HOLDING, age=10, alpha=1.0, **seed),  # as it was
        SlotRecord(stage=Stage.BLENDING, age=10, alpha=0.5, **seed),  # quieter
        SlotRecord(stage=Stage.TRAINING, age=2, **seed),  # another seed in the same slot
        None,  # pruned since
    ]
    grown = grown_since(states_from_records([saved]), states_from_records([now]), torch.tensor([1]))
    assert grown.tolist() == [[True, True, True, False, False, True, False]]


def test_a_rollback_gives_a_seed_of_the_snapshot_back_its_slot() -> None:
    """Slots: another seed in place of a fossil, one that moved on, and a new one."""
    environment = make_environment(members=(0,), steps=4)
    environment.reset(0)
    seed, fossil = {"blueprint": Blueprint.MLP_SMALL}, {"stage": Stage.FOSSILIZED, "alpha": 1.0, "room": 1}
    before = [SlotRecord(age=9, **seed, **fossil), SlotRecord(stage=Stage.TRAINING, age=3, **seed), None]
    after = [
        SlotRecord(stage=Stage.TRAINING, age=1, blueprint=Blueprint.NORM),
        SlotRecord(stage=Stage.BLENDING, age=5, **seed),
        SlotRecord(stage=Stage.GERMINATED, age=1, **seed),
    ]
    measured = environment.state.evidence.replace(gradient_health=torch.ones(1, 3))
    saved = replace(environment.state, slots=states_from_records([before]), evidence=measured)
    state = replace(saved, slots=states_from_records([after]))
    restored, ended = roll_back(saved, state, torch.tensor([True]), torch.tensor([2]))
    assert ended.tolist() == [[True, True, True]], "each has an event"
    assert restored.slots.stage.tolist() == [[Stage.FOSSILIZED, Stage.PRUNED, Stage.PRUNED]]
    for name, value in saved.slots.tensors().items():
        assert torch.equal(restored.slots.tensors()[name][:, 0], value[:, 0]), name
    assert restored.evidence.gradient_health.isfinite().tolist() == [[True, False, False]]


# ---- in the environment ----------------------------------------------------------------------------------

PLANT = {Head.OP: Op.GERMINATE, Head.BLUEPRINT: Blueprint.MLP_SMALL, Head.ALPHA_TARGET: 2, Head.TEMPO: 0}


def act(environment: GrowthEnvironment, action: dict[Head, int], poisoned: bool = False) -> object:
    if poisoned:
        environment.population.hosts.weights[0] = math.nan
    return environment.step(actions_of([action] * environment.num_members))


def test_a_rollback_keeps_a_seed_that_did_not_move() -> None:
    environment = make_environment(members=(0, 1), steps=10)
    environment.reset(0)
    act(environment, PLANT)
    act(environment, {Head.OP: Op.ADVANCE})
    act(environment, {})
    good = {name: value.clone() for name, value in environment.population.tensors().items()}
    result = act(environment, {}, poisoned=True)  # it trains alone, and the host breaks
    assert not result.rolled_back.any()
    assert environment.slots.stage[0, 0] == Stage.TRAINING
    assert environment.slots.age[:, 0].tolist() == [3, 4]  # the clock of the seed is taken back with it
    for name, value in environment.population.tensors().items():
        per_member = value.shape[0] // 2
        assert torch.equal(value[:per_member], good[name][:per_member]), name
        if name == "hosts.weights":
            assert not torch.equal(value[per_member:], good[name][per_member:])


def test_two_rollbacks_in_a_row_come_back_to_the_same_rows_and_leave_older_seeds_alone() -> None:
    """A fossil from long ago and a suspect seed: the first panic ends the seed, the others nothing."""
    fossil = SlotRecord(
        stage=Stage.FOSSILIZED, blueprint=Blueprint.MLP_SMALL, alpha=1.0, alpha_target=1.0, age=9
    )
    environment = make_environment(members=(0, 1), steps=10)
    environment.reset(0, states_from_records([[fossil, None, None][: environment.num_slots]] * 2))
    second = {Head.SLOT: 1}
    act(environment, PLANT | second)
    act(environment, {Head.OP: Op.ADVANCE} | second)
    births = environment.population.births.clone()
    result = act(environment, {Head.OP: Op.ADVANCE} | second, poisoned=True)  # TRAINING → BLENDING
    assert result.rolled_back.nonzero().tolist() == [[0, 1]]
    assert environment.slots.stage[1, 1] == Stage.BLENDING
    assert torch.equal(environment.population.births, births)
    assert result.observation.evidence.gradient_health[0, 1].isnan()
    stages, first = environment.slots.stage[0].clone(), environment.population.hosts.weights[0].clone()
    assert stages[:2].tolist() == [Stage.FOSSILIZED, Stage.PRUNED]
    for _ in range(2):
        result = act(environment, {}, poisoned=True)
        assert result.panicked.tolist() == [True, False]
        assert not result.rolled_back.any()
        assert torch.equal(environment.slots.stage[0], stages)  # the seed that was ended does not come back
        assert torch.equal(environment.population.hosts.weights[0], first)
        bodies = environment.population.forms[0, :, 0] != NO_FORM
        assert bodies.nonzero().flatten().tolist() == [0]
    environment.slots.check()


@mock.patch.multiple(governor, WINDOW_MIN=0, SPIKE_LOSS=-1.0, SPIKE_DEVIATIONS=0.0, SPIKE_RATIO=0.0)
def test_a_fossil_that_was_folded_since_the_snapshot_outlives_the_seed_after_it() -> None:
    """Every loss counts as a spike, so that the snapshot is that of the beginning."""
    clone = SlotRecord(
        stage=Stage.FOSSILIZED, blueprint=Blueprint.CLONE, alpha=1.0, alpha_target=1.0, age=1, room=1
    )
    environment = make_residual(members=(0, 1), folds=1)
    environment.reset(0, states_from_records([[clone]] * 2))
    act(environment, {})
    assert (environment.slots.stage == Stage.DORMANT).all(), "it is folded"
    parameters, forms = environment.derived.parameters.tolist(), environment.population.forms.clone()
    result = act(environment, PLANT | {Head.BLUEPRINT: Blueprint.WIDEN_FULL}, poisoned=True)
    assert result.rolled_back.tolist() == [[True], [False]]
    assert environment.slots.stage[0, 0] == Stage.FOSSILIZED
    assert environment.slots.room[0, 0] == 1
    assert environment.derived.parameters[0] == parameters[0]
    act(environment, {})
    assert torch.equal(environment.population.forms[0], forms[0]), "it is folded again"


def test_without_a_governor_nothing_is_undone() -> None:
    environment = make_environment(members=(0, 1), steps=4, governor=GovernorConfig(enabled=False))
    environment.reset(0)
    result = act(environment, {}, poisoned=True)
    assert not result.panicked.any()
    assert result.observation.val_loss.isfinite().tolist() == [False, True]


def test_the_seed_after_a_rollback_is_another_draw() -> None:
    environment = make_environment(members=(0, 1), steps=10)
    environment.reset(0)
    births = environment.population.births.clone()
    act(environment, PLANT, poisoned=True)  # it breaks in the step of its birth
    assert (environment.slots.stage[:, 0] == torch.tensor([Stage.PRUNED, Stage.GERMINATED])).all()
    assert torch.equal(environment.population.births, births + 1)


@mock.patch.multiple(governor, WINDOW_MIN=2, SPIKE_EPOCHS=2)
def test_rows_under_suspicion_are_never_kept_and_the_finished_are_not_judged_again() -> None:
    """Weights 1, 2, 3 are good; 4 is the first spike of two; the second one goes back to 3.

    The last member ends on its first spike, and keeps its loss.
    """
    environment = make_environment(members=(0, 1, 2), steps=10)
    environment.reset(0)
    population, rows = environment.population, environment.state
    own = Governor(GovernorConfig(), population, rows, CHANCE)
    panics = []
    for weight, loss in ((1.0, 3.0), (2.0, 3.0), (3.0, 3.0), (4.0, 50.0), (5.0, 50.0)):
        population.hosts.weights.fill_(weight)
        history = rows.history.append(torch.tensor([loss, 3.0, loss]), rows.history.accuracy)
        measured = replace(rows, history=history)
        active = torch.tensor([True, True, weight < 5])
        after, panicked, _ = own.review(measured, torch.ones(3), active)
        panics.append(panicked.tolist())
    assert panics == [[False] * 3] * 4 + [[True, False, False]]
    assert population.hosts.weights[:, 0].tolist() == [3.0, 5.0, 5.0]
    assert after.history.loss.tolist() == [3.0, 3.0, 50.0]
