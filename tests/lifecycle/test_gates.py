"""The gates, each at its threshold and on either side of it."""

from __future__ import annotations

import pytest
import torch

from esper.lifecycle.actions import Actions, Blueprint, Head, Op
from esper.lifecycle.config import GateConfig, LifecycleConfig
from esper.lifecycle.engine import apply as apply_actions
from esper.lifecycle.legality import GATE_INTO, Gate, g0_valid_blueprint, open_gates
from esper.lifecycle.slot_states import SlotEvidence, SlotRecord, SlotStates
from esper.lifecycle.stages import Stage

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


def blending(alpha: float = 1.0, target: float = 1.0, epochs: int = 0) -> SlotRecord:
    return SlotRecord(Stage.BLENDING, 1, alpha=alpha, alpha_target=target, epochs_in_stage=epochs)


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


def test_g1_lets_a_germinated_seed_train() -> None:
    assert outcome_of(SlotRecord(Stage.GERMINATED, 1), Op.ADVANCE, STRICT) == PASSED


@pytest.mark.parametrize(
    ("epochs", "exploding", "health", "passes"),
    [
        (10, 0.0, 0.7, True),
        (9, 0.0, 1.0, False),
        (10, 0.1, 1.0, False),
        (10, 0.0, 0.69, False),
        (10, NAN, 1.0, False),
        (10, 0.0, NAN, False),
        (10, NAN, NAN, False),
    ],
)
def test_g2_permissive(epochs: int, exploding: float, health: float, passes: bool) -> None:
    got = outcome_of(training(epochs), Op.ADVANCE, PERMISSIVE, exploding=exploding, gradient_health=health)
    assert got == (PASSED if passes else (False, int(Gate.G2)))


@pytest.mark.parametrize(
    ("epochs", "gain", "ratio", "passes"),
    [
        (10, 0.5, 0.1001, True),
        (9, 5.0, 1.0, False),
        (10, 0.4, 1.0, False),
        (10, 5.0, 0.05, False),
        (10, NAN, 1.0, False),
        (10, 5.0, NAN, False),
        (10, 5.0, float("inf"), False),
    ],
)
def test_g2_strict(epochs: int, gain: float, ratio: float, passes: bool) -> None:
    got = outcome_of(training(epochs), Op.ADVANCE, STRICT, shadow_gain=gain, gradient_ratio=ratio)
    assert got == (PASSED if passes else (False, int(Gate.G2)))


def test_g3_wants_a_full_alpha_at_rest_and_strictly_time_too() -> None:
    refused = (False, int(Gate.G3))
    assert outcome_of(blending(), Op.ADVANCE, PERMISSIVE) == PASSED
    assert outcome_of(blending(0.7, 0.7), Op.ADVANCE, PERMISSIVE) == refused
    assert outcome_of(blending(0.9, 1.0), Op.ADVANCE, PERMISSIVE) == refused
    assert outcome_of(blending(1.0, 0.7), Op.ADVANCE, PERMISSIVE) == refused
    moving = SlotRecord(Stage.BLENDING, 1, alpha=1.0, alpha_target=1.0, alpha_mode=1)
    assert outcome_of(moving, Op.ADVANCE, PERMISSIVE) == refused
    assert outcome_of(blending(epochs=9), Op.ADVANCE, STRICT) == refused
    assert outcome_of(blending(epochs=10), Op.ADVANCE, STRICT) == PASSED


@pytest.mark.parametrize(
    ("contribution", "permissive", "strict"),
    [(NAN, False, False), (0.0, False, False), (-1.0, False, False), (0.1, True, False), (1.0, True, True)],
)
def test_g5_wants_a_measured_contribution(contribution: float, permissive: bool, strict: bool) -> None:
    for config, passes in ((PERMISSIVE, permissive), (STRICT, strict)):
        got = outcome_of(HOLDING, Op.FOSSILIZE, config, contribution=contribution)
        assert got == (PASSED if passes else (False, int(Gate.G5)))


def test_a_refused_gate_changes_nothing() -> None:
    states = SlotStates.from_records([[training(3)], [HOLDING]])
    actions = Actions.of([{Head.OP: Op.ADVANCE}, {Head.OP: Op.FOSSILIZE}])
    outcome = apply_actions(states, actions, SlotEvidence.unmeasured(2, 1), PERMISSIVE, "cnn")
    assert outcome.executed_op.tolist() == [Op.WAIT, Op.WAIT]
    assert all(torch.equal(value, states.tensors()[name]) for name, value in outcome.states.tensors().items())


def test_every_stage_of_a_seed_has_its_gate() -> None:
    assert [g.name for g in GATE_INTO.values()] == ["G0", "G1", "G2", "G3", "G5"]
    assert [int(g) for g in Gate] == [-1, 0, 1, 2, 3, 5]


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
