"""One step of the rules: clocks, ramps, cooldown, totality."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from esper.lifecycle.actions import (
    Actions,
    AlphaCurve,
    AlphaSpeed,
    AlphaTarget,
    Blueprint,
    Head,
    Op,
    Style,
    Tempo,
)
from esper.lifecycle.config import LifecycleConfig
from esper.lifecycle.engine import apply, force_prune, merge_outcomes, tick
from esper.lifecycle.slot_states import AlphaMode, SlotEvidence, SlotRecord, SlotStates
from esper.lifecycle.stages import Stage
from tests.lifecycle.strategies import random_evidence
from tests.operations import count_operations
from tests.scenes import random_states

RULES = LifecycleConfig()
HELD = SlotRecord(Stage.HOLDING, 1, alpha=1.0, alpha_start=1.0, alpha_target=1.0, age=20, epochs_in_stage=3)


def act(states: SlotStates, *rows: dict[Head, int]) -> SlotStates:
    outcome = apply(states, Actions.of(rows), good(states), RULES, "cnn")
    assert bool(outcome.succeeded.all())
    return outcome.states


def good(states: SlotStates) -> SlotEvidence:
    ones = {n: torch.ones(states.stage.shape) for n in SlotEvidence.unmeasured(1, 1).tensors()}
    return SlotEvidence(**{**ones, "exploding": torch.zeros(states.stage.shape)})


def ticks(states: SlotStates, count: int) -> SlotStates:
    for _ in range(count):
        states = tick(states, RULES).states
    return states


def test_a_seed_from_germination_to_fossil() -> None:
    states = act(
        SlotStates.empty(1, 1),
        {Head.OP: Op.GERMINATE, Head.BLUEPRINT: 3, Head.STYLE: Style.SIGMOID_ADD, Head.TEMPO: Tempo.FAST,
         Head.ALPHA_TARGET: AlphaTarget.FULL},
    )  # fmt: skip
    assert (states.stage.item(), states.alpha.item(), states.alpha_target.item()) == (
        Stage.GERMINATED,
        0.0,
        1.0,
    )
    assert (states.alpha_mode.item(), states.age.item()) == (AlphaMode.HOLD, 0)
    states = ticks(states, 1)
    assert (states.age.item(), states.epochs_in_stage.item()) == (1, 1)
    states = ticks(act(states, {Head.OP: Op.ADVANCE}), 10)
    assert (states.stage.item(), states.epochs_in_stage.item(), states.alpha.item()) == (
        Stage.TRAINING,
        10,
        0.0,
    )
    states = act(states, {Head.OP: Op.ADVANCE})
    assert (states.stage.item(), states.alpha_curve.item()) == (Stage.BLENDING, AlphaCurve.SIGMOID)
    assert (states.alpha_mode.item(), states.alpha_steps_total.item()) == (AlphaMode.UP, 3)
    states = tick(states, RULES).states
    assert 0 < states.alpha.item() < 0.2, "a ramp takes its first step in the tick after it began"
    states = ticks(states, 2)
    assert (states.alpha.item(), states.alpha_mode.item()) == (1.0, AlphaMode.HOLD)
    assert states.stage.item() == Stage.BLENDING, "nothing advances by itself"
    states = act(act(states, {Head.OP: Op.ADVANCE}), {Head.OP: Op.FOSSILIZE})
    assert (states.stage.item(), states.age.item(), states.epochs_in_stage.item()) == (
        Stage.FOSSILIZED,
        14,
        0,
    )


def test_a_lower_target_parks_the_seed_in_blending() -> None:
    record = SlotRecord(Stage.TRAINING, 1, tempo=Tempo.FAST, alpha_target=0.5, age=10, epochs_in_stage=10)
    states = ticks(act(SlotStates.from_records([[record]]), {Head.OP: Op.ADVANCE}), 3)
    assert (states.alpha.item(), states.alpha_mode.item()) == (0.5, AlphaMode.HOLD)
    refused = apply(states, Actions.of([{Head.OP: Op.ADVANCE}]), good(states), RULES, "cnn")
    assert not refused.succeeded.item()
    choices = {
        Head.OP: Op.SET_ALPHA_TARGET,
        Head.ALPHA_TARGET: AlphaTarget.FULL,
        Head.ALPHA_SPEED: AlphaSpeed.FAST,
    }
    states = ticks(act(states, choices), 3)
    assert act(states, {Head.OP: Op.ADVANCE}).stage.item() == Stage.HOLDING


@pytest.mark.parametrize("speed", list(AlphaSpeed))
def test_leaving_full_alpha_leaves_holding(speed: AlphaSpeed) -> None:
    states = SlotStates.from_records([[HELD]])
    lower = {Head.OP: Op.SET_ALPHA_TARGET, Head.ALPHA_TARGET: AlphaTarget.HALF, Head.ALPHA_SPEED: speed,
             Head.STYLE: Style.GATED_GATE}  # fmt: skip
    after = act(states, lower)
    assert (after.stage.item(), after.epochs_in_stage.item(), after.style.item()) == (Stage.BLENDING, 0, 3)
    assert after.alpha_mode.item() == (AlphaMode.HOLD if speed is AlphaSpeed.INSTANT else AlphaMode.DOWN)
    full = act(states, {**lower, Head.ALPHA_TARGET: AlphaTarget.FULL})
    assert (full.stage.item(), full.alpha_mode.item(), full.epochs_in_stage.item()) == (Stage.HOLDING, 0, 3)


def test_a_ramped_prune_goes_down_in_blending_and_ends_in_the_tick_that_reaches_zero() -> None:
    states = SlotStates.from_records([[HELD]])
    states = act(states, {Head.OP: Op.PRUNE, Head.ALPHA_SPEED: AlphaSpeed.FAST})
    assert (states.stage.item(), states.alpha_mode.item()) == (Stage.BLENDING, AlphaMode.DOWN)
    assert states.prune_pending.item()
    states = ticks(states, 2)
    assert (states.stage.item(), states.blueprint.item()) == (Stage.BLENDING, 1)
    last = tick(states, RULES)
    assert (last.states.stage.item(), last.states.alpha.item()) == (Stage.PRUNED, 0.0)
    assert (last.pruned.item(), last.states.blueprint.item()) == (True, -1)


def test_cooldown_is_exact_and_ticked_once() -> None:
    states = act(SlotStates.from_records([[HELD]]), {Head.OP: Op.PRUNE, Head.ALPHA_SPEED: AlphaSpeed.INSTANT})
    seen = [Stage(states.stage.item())]
    for _ in range(8):
        states = tick(states, RULES).states
        seen.append(Stage(states.stage.item()))
    cooling = [Stage.PRUNED] + [Stage.EMBARGOED] * 5 + [Stage.RESETTING]
    assert seen == cooling + [Stage.DORMANT] * 2
    blank = ticks(SlotStates.empty(1, 1), 1)
    assert all(torch.equal(value, blank.tensors()[name]) for name, value in states.tensors().items())


def test_cooldown_follows_the_config() -> None:
    config = LifecycleConfig(embargo_ticks=2, resetting_ticks=3)
    states = force_prune(SlotStates.from_records([[HELD]]), torch.ones(1, 1, dtype=torch.bool))
    seen = []
    for _ in range(7):
        seen.append(states.stage.item())
        states = tick(states, config).states
    assert seen == [8, 9, 9, 10, 10, 10, 1]


def test_age_after_k_steps_is_k() -> None:
    states = act(SlotStates.empty(1, 2), {Head.OP: Op.GERMINATE, Head.SLOT: 1, Head.BLUEPRINT: 1})
    for k in range(1, 8):
        states = tick(states, RULES).states
        assert states.age.tolist() == [[0, k]]
        assert states.epochs_in_stage.tolist() == [[k, k]]


def test_force_prune_asks_neither_age_nor_stage_but_needs_a_seed() -> None:
    records = [
        SlotRecord(Stage.GERMINATED, 1),
        SlotRecord(Stage.FOSSILIZED, 1),
        None,
        SlotRecord(Stage.EMBARGOED),
    ]
    states = SlotStates.from_records([records, records])
    where = torch.tensor([[True] * 4, [False] * 4])
    after = force_prune(states, where)
    assert after.stage.tolist() == [[8, 8, 1, 9], [2, 7, 1, 9]]
    assert after.blueprint.tolist() == [[-1, -1, -1, -1], [1, 1, -1, -1]]
    with pytest.raises(ValueError, match=r"where has shape \(2,\); expected \(2, 4\)"):
        force_prune(states, where[:, 0])


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32 - 1), st.integers(1, 12), st.integers(1, 6))
def test_apply_is_total_whatever_the_integers(seed: int, members: int, slots: int) -> None:
    rng = np.random.default_rng(seed)
    states = random_states(rng, members, slots)
    wild = rng.integers(-3, 16, (members, len(Head)))
    wild[rng.random(wild.shape) < 0.1] = rng.choice([-(2**62), 2**62])
    outcome = apply(
        states, Actions(torch.from_numpy(wild)), random_evidence(rng, members, slots), RULES, "cnn"
    )
    failed = ~outcome.succeeded
    for name, value in outcome.states.tensors().items():
        assert torch.equal(value[failed], states.tensors()[name][failed]), name
    op = torch.from_numpy(wild)[:, Head.OP]
    assert not bool(outcome.legal[(op < 0) | (op >= len(Op))].any())
    slot = torch.from_numpy(wild)[:, Head.SLOT]
    assert not bool(outcome.legal[(op != Op.WAIT) & ((slot < 0) | (slot >= slots))].any())
    outcome.states.check()


def test_one_bad_row_leaves_the_others_alone() -> None:
    states = SlotStates.empty(3, 2)
    grow = {Head.OP: Op.GERMINATE, Head.BLUEPRINT: 1}
    rows = [grow, {Head.OP: 77, Head.SLOT: -5}, {**grow, Head.STYLE: 4}]
    outcome = apply(states, Actions.of(rows), SlotEvidence.unmeasured(3, 2), RULES, "cnn")
    assert outcome.succeeded.tolist() == [True, False, False]
    assert outcome.legal.tolist() == [True, False, False]
    assert outcome.executed_op.tolist() == [Op.GERMINATE, Op.WAIT, Op.WAIT]
    assert outcome.germinated.tolist() == [[True, False], [False, False], [False, False]]


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 2**32 - 1), st.integers(2, 200), st.integers(1, 9))
def test_a_member_moves_to_the_same_bits_alone_and_in_company(seed: int, members: int, slots: int) -> None:
    rng = np.random.default_rng(seed)
    states, evidence = random_states(rng, members, slots), random_evidence(rng, members, slots)
    choices = torch.from_numpy(rng.integers(0, (slots, 13, 4, 3, 3, 4, 5, 6), (members, len(Head))))
    together = tick(apply(states, Actions(choices), evidence, RULES, "cnn").states, RULES).states
    for i in rng.choice(members, min(members, 8), replace=False).tolist():
        own = SlotEvidence(**{n: t[i : i + 1] for n, t in evidence.tensors().items()})
        alone = tick(apply(states[i], Actions(choices[i : i + 1]), own, RULES, "cnn").states, RULES).states
        for name, value in alone.tensors().items():
            assert torch.equal(value[0], together.tensors()[name][i]), name


def test_states_are_values_and_are_not_written_into() -> None:
    states = random_states(np.random.default_rng(3), 8, 4)
    before = {name: value.clone() for name, value in states.tensors().items()}
    outcome = apply(states, Actions.wait(8), good(states), RULES, "cnn")
    tick(outcome.states, RULES)
    force_prune(states, states.enabled)
    assert all(torch.equal(value, before[name]) for name, value in states.tensors().items())


def test_mismatched_rows_are_errors() -> None:
    states, evidence = SlotStates.empty(3, 2), SlotEvidence.unmeasured(3, 2)
    with pytest.raises(ValueError, match="2 actions for 3 members"):
        apply(states, Actions.wait(2), evidence, RULES, "cnn")
    with pytest.raises(ValueError, match=r"evidence has shape \(3, 1\); expected \[3, 2\]"):
        apply(states, Actions.wait(3), SlotEvidence.unmeasured(3, 1), RULES, "cnn")
    with pytest.raises(ValueError, match="topology is 'rnn'"):
        apply(states, Actions.wait(3), evidence, RULES, "rnn")


def test_operations_of_a_step_do_not_depend_on_members_or_slots() -> None:
    def operations(members: int, slots: int) -> tuple[int, int]:
        states = random_states(np.random.default_rng(0), members, slots)
        actions, evidence = Actions.wait(members), SlotEvidence.unmeasured(members, slots)
        apply(states, actions, evidence, RULES, "cnn")  # the constant tables are built on the first call
        tick(states, RULES)
        step = count_operations(lambda: apply(states, actions, evidence, RULES, "cnn"))
        return step, count_operations(lambda: tick(states, RULES))

    assert len({operations(*size) for size in ((1, 1), (16, 3), (128, 25))}) == 1


@pytest.mark.parametrize(
    ("blueprint", "tempo", "ticks"),
    [
        (Blueprint.CLONE, Tempo.FAST, 0),
        (Blueprint.CLONE, Tempo.STANDARD, 5),
        (Blueprint.WIDEN_FULL, Tempo.FAST, 0),
        (Blueprint.NORM, Tempo.FAST, 3),
    ],
)
def test_a_grown_block_is_heard_in_full_at_once_when_its_tempo_is_fast(
    blueprint: Blueprint, tempo: Tempo, ticks: int
) -> None:
    record = SlotRecord(
        Stage.TRAINING, int(blueprint), tempo=int(tempo), alpha_target=1.0, epochs_in_stage=10
    )
    states = act(SlotStates.from_records([[record]]), {Head.OP: Op.ADVANCE})
    assert states.stage.item() == Stage.BLENDING
    assert states.alpha_steps_total.item() == ticks
    assert states.alpha.item() == (1.0 if ticks == 0 else 0.0)


@pytest.mark.parametrize(("target", "stage"), [(2, Stage.HOLDING), (0, Stage.BLENDING)])
def test_a_block_is_repeated_within_the_step_that_plants_it_when_its_tempo_is_fast(
    target: int, stage: Stage
) -> None:
    wish = {Head.OP: Op.GERMINATE, Head.BLUEPRINT: Blueprint.CLONE, Head.ALPHA_TARGET: target}
    fits = torch.ones(1, 1, len(Blueprint), dtype=torch.bool)
    for tempo, expected in ((Tempo.FAST, stage), (Tempo.SLOW, Stage.GERMINATED)):
        actions = Actions.of([wish | {Head.TEMPO: tempo}])
        evidence = SlotEvidence.unmeasured(1, 1)
        after = apply(SlotStates.empty(1, 1), actions, evidence, RULES, "cnn", fits=fits).states
        assert after.stage.item() == expected
        assert after.alpha.item() == (after.alpha_target.item() if tempo is Tempo.FAST else 0.0)


def test_a_fossil_is_folded_while_its_slot_has_room_and_keeps_it_otherwise() -> None:
    fossil = {"stage": Stage.FOSSILIZED, "blueprint": 1, "alpha": 1.0, "alpha_target": 1.0, "age": 9}
    states = SlotStates.from_records([[SlotRecord(**fossil, room=2), SlotRecord(**fossil)]])
    ticked = tick(states, RULES)
    assert ticked.folded.tolist() == [[True, False]]
    assert not ticked.pruned.any()
    after = ticked.states
    assert after.stage.tolist() == [[Stage.DORMANT, Stage.FOSSILIZED]]
    assert (after.room.tolist(), after.blueprint.tolist()) == ([[1, 0]], [[-1, 1]])
    assert (after.alpha.tolist(), after.age.tolist()) == ([[0.0, 1.0]], [[0, 10]])
    assert not tick(after, RULES).folded.any()
    after.check()
    one_at_most = LifecycleConfig(max_seeds=1)
    for room, free in ((1, True), (0, False)):
        alone = tick(SlotStates.from_records([[SlotRecord(**fossil, room=room), None]]), one_at_most).states
        action = Actions.of([{Head.OP: Op.GERMINATE, Head.SLOT: 1, Head.BLUEPRINT: 1}])
        outcome = apply(alone, action, good(alone), one_at_most, "cnn")
        assert bool(outcome.succeeded.all()) is free, "what is folded is host and counts as no seed"


def test_actions_one_after_the_other_tell_their_first_op_and_all_that_began() -> None:
    states, outcomes = SlotStates.empty(1, 2), []
    for action in (
        {Head.OP: Op.GERMINATE, Head.BLUEPRINT: 1},
        {Head.OP: Op.ADVANCE},
        {Head.OP: Op.FOSSILIZE},  # not legal yet
    ):
        outcomes.append(apply(states, Actions.of([action]), good(states), RULES, "cnn"))
        states = outcomes[-1].states
    joined = merge_outcomes(outcomes)
    assert (joined.asked_op.item(), joined.executed_op.item()) == (Op.GERMINATE, Op.GERMINATE)
    assert joined.succeeded.item()
    assert joined.germinated.tolist() == [[True, False]]
    assert joined.states.stage.tolist() == [[Stage.TRAINING, Stage.DORMANT]]
    assert outcomes[-1].asked_op.item() == Op.FOSSILIZE
    assert outcomes[-1].executed_op.item() == Op.WAIT
