"""What is legal, and the gates, each at its threshold and on either side of it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from esper.lifecycle.actions import Actions, Blueprint, Head, Op, Tempo
from esper.lifecycle.config import GateConfig, LifecycleConfig
from esper.lifecycle.engine import apply
from esper.lifecycle.engine import apply as apply_actions
from esper.lifecycle.legality import Gate, g0_valid_blueprint, legal_slots_by_op, open_gates
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


def test_time_is_each_members_own_and_those_who_do_not_look_need_none() -> None:
    states = SlotStates.empty(4, 1)
    left = torch.tensor([14.0, 15.0, 2.0, 0.0])
    uses_metrics = torch.tensor([True, True, False, True])
    legal_now = legal_slots_by_op(states, RULES, None, left, uses_metrics)
    assert legal_now[:, Op.GERMINATE, 0].tolist() == [False, True, True, False]
    assert legal_now[:, Op.WAIT, 0].all(), "whoever is finished may wait"


def test_max_seeds_counts_live_and_fossilised_over_all_slots() -> None:
    records = [None, seed(Stage.FOSSILIZED), SlotRecord(Stage.HOLDING, 1, enabled=False)]
    for max_seeds, expected in ((0, True), (1, False), (2, False), (3, True)):
        assert legal(records, Op.GERMINATE, LifecycleConfig(max_seeds=max_seeds))[0] is expected
    cooling = [None, SlotRecord(Stage.EMBARGOED, enabled=False)]
    assert legal(cooling, Op.GERMINATE, LifecycleConfig(max_seeds=1))[0], "a cooling slot holds no seed"


NAN = float("nan")
PERMISSIVE = LifecycleConfig()
STRICT = LifecycleConfig(gates=GateConfig(mode="strict"))


def outcome_of(
    record: SlotRecord,
    op: Op,
    config: LifecycleConfig,
    blueprint: int = 1,
    topology: str = "cnn",
    **evidence: float,
) -> tuple[bool, int]:
    measured = SlotEvidence.unmeasured(1, 1).replace(**{n: torch.tensor([[v]]) for n, v in evidence.items()})
    action = Actions.of([{Head.OP: op, Head.BLUEPRINT: blueprint}])
    outcome = apply_actions(SlotStates.from_records([[record]]), action, measured, config, topology)
    assert outcome.legal.item(), "a gate is asked about legal actions only"
    return bool(outcome.succeeded.item()), int(outcome.refused_by.item())


def training(epochs: int = 10) -> SlotRecord:
    return SlotRecord(Stage.TRAINING, 1, age=epochs, epochs_in_stage=epochs, alpha_target=1.0)


HOLDING = SlotRecord(Stage.HOLDING, 1, alpha=1.0, alpha_target=1.0)
PASSED = (True, int(Gate.NONE))


@pytest.mark.parametrize("topology", ["cnn", "transformer", "mlp"])
def test_g0_wants_a_blueprint_of_the_topology(topology: str) -> None:
    fits = {"cnn": range(1, 8), "transformer": (2, 3, 8, 9, 10, 11, 12), "mlp": (3, 8, 9, 10, 11)}[topology]
    for blueprint in range(16):
        expected = PASSED if blueprint in fits else (False, int(Gate.G0))
        assert outcome_of(SlotRecord(), Op.GERMINATE, PERMISSIVE, blueprint, topology) == expected
    asked = g0_valid_blueprint(torch.tensor([-1, 16, 10**15, 3]), topology)
    assert asked.tolist() == [False, False, False, True]


G2_CASES = {  # epochs in TRAINING, two measurements, whether the gate lets through
    ("exploding", "gradient_health"): [
        (10, 0.0, 0.7, True), (9, 0.0, 1.0, False), (10, 0.1, 1.0, False), (10, 0.0, 0.69, False),
        (10, NAN, 1.0, False), (10, 0.0, NAN, False), (10, NAN, NAN, False),
    ],
    ("shadow_gain", "gradient_ratio"): [
        (10, 0.5, 0.1001, True), (9, 5.0, 1.0, False), (10, 0.4, 1.0, False), (10, 5.0, 0.05, False),
        (10, NAN, 1.0, False), (10, 5.0, NAN, False), (10, 5.0, float("inf"), False),
    ],
}  # fmt: skip


@pytest.mark.parametrize(("names", "config"), zip(G2_CASES, (PERMISSIVE, STRICT), strict=True))
def test_g2_wants_time_and_health_or_strictly_a_gain(names: tuple[str, str], config: LifecycleConfig) -> None:
    for epochs, *values, passes in G2_CASES[names]:
        got = outcome_of(training(epochs), Op.ADVANCE, config, **dict(zip(names, values, strict=True)))
        assert got == (PASSED if passes else (False, int(Gate.G2))), (epochs, values)


@pytest.mark.parametrize(
    ("contribution", "permissive", "strict"),
    [(NAN, False, False), (0.0, False, False), (-1.0, False, False), (0.1, True, False), (1.0, True, True)],
)
def test_g5_wants_a_measured_contribution(contribution: float, permissive: bool, strict: bool) -> None:
    for config, passes in ((PERMISSIVE, permissive), (STRICT, strict)):
        got = outcome_of(HOLDING, Op.FOSSILIZE, config, contribution=contribution)
        assert got == (PASSED if passes else (False, int(Gate.G5)))


CLONE = int(Blueprint.CLONE)


@pytest.mark.parametrize("config", [PERMISSIVE, STRICT])
def test_a_grown_block_moves_on_at_once_but_has_to_earn_its_place(
    config: LifecycleConfig,
) -> None:
    fresh = SlotRecord(Stage.TRAINING, int(Blueprint.NORM), alpha_target=1.0)
    for blueprint in (Blueprint.CLONE, Blueprint.WIDEN_HALF, Blueprint.WIDEN_FULL):
        grows = SlotRecord(Stage.TRAINING, int(blueprint), alpha_target=1.0)
        assert outcome_of(grows, Op.ADVANCE, config) == PASSED
    assert outcome_of(fresh, Op.ADVANCE, config) == (False, int(Gate.G2))
    full = SlotRecord(Stage.BLENDING, CLONE, alpha=1.0, alpha_target=1.0)
    assert outcome_of(full, Op.ADVANCE, config) == PASSED
    held = SlotRecord(Stage.HOLDING, CLONE, alpha=1.0, alpha_target=1.0)
    assert outcome_of(held, Op.FOSSILIZE, config) == (False, int(Gate.G5))
    assert outcome_of(held, Op.FOSSILIZE, config, contribution=2.0) == PASSED


def test_gates_are_open_for_those_alone_who_do_not_look() -> None:
    """Unmeasured seeds of two members, the second of whom looks at nothing."""
    held = SlotRecord(Stage.HOLDING, 1, alpha=1.0, alpha_target=1.0)
    half = SlotRecord(Stage.BLENDING, 1, alpha=0.5, alpha_target=0.5)
    states = SlotStates.from_records([[training(0), half, held]] * 2)
    unmeasured, uses_metrics = SlotEvidence.unmeasured(2, 3), torch.tensor([True, False])
    passes = open_gates(states, unmeasured, PERMISSIVE.gates, uses_metrics)
    assert passes[Op.ADVANCE].tolist() == [[False, False, False], [True, False, False]]
    assert passes[Op.FOSSILIZE].tolist() == [[False, False, False], [False, False, True]]
    for slot, op, refused in ((0, Op.ADVANCE, Gate.G2), (2, Op.FOSSILIZE, Gate.G5)):
        action = Actions.of([{Head.OP: op, Head.SLOT: slot}] * 2)
        outcome = apply_actions(states, action, unmeasured, PERMISSIVE, "cnn", uses_metrics=uses_metrics)
        assert outcome.succeeded.tolist() == [False, True]
        assert outcome.refused_by.tolist() == [refused, Gate.NONE]


def test_g0_refuses_what_does_not_fit_its_slot() -> None:
    """CLONE fits the second slot alone, and nothing else fits anywhere."""
    fits = torch.zeros(3, 2, len(Blueprint), dtype=torch.bool)
    fits[:, 1, CLONE] = True
    asked = [(1, CLONE), (0, CLONE), (1, 1)]
    actions = Actions.of([{Head.OP: Op.GERMINATE, Head.SLOT: s, Head.BLUEPRINT: b} for s, b in asked])
    states, unmeasured = SlotStates.empty(3, 2), SlotEvidence.unmeasured(3, 2)
    outcome = apply_actions(states, actions, unmeasured, PERMISSIVE, "cnn", fits=fits)
    assert outcome.legal.tolist() == [True, False, True], "nothing can begin in a slot that nothing fits"
    assert outcome.refused_by.tolist() == [Gate.NONE, Gate.NONE, Gate.G0]
    assert outcome.germinated.nonzero().tolist() == [[0, 1]]
