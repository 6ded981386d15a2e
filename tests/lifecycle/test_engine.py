"""One step of the rules: clocks, ramps, cooldown, and whole episodes against a scalar engine."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from esper.lifecycle.actions import HEADS_READ, Actions, AlphaCurve, Head, Op, relevance
from esper.lifecycle.config import LifecycleConfig
from esper.lifecycle.engine import apply, ease, force_prune, merge_outcomes, tick
from esper.lifecycle.legality import Gate, fitting_in_time, legal_slots_by_op
from esper.lifecycle.slot_states import AlphaMode, SlotEvidence, SlotStates
from esper.lifecycle.stages import TRANSITIONS, Stage
from esper.utils.rows import map_tensors
from tests.lifecycle import reference as ref
from tests.lifecycle.strategies import Step, episode, fits_of, random_evidence
from tests.operations import count_operations
from tests.scenes import random_states
from tests.slots import SlotRecord, actions_of, states_from_records

RULES = LifecycleConfig()


def good(states: SlotStates) -> SlotEvidence:
    ones = {n: torch.ones(states.stage.shape) for n in SlotEvidence.unmeasured(1, 1).tensors()}
    return SlotEvidence(**{**ones, "exploding": torch.zeros(states.stage.shape)})


def test_force_prune_asks_neither_age_nor_stage_but_needs_a_seed() -> None:
    records = [
        SlotRecord(Stage.GERMINATED, 1),
        SlotRecord(Stage.FOSSILIZED, 1),
        None,
        SlotRecord(Stage.EMBARGOED),
    ]
    states = states_from_records([records, records])
    where = torch.tensor([[True] * 4, [False] * 4])
    after = force_prune(states, where)
    assert after.stage.tolist() == [[8, 8, 1, 9], [2, 7, 1, 9]]
    assert after.blueprint.tolist() == [[-1, -1, -1, -1], [1, 1, -1, -1]]


@settings(deadline=None, max_examples=15)
@given(st.integers(0, 2**32 - 1), st.integers(2, 200), st.integers(1, 9))
def test_a_member_moves_to_the_same_bits_alone_and_in_company(seed: int, members: int, slots: int) -> None:
    rng = np.random.default_rng(seed)
    states, evidence = random_states(rng, members, slots), random_evidence(rng, members, slots)
    choices = torch.from_numpy(rng.integers(0, (slots, 13, 4, 3, 3, 4, 5, 6), (members, len(Head))))
    together = tick(apply(states, Actions(choices), evidence, RULES, fits_of(states)).states, RULES).states
    for i in rng.choice(members, min(members, 8), replace=False).tolist():
        own = SlotEvidence(**{n: t[i : i + 1] for n, t in evidence.tensors().items()})
        action, fits = Actions(choices[i : i + 1]), fits_of(states[i])
        alone = tick(apply(states[i], action, own, RULES, fits).states, RULES).states
        for name, value in alone.tensors().items():
            assert torch.equal(value[0], together.tensors()[name][i]), name


def test_states_are_values_and_are_not_written_into() -> None:
    states = random_states(np.random.default_rng(3), 8, 4)
    before = {name: value.clone() for name, value in states.tensors().items()}
    outcome = apply(states, Actions.wait(8), good(states), RULES, fits_of(states))
    tick(outcome.states, RULES)
    force_prune(states, states.enabled)
    assert all(torch.equal(value, before[name]) for name, value in states.tensors().items())


def test_operations_of_a_step_do_not_depend_on_members_or_slots() -> None:
    def operations(members: int, slots: int) -> tuple[int, int]:
        states = random_states(np.random.default_rng(0), members, slots)
        actions, evidence = Actions.wait(members), SlotEvidence.unmeasured(members, slots)
        fits = fits_of(states)
        apply(states, actions, evidence, RULES, fits)  # the constant tables are built on the first call
        tick(states, RULES)
        step = count_operations(lambda: apply(states, actions, evidence, RULES, fits))
        return step, count_operations(lambda: tick(states, RULES))

    assert len({operations(*size) for size in ((1, 1), (16, 3), (128, 25))}) == 1


def test_actions_one_after_the_other_tell_their_first_op_and_all_that_began() -> None:
    states, outcomes = SlotStates.empty(1, 2), []
    for action in (
        {Head.OP: Op.GERMINATE, Head.BLUEPRINT: 1},
        {Head.OP: Op.ADVANCE},
        {Head.OP: Op.FOSSILIZE},  # not legal yet
    ):
        outcomes.append(apply(states, actions_of([action]), good(states), RULES, fits_of(states)))
        states = outcomes[-1].states
    joined = merge_outcomes(outcomes)
    assert (joined.asked_op.item(), joined.executed_op.item()) == (Op.GERMINATE, Op.GERMINATE)
    assert joined.succeeded.item()
    assert joined.germinated.tolist() == [[True, False]]
    assert joined.states.stage.tolist() == [[Stage.TRAINING, Stage.DORMANT]]
    assert outcomes[-1].asked_op.item() == Op.FOSSILIZE
    assert outcomes[-1].executed_op.item() == Op.WAIT


@pytest.mark.parametrize("curve", list(AlphaCurve))
def test_curves_are_the_formulas_and_meet_their_ends(curve: AlphaCurve) -> None:
    t = torch.linspace(0, 1, 41)
    eased = ease(torch.full((41,), int(curve)), t)
    expected = torch.tensor([ref.ease(int(curve), x) for x in t.tolist()])
    torch.testing.assert_close(eased, expected, atol=1e-6, rtol=0)
    assert eased[0].item() == pytest.approx(0, abs=1e-7)
    assert eased[-1].item() == pytest.approx(1, abs=1e-7)
    assert bool((eased.diff() >= 0).all())


SEEDS = st.integers(0, 2**32 - 1)
ALPHAS = ("alpha", "alpha_start", "alpha_target")


def assert_same_states(ours: SlotStates, theirs: SlotStates) -> None:
    for name, value in ours.tensors().items():
        expected = theirs.tensors()[name]
        if name in ALPHAS:
            torch.testing.assert_close(value, expected, atol=2e-6, rtol=0, msg=lambda m, n=name: f"{n}: {m}")
        else:
            assert torch.equal(value, expected), f"{name}:\n{value}\n{expected}"


@settings(deadline=None, max_examples=8)
@given(SEEDS, st.integers(1, 4), st.integers(1, 4))
def test_engine_agrees_with_the_scalar_reference_field_by_field(seed: int, members: int, slots: int) -> None:
    for step in episode(seed, members, slots, steps=40):
        assert_same_states(step.applied.states, step.mid_members)
        assert_same_states(step.ticked.states, step.members)
        for i, verdict in enumerate(step.verdicts):
            assert bool(step.applied.legal[i]) == verdict.legal
            assert bool(step.applied.succeeded[i]) == verdict.succeeded
            assert int(step.applied.executed_op[i]) == verdict.executed_op
            assert int(step.applied.refused_by[i]) == verdict.refused_by
            assert set(step.applied.germinated[i].nonzero().flatten().tolist()) == verdict.germinated
            assert set(step.applied.pruned[i].nonzero().flatten().tolist()) == verdict.pruned
        ended = torch.tensor(step.ended)  # [N, S, 2]
        assert torch.equal(step.ticked.pruned, ended[..., 0])
        changed = step.ticked.states.stage != step.applied.states.stage
        assert torch.equal(changed, ended[..., 1])
        folded = (step.applied.states.stage == Stage.FOSSILIZED) & (step.ticked.states.stage == Stage.DORMANT)
        assert torch.equal(step.ticked.folded, folded)
        assert_lawful(step)


def assert_lawful(step: Step) -> None:
    """Stages move only along the table, and alpha obeys its stage."""
    chain = (step.before, step.applied.states, step.ticked.states)
    for old, new in itertools.pairwise(chain):
        moves = torch.stack((old.stage, new.stage), -1)[old.stage != new.stage].tolist()
        assert all(b in TRANSITIONS[Stage(a)] for a, b in moves)
    after = step.ticked.states
    assert bool(((after.alpha >= 0) & (after.alpha <= 1)).all())
    settled = (after.stage == Stage.HOLDING) | (after.stage == Stage.FOSSILIZED)
    assert bool((after.alpha[settled] == 1).all())
    assert bool((after.alpha_mode[settled] == AlphaMode.HOLD).all())
    silent = ~torch.isin(after.stage, torch.tensor([Stage.BLENDING, Stage.HOLDING, Stage.FOSSILIZED]))
    assert bool((after.alpha[silent] == 0).all())
    after.check()


def test_the_episodes_reach_every_stage_and_op_and_gate() -> None:
    """The properties above are worth nothing if the episodes never get anywhere."""
    wanted = (
        {int(s) for s in Stage if s is not Stage.UNKNOWN},
        {int(op) for op in Op},
        {int(g) for g in (Gate.NONE, Gate.G0, Gate.G2, Gate.G3, Gate.G5)},
    )
    stages, ops, gates = set[int](), set[int](), set[int]()
    for seed in range(20):
        if (stages, ops, gates) == wanted:
            break
        for step in episode(seed, 4, 3, steps=40):
            stages |= set(step.ticked.states.stage.flatten().tolist())
            stages |= set(step.applied.states.stage.flatten().tolist())
            ops |= set(step.applied.executed_op.tolist())
            gates |= set(step.applied.refused_by.tolist())
    assert (stages, ops, gates) == wanted


def every_pair(states: SlotStates, evidence: SlotEvidence) -> tuple[SlotStates, Actions, SlotEvidence]:
    """Each member once for every (op, slot), with an action that says so."""
    pairs = states.num_members * len(Op) * states.num_slots
    index = torch.arange(pairs)
    choices = torch.zeros(pairs, len(Head), dtype=torch.long)
    choices[:, Head.SLOT] = index % states.num_slots
    choices[:, Head.OP] = (index // states.num_slots) % len(Op)
    choices[:, Head.BLUEPRINT] = 3  # NORM fits every topology
    member = index // (states.num_slots * len(Op))
    return states[member], Actions(choices), map_tensors(lambda tensor: tensor[member], evidence)


@settings(deadline=None, max_examples=7)
@given(SEEDS, st.integers(1, 4), st.integers(1, 4))
def test_mask_legality_is_executor_legality_on_reachable_states(seed: int, members: int, slots: int) -> None:
    config = LifecycleConfig(max_seeds=2)
    for step in episode(seed, members, slots, steps=25):
        assert_executor_agrees(step.ticked.states, config, seed, left=seed % 12)


@settings(deadline=None, max_examples=25)
@given(SEEDS, st.integers(1, 9), st.integers(1, 9), st.integers(0, 3), st.booleans())
def test_mask_legality_is_executor_legality_on_any_state(
    seed: int, members: int, slots: int, max_seeds: int, allow_advance: bool
) -> None:
    states = random_states(np.random.default_rng(seed), members, slots)
    assert_executor_agrees(states, LifecycleConfig(max_seeds=max_seeds, allow_advance=allow_advance), seed)


def assert_executor_agrees(
    states: SlotStates, config: LifecycleConfig, seed: int = 0, left: int | None = None
) -> None:
    """The mask of the states says what is legal, the mask with evidence what will succeed."""
    rng = np.random.default_rng(seed)
    evidence = random_evidence(rng, states.num_members, states.num_slots)
    looks = torch.from_numpy(rng.random(states.num_members) < 0.7)
    fits = fitting_in_time(fits_of(states), config, left, looks)
    mask = legal_slots_by_op(states, config, None, left, looks, fits).flatten()
    sure = legal_slots_by_op(states, config, evidence, left, looks, fits).flatten()
    repeated, actions, known = every_pair(states, evidence)
    looking = looks.repeat_interleave(len(Op) * states.num_slots)
    outcome = apply(repeated, actions, known, config, fits_of(repeated), left, uses_metrics=looking)
    waits = actions[Head.OP] == Op.WAIT  # WAIT reads no slot: it is legal whichever is named
    assert torch.equal(outcome.legal, mask | waits)
    assert torch.equal(outcome.succeeded, sure | waits)
    failed = ~outcome.succeeded
    for name, value in outcome.states.tensors().items():
        assert torch.equal(value[failed | waits], repeated.tensors()[name][failed | waits]), name
    assert bool((outcome.executed_op[failed] == Op.WAIT).all())
    refused = outcome.legal & failed
    assert torch.equal(outcome.refused_by != Gate.NONE, refused)


def test_the_reference_reads_the_same_heads() -> None:
    for op, heads in ref.READS.items():
        assert {h.name.lower() for h in HEADS_READ[Op(op)]} == set(heads)
        read = relevance(torch.tensor(op)).nonzero().flatten().tolist()
        assert {Head(h).name.lower() for h in read} == {*heads, "op"}


# ---- gates, each at its threshold and on either side of it -----------------------------------------------

NAN = float("nan")


def outcome_of(
    record: SlotRecord, op: Op, blueprint: int = 1, topology: str = "cnn", **evidence: float
) -> tuple[bool, int]:
    measured = SlotEvidence.unmeasured(1, 1).replace(**{n: torch.tensor([[v]]) for n, v in evidence.items()})
    action = actions_of([{Head.OP: op, Head.BLUEPRINT: blueprint}])
    states = states_from_records([[record]])
    outcome = apply(states, action, measured, RULES, fits_of(states, topology))
    assert outcome.legal.item(), "a gate is asked about legal actions only"
    return bool(outcome.succeeded.item()), int(outcome.refused_by.item())


HOLDING = SlotRecord(Stage.HOLDING, 1, alpha=1.0, alpha_target=1.0)
PASSED = (True, int(Gate.NONE))


@pytest.mark.parametrize("topology", ref.BLUEPRINTS)
def test_g0_wants_a_blueprint_of_the_topology(topology: str) -> None:
    for blueprint in range(16):
        expected = PASSED if blueprint in ref.BLUEPRINTS[topology] else (False, int(Gate.G0))
        assert outcome_of(SlotRecord(), Op.GERMINATE, blueprint, topology) == expected


@pytest.mark.parametrize(
    ("epochs", "exploding", "health", "passes"),
    [
        (10, 0.0, 0.7, True), (9, 0.0, 1.0, False), (10, 0.1, 1.0, False), (10, 0.0, 0.69, False),
        (10, NAN, 1.0, False), (10, 0.0, NAN, False), (10, NAN, NAN, False),
    ],
)  # fmt: skip
def test_g2_wants_time_and_health(epochs: int, exploding: float, health: float, passes: bool) -> None:
    training = SlotRecord(Stage.TRAINING, 1, age=epochs, epochs_in_stage=epochs, alpha_target=1.0)
    got = outcome_of(training, Op.ADVANCE, exploding=exploding, gradient_health=health)
    assert got == (PASSED if passes else (False, int(Gate.G2)))


@pytest.mark.parametrize(
    ("contribution", "passes"), [(NAN, False), (0.0, False), (-1.0, False), (0.1, True), (1.0, True)]
)
def test_g5_wants_a_measured_contribution(contribution: float, passes: bool) -> None:
    got = outcome_of(HOLDING, Op.FOSSILIZE, contribution=contribution)
    assert got == (PASSED if passes else (False, int(Gate.G5)))
