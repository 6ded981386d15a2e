"""Random populations in the middle of their growth, for measurements and tests."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import torch
from torch import Tensor

from esper.lifecycle.actions import Head
from esper.lifecycle.slot_states import SlotEvidence, SlotStates
from esper.tamiyo.policy.action_masks import ActionMasks
from esper.tamiyo.policy.features import HISTORY_LENGTH, Observation

# Empty, BLENDING and HOLDING slots are common in a run, the others pass quickly.
STAGES = np.array([1, 1, 2, 3, 4, 4, 6, 6, 7, 8, 9, 10])
SEED_STAGES = (2, 3, 4, 6, 7)


def random_states(rng: np.random.Generator, num_members: int, num_slots: int) -> SlotStates:
    """Any states that the doors accept, with at least one enabled slot for each member."""
    shape = (num_members, num_slots)
    stage = torch.from_numpy(rng.choice(STAGES, shape))
    seed = torch.isin(stage, torch.tensor(SEED_STAGES))
    enabled = rng.random(shape) < 0.8
    enabled[np.arange(num_members), rng.integers(0, num_slots, num_members)] = True

    def draw(high: int) -> Tensor:
        return torch.from_numpy(rng.integers(0, high, shape)) * seed

    states = SlotStates.empty(*shape).replace(
        stage=stage,
        blueprint=torch.where(seed, draw(15) + 1, -1),
        style=draw(4),
        tempo=draw(3),
        alpha=draw(11) / 10,
        alpha_start=draw(11) / 10,
        alpha_target=draw(11) / 10,
        alpha_mode=draw(3),
        alpha_curve=draw(5),
        alpha_steps_total=draw(8) + seed,
        alpha_steps_done=draw(2),
        age=draw(13),
        epochs_in_stage=torch.from_numpy(rng.integers(0, 15, shape)),
        room=torch.from_numpy(rng.integers(0, 3, shape)),
        enabled=torch.from_numpy(enabled),
    )
    states.check()
    return states


def random_observation(rng: np.random.Generator, num_members: int, num_slots: int) -> Observation:
    """A decision step with some of everything, unmeasured values included."""
    n, shape = num_members, (num_members, num_slots)

    def normal(*size: int, unknown: float = 0.3) -> Tensor:
        values = rng.normal(size=size)
        values[rng.random(size) < unknown] = np.nan
        return torch.from_numpy(values.astype(np.float32))

    measured = {name: normal(*shape) for name in SlotEvidence.unmeasured(1, 1).tensors()}
    shares = ("gradient_health", "previous_health", "vanishing", "exploding")
    measured |= {name: measured[name].abs().clamp(max=1) for name in shares}
    measured |= {name: 10 * measured[name].abs() for name in ("contribution_age", "gradient_norm")}
    return Observation(
        progress=torch.from_numpy(rng.random(n).astype(np.float32)),
        step_cost=torch.from_numpy(1.0 + rng.random(n).astype(np.float32)),
        steps_left=torch.from_numpy(30 * rng.random(n).astype(np.float32)),
        val_loss=normal(n, unknown=0.1).abs(),
        val_accuracy=torch.from_numpy(rng.random(n).astype(np.float32)),
        loss_history=normal(n, HISTORY_LENGTH).abs(),
        accuracy_history=normal(n, HISTORY_LENGTH).abs().clamp(max=1),
        parameter_ratio=1 + torch.from_numpy(rng.random(n).astype(np.float32)),
        last_succeeded=torch.from_numpy(rng.random(n) < 0.7),
        last_op=torch.from_numpy(rng.integers(-1, 6, n)),
        slots=random_states(rng, *shape),
        evidence=SlotEvidence(**measured),
    )


def nothing_is_empty(masks: ActionMasks) -> bool:
    """Whether every head of every member has a legal choice, and every legal op a slot."""
    heads = all(bool(masks.head(head).any(dim=1).all()) for head in Head)
    return heads and torch.equal(masks.op, masks.slot_by_op.any(dim=2))


def plain_observation(
    states: SlotStates, evidence: SlotEvidence | None = None, **changes: Tensor
) -> Observation:
    """A first observation of these states; any field can be given."""
    n, s = states.stage.shape
    plain = Observation(
        progress=torch.zeros(n),
        step_cost=torch.ones(n),
        steps_left=torch.ones(n),
        val_loss=torch.ones(n),
        val_accuracy=torch.full((n,), 0.5),
        loss_history=torch.full((n, 5), math.nan),
        accuracy_history=torch.full((n, 5), math.nan),
        parameter_ratio=torch.ones(n),
        last_succeeded=torch.ones(n, dtype=torch.bool),
        last_op=torch.full((n,), -1),
        slots=states,
        evidence=evidence or SlotEvidence.unmeasured(n, s),
    )
    return dataclasses.replace(plain, **changes)
