"""What is legal, case by case."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from esper.lifecycle.actions import Actions, Blueprint, Head, Op, Tempo
from esper.lifecycle.config import GateConfig, LifecycleConfig
from esper.lifecycle.engine import apply
from esper.lifecycle.legality import legal_slots_by_op
from esper.lifecycle.slot_states import AlphaMode, SlotEvidence, SlotRecord, SlotStates
from esper.lifecycle.stages import Stage
from tests.scenes import random_states

RULES = LifecycleConfig()


def seed(stage: Stage, **fields: object) -> SlotRecord:
    return SlotRecord(stage=stage, blueprint=1, **fields)  # type: ignore[arg-type]


def legal(records: list[SlotRecord | None], op: Op, config: LifecycleConfig = RULES) -> list[bool]:
    answer: list[bool] = legal_slots_by_op(SlotStates.from_records([records]), config)[0, op].tolist()
    return answer


def executes(records: list[SlotRecord | None], op: Op, slot: int) -> bool:
    """Whether the executor calls the pair legal."""
    states = SlotStates.from_records([records])
    action = Actions.of([{Head.OP: op, Head.SLOT: slot, Head.BLUEPRINT: 1}])
    evidence = SlotEvidence.unmeasured(1, len(records))
    return bool(apply(states, action, evidence, RULES, "cnn").legal.item())


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 2**32 - 1), st.integers(1, 64), st.integers(1, 25))
def test_wait_is_legal_in_every_state(rng_seed: int, members: int, slots: int) -> None:
    states = random_states(np.random.default_rng(rng_seed), members, slots)
    assert torch.equal(legal_slots_by_op(states, RULES)[:, Op.WAIT], states.enabled)
    outcome = apply(states, Actions.wait(members), SlotEvidence.unmeasured(members, slots), RULES, "cnn")
    assert bool(outcome.legal.all())
    assert bool(outcome.succeeded.all())
    assert all(torch.equal(t, states.tensors()[n]) for n, t in outcome.states.tensors().items())


def test_wait_is_legal_whatever_its_other_heads_say() -> None:
    states = SlotStates.from_records([[SlotRecord(enabled=False), None]])
    for slot in (0, 1, -3, 99):
        action = Actions.of([{Head.OP: Op.WAIT, Head.SLOT: slot, Head.BLUEPRINT: 77}])
        assert apply(states, action, SlotEvidence.unmeasured(1, 2), RULES, "cnn").legal.item()


@pytest.mark.parametrize("stage", sorted(Stage))
def test_germination_waits_for_seeds_being_raised(stage: Stage) -> None:
    blocks = {Stage.GERMINATED, Stage.TRAINING, Stage.PRUNED, Stage.EMBARGOED, Stage.RESETTING}
    grown = stage in {Stage.GERMINATED, Stage.TRAINING, Stage.BLENDING, Stage.HOLDING, Stage.FOSSILIZED}
    neighbour = SlotRecord(stage=stage, blueprint=1 if grown else -1)
    assert legal([None, neighbour], Op.GERMINATE)[0] is (stage not in blocks)
    off = SlotRecord(stage=stage, blueprint=1 if grown else -1, enabled=False)
    assert legal([None, off], Op.GERMINATE) == [True, False], "a disabled slot neither helps nor blocks"


@pytest.mark.parametrize("stage", [Stage.GERMINATED, Stage.TRAINING, Stage.BLENDING, Stage.HOLDING])
def test_prune_needs_age_five_and_rest_and_the_executor_says_the_same(stage: Stage) -> None:
    cases = {
        (4, AlphaMode.HOLD): False,
        (5, AlphaMode.HOLD): True,
        (5, AlphaMode.UP): False,
        (5, AlphaMode.DOWN): False,
    }
    for (age, mode), expected in cases.items():
        records = [seed(stage, age=age, alpha_mode=mode)]
        assert legal(records, Op.PRUNE) == [expected]
        assert executes(records, Op.PRUNE, 0) is expected


def last_legal_step(record: SlotRecord | None, op: Op, config: LifecycleConfig = RULES) -> int:
    """The fewest steps that may be left when the op is legal."""
    states = SlotStates.from_records([[record]])
    return next(left for left in range(1, 40) if legal_slots_by_op(states, config, steps_left=left)[0, op, 0])


def test_what_cannot_be_finished_before_the_end_is_not_legal() -> None:
    """G2 asks for 10 epochs: plant, train alone for 10, blend for 3 or more, hold."""
    assert last_legal_step(None, Op.GERMINATE) == 1 + 1 + 10 + 3
    assert last_legal_step(seed(Stage.GERMINATED, tempo=Tempo.SLOW), Op.ADVANCE) == 1 + 10 + 8
    assert last_legal_step(seed(Stage.TRAINING, tempo=Tempo.FAST), Op.ADVANCE) == 1 + 3
    assert last_legal_step(seed(Stage.BLENDING), Op.ADVANCE) == 1
    assert last_legal_step(seed(Stage.BLENDING), Op.SET_ALPHA_TARGET) == 1 + 3
    for op in (Op.WAIT, Op.PRUNE, Op.FOSSILIZE):
        assert last_legal_step(seed(Stage.HOLDING, age=9), op) == 1
    assert last_legal_step(None, Op.GERMINATE, LifecycleConfig(allow_unfinished=True)) == 1


def test_copies_and_open_gates_need_no_time_alone() -> None:
    for tempo, ticks in ((Tempo.FAST, 1), (Tempo.SLOW, 8)):
        copied = {"blueprint": int(Blueprint.CLONE), "tempo": int(tempo)}
        assert last_legal_step(SlotRecord(Stage.TRAINING, **copied), Op.ADVANCE) == 1 + ticks
        assert last_legal_step(SlotRecord(Stage.GERMINATED, **copied), Op.ADVANCE) == 1 + 1 + ticks
    opened = LifecycleConfig(gates=GateConfig(mode="open"))
    assert last_legal_step(None, Op.GERMINATE, opened) == 1 + 1 + 1 + 3


def test_time_is_each_members_own_and_those_who_do_not_look_need_none() -> None:
    states = SlotStates.empty(4, 1)
    left = torch.tensor([14.0, 15.0, 2.0, 0.0])
    uses_metrics = torch.tensor([True, True, False, True])
    legal_now = legal_slots_by_op(states, RULES, None, left, uses_metrics)
    assert legal_now[:, Op.GERMINATE, 0].tolist() == [False, True, True, False]
    assert legal_now[:, Op.WAIT, 0].all(), "whoever is finished may wait"


def test_evidence_makes_a_gate_that_would_refuse_illegal() -> None:
    """Two seeds in each of three stages, the second of which its gate would not let through."""
    full = {"alpha": 1.0, "alpha_target": 1.0}
    records = [
        seed(Stage.TRAINING, epochs_in_stage=10), seed(Stage.TRAINING, epochs_in_stage=10),
        seed(Stage.BLENDING, **full), seed(Stage.BLENDING, alpha=0.5, alpha_target=0.5),
        seed(Stage.HOLDING, **full), seed(Stage.HOLDING, **full),
    ]  # fmt: skip
    states = SlotStates.from_records([records])
    nan = float("nan")
    evidence = SlotEvidence.unmeasured(1, 6).replace(
        gradient_health=torch.tensor([[0.9, 0.2, 1.0, 1.0, 1.0, 1.0]]),
        exploding=torch.zeros(1, 6),
        contribution=torch.tensor([[nan, nan, nan, nan, 2.0, nan]]),
    )
    by_states, known = (legal_slots_by_op(states, RULES, given)[0] for given in (None, evidence))
    assert by_states[Op.ADVANCE].tolist() == [True] * 4 + [False] * 2
    assert known[Op.ADVANCE].tolist() == [True, False, True, False, False, False]
    assert by_states[Op.FOSSILIZE].tolist() == [False] * 4 + [True] * 2
    assert known[Op.FOSSILIZE].tolist() == [False] * 4 + [True, False]
    others = [op for op in Op if op not in (Op.ADVANCE, Op.FOSSILIZE)]
    assert torch.equal(by_states[others], known[others])


def test_max_seeds_counts_live_and_fossilised_over_all_slots() -> None:
    records = [None, seed(Stage.FOSSILIZED), SlotRecord(Stage.HOLDING, 1, enabled=False)]
    for max_seeds, expected in ((0, True), (1, False), (2, False), (3, True)):
        assert legal(records, Op.GERMINATE, LifecycleConfig(max_seeds=max_seeds))[0] is expected
    cooling = [None, SlotRecord(Stage.EMBARGOED, enabled=False)]
    assert legal(cooling, Op.GERMINATE, LifecycleConfig(max_seeds=1))[0], "a cooling slot holds no seed"


def test_disabled_slots_are_legal_for_nothing() -> None:
    for stage in (Stage.BLENDING, Stage.HOLDING, Stage.TRAINING):
        records = [None, SlotRecord(stage, 1, age=9, enabled=False)]
        for op in Op:
            assert not legal(records, op)[1]


def test_advance_can_be_switched_off() -> None:
    records = [seed(Stage.GERMINATED), seed(Stage.TRAINING), seed(Stage.BLENDING), seed(Stage.HOLDING), None]
    assert legal(records, Op.ADVANCE) == [True, True, True, False, False]
    assert legal(records, Op.ADVANCE, LifecycleConfig(allow_advance=False)) == [False] * 5
