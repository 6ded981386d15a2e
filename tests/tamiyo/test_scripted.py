"""Controllers say legal things, and the heuristic says what a slow one would."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from esper.lifecycle.actions import (
    Actions,
    Head,
    Op,
    relevance,
    selectable_blueprints,
)
from esper.lifecycle.config import GateConfig, LifecycleConfig
from esper.lifecycle.engine import ActionOutcome, apply, tick
from esper.lifecycle.slot_states import SlotEvidence, SlotStates
from esper.lifecycle.stages import Stage
from esper.tamiyo import scripted
from esper.tamiyo.controller import Controller, EpisodeInfo
from esper.tamiyo.policy.action_masks import ActionMasks, compute_batch_masks
from esper.tamiyo.policy.features import Observation
from esper.tamiyo.scripted import Heuristic, RandomLegal, Static, any_legal, kth_legal
from tests.controllers import Scheduled
from tests.lifecycle.strategies import fits_of, random_evidence
from tests.scenes import plain_observation as observe

GATES = GateConfig(training_epochs=2)
RULES = LifecycleConfig(gates=GATES, embargo_ticks=2)
TOPOLOGIES = st.sampled_from(["cnn", "mlp", "transformer"])
MAKE = {
    "static": Static,
    "random": lambda: RandomLegal(0.5),
    "scheduled": lambda: Scheduled((0, 4, 9)),
    "heuristic": Heuristic,
}


@dataclass(frozen=True)
class Turn:
    step: int
    observation: Observation
    masks: ActionMasks
    actions: Actions
    outcome: ActionOutcome


def turns(
    controller: Controller, members: int, slots: int, steps: int, topology: str = "cnn", seed: int = 0
) -> Iterator[Turn]:
    """A controller through the rules, with evidence at random."""
    rng = np.random.default_rng(seed)
    controller.begin(EpisodeInfo(torch.arange(members), slots, seed, torch.device("cpu")))
    states = SlotStates.empty(members, slots)
    for step in range(steps):
        evidence = random_evidence(rng, members, slots)
        history = torch.from_numpy(rng.choice([0.5, 0.6], (members, 5), p=[0.8, 0.2])).float()
        observation = observe(states, evidence, accuracy_history=history)
        masks = compute_batch_masks(states, config=RULES, topology=topology, evidence=evidence)
        actions = controller.decide(observation, masks, step)
        outcome = apply(states, actions, evidence, RULES, fits_of(states, topology))
        yield Turn(step, observation, masks, actions, outcome)
        states = tick(outcome.states, RULES).states


def assert_legal(turn: Turn) -> None:
    """The engine agrees, every head that is read is open, and the others rest at 0."""
    assert turn.outcome.legal.all()
    op, slot = turn.actions[Head.OP], turn.actions[Head.SLOT]
    members = torch.arange(len(op))
    read = relevance(op)
    assert turn.masks.op[members, op].all()
    assert (turn.masks.slot_by_op[members, op, slot] | ~read[:, Head.SLOT]).all()
    for head in set(Head) - {Head.SLOT, Head.OP}:
        open_ = turn.masks.head(head)[members, turn.actions[head]]
        assert (open_ | ~read[:, head]).all(), head
    assert (turn.actions.choices[~read] == 0).all()


@pytest.mark.parametrize("name", MAKE)
@settings(deadline=None, max_examples=4)
@given(topology=TOPOLOGIES, seed=st.integers(0, 10_000), slots=st.integers(1, 5))
def test_every_controller_says_only_what_is_legal(name: str, topology: str, seed: int, slots: int) -> None:
    for turn in turns(MAKE[name](), 8, slots, 25, topology, seed):
        assert_legal(turn)


@pytest.mark.parametrize("name", ["scheduled", "heuristic"])
def test_scripted_controllers_are_never_refused_by_a_gate(name: str) -> None:
    all_turns = list(turns(MAKE[name](), 16, 3, 40, seed=2))
    assert all(turn.outcome.succeeded.all() for turn in all_turns)
    executed = torch.stack([turn.outcome.executed_op for turn in all_turns])
    assert {Op.GERMINATE, Op.ADVANCE, Op.FOSSILIZE} <= set(executed.unique().tolist())


@pytest.mark.parametrize("rate", [0.0, 0.3, 1.0])
def test_random_germinates_at_its_rate(rate: float) -> None:
    chances = hits = 0
    for turn in turns(RandomLegal(rate), 64, 3, 60):
        could = turn.masks.op[:, Op.GERMINATE]
        chances += int(could.sum())
        hits += int((could & (turn.actions[Head.OP] == Op.GERMINATE)).sum())
    assert chances > 200
    assert hits / chances == pytest.approx(rate, abs=0.06 if 0 < rate < 1 else 0)


def test_a_rate_above_1_is_refused() -> None:
    with pytest.raises(ValueError, match=r"germination_rate is 1\.5; allowed is 0 to 1"):
        RandomLegal(1.5)


# ---- the heuristic ---------------------------------------------------------------------------------------


class SlowHeuristic:
    """One member at a time, one rule after another."""

    def __init__(self, topology: str) -> None:
        self.blueprints = sorted(selectable_blueprints(topology))
        self.planted, self.rested = 0, 0

    def decide(self, turn: Turn, member: int) -> tuple[int, int, int]:
        """(op, slot, blueprint), 0 where it is not read."""
        slots, evidence = turn.observation.slots, turn.observation.evidence
        legal = turn.masks.slot_by_op[member]
        for op, wanted in (
            (Op.PRUNE, self._hurts),
            (Op.FOSSILIZE, self._earned),
            (Op.ADVANCE, self._ready),
            (Op.GERMINATE, None),
        ):
            for s in range(slots.num_slots):
                if not legal[op, s]:
                    continue
                if wanted is not None and not wanted(slots, evidence, member, s):
                    continue
                if op == Op.GERMINATE:
                    before, now = turn.observation.accuracy_history[member].tolist()[-2:]
                    stuck = now - before < scripted.PLATEAU_POINTS / 100
                    if not stuck or turn.step < scripted.FIRST_EPOCH or turn.step < self.rested:
                        break
                    self.planted += 1
                    return int(op), s, int(self.blueprints[(self.planted - 1) % len(self.blueprints)])
                if op == Op.PRUNE:
                    self.rested = turn.step + scripted.REST_EPOCHS
                return int(op), s, 0
        return int(Op.WAIT), 0, 0

    def _hurts(self, slots: SlotStates, evidence: SlotEvidence, n: int, s: int) -> bool:
        contribution = evidence.contribution[n, s].item()
        holding = slots.stage[n, s] == Stage.HOLDING
        return contribution <= scripted.PRUNE_POINTS or (bool(holding) and contribution < 0)

    def _earned(self, slots: SlotStates, evidence: SlotEvidence, n: int, s: int) -> bool:
        return evidence.contribution[n, s].item() > scripted.FOSSILISE_POINTS

    def _ready(self, slots: SlotStates, evidence: SlotEvidence, n: int, s: int) -> bool:
        stage = slots.stage[n, s]
        if stage == Stage.GERMINATED:
            return True
        if stage == Stage.TRAINING:
            healthy = evidence.gradient_health[n, s].item() >= GATES.min_health
            calm = evidence.exploding[n, s].item() == 0
            return bool(slots.epochs_in_stage[n, s] >= GATES.training_epochs) and healthy and calm
        return bool(slots.alpha[n, s] == 1 and slots.alpha_target[n, s] == 1 and slots.alpha_mode[n, s] == 0)


@settings(deadline=None, max_examples=6)
@given(topology=TOPOLOGIES, seed=st.integers(0, 10_000))
def test_the_heuristic_equals_the_slow_one(topology: str, seed: int) -> None:
    slow = [SlowHeuristic(topology) for _ in range(6)]
    for turn in turns(Heuristic(), 6, 3, 40, topology, seed):
        expected = [member.decide(turn, n) for n, member in enumerate(slow)]
        found = turn.actions.choices[:, [Head.OP, Head.SLOT, Head.BLUEPRINT]].tolist()
        assert found == [list(e) for e in expected], turn.step


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.booleans(), min_size=1, max_size=12), st.integers(0, 40), st.floats(0, 1, exclude_max=True)
)
def test_choosing_among_legal_ones(mask: list[bool], k: int, u: float) -> None:
    legal = [i for i, open_ in enumerate(mask) if open_]
    if not legal:
        return
    row = torch.tensor([mask])
    assert int(kth_legal(row, torch.tensor([k]))) == legal[k % len(legal)]
    u32 = torch.tensor([u], dtype=torch.float32).clamp(max=1 - 2**-24)
    expected = legal[min(int(u32 * len(legal)), len(legal) - 1)]
    assert int(any_legal(row, u32)) == expected
