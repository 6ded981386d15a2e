"""Whole random episodes: the tensor engine against the scalar one, and what must hold on the way."""

from __future__ import annotations

import itertools

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from esper.lifecycle.actions import HEADS_READ, Actions, Head, Op
from esper.lifecycle.config import LifecycleConfig
from esper.lifecycle.engine import apply
from esper.lifecycle.legality import Gate, legal_slots_by_op
from esper.lifecycle.slot_states import AlphaMode, SlotEvidence, SlotStates
from esper.lifecycle.stages import TRANSITIONS, Stage
from esper.utils.rows import map_tensors
from tests.lifecycle import reference as ref
from tests.lifecycle.strategies import Step, episode, random_evidence
from tests.scenes import random_states

SEEDS = st.integers(0, 2**32 - 1)
ALPHAS = ("alpha", "alpha_start", "alpha_target")


def assert_same_states(ours: SlotStates, theirs: SlotStates) -> None:
    for name, value in ours.tensors().items():
        expected = theirs.tensors()[name]
        if name in ALPHAS:
            torch.testing.assert_close(value, expected, atol=2e-6, rtol=0, msg=lambda m, n=name: f"{n}: {m}")
        else:
            assert torch.equal(value, expected), f"{name}:\n{value}\n{expected}"


@settings(deadline=None, max_examples=20)
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


@settings(deadline=None, max_examples=10)
@given(SEEDS, st.integers(1, 4), st.integers(1, 4))
def test_mask_legality_is_executor_legality_on_reachable_states(seed: int, members: int, slots: int) -> None:
    config = LifecycleConfig(max_seeds=2)
    for step in episode(seed, members, slots, steps=25):
        assert_executor_agrees(step.ticked.states, config, seed, left=seed % 12)


@settings(deadline=None, max_examples=40)
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
    evidence = random_evidence(np.random.default_rng(seed), states.num_members, states.num_slots)
    mask = legal_slots_by_op(states, config, steps_left=left).flatten()
    sure = legal_slots_by_op(states, config, evidence, left).flatten()
    repeated, actions, known = every_pair(states, evidence)
    outcome = apply(repeated, actions, known, config, "cnn", left)
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
