"""Which op is legal on which slot. Masks and the executor both ask here, so they cannot disagree."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import embedding

from esper.foundation.device_tables import device_table
from esper.lifecycle.actions import NUM_OPS, Op
from esper.lifecycle.config import LifecycleConfig
from esper.lifecycle.slot_states import AlphaMode, SlotStates
from esper.lifecycle.stages import (
    ADVANCEABLE_STAGES,
    FOSSILIZABLE_STAGES,
    GERMINATION_BLOCKERS,
    HEARD_STAGES,
    PRUNABLE_STAGES,
    SEED_STAGES,
    STAGE_TABLE_SIZE,
    Stage,
    stage_table,
)

LEGAL_STAGES: dict[Op, frozenset[Stage]] = {
    Op.WAIT: frozenset(Stage),
    Op.GERMINATE: frozenset({Stage.DORMANT}),
    Op.SET_ALPHA_TARGET: HEARD_STAGES & PRUNABLE_STAGES,  # heard, and not yet for good
    Op.PRUNE: PRUNABLE_STAGES,
    Op.FOSSILIZE: FOSSILIZABLE_STAGES,
    Op.ADVANCE: ADVANCEABLE_STAGES,
}


@device_table
def _legal_stage_table(allow_advance: bool) -> Tensor:
    """True where a stage admits an op.  # [stages, ops]"""
    table = torch.zeros(STAGE_TABLE_SIZE, NUM_OPS, dtype=torch.bool)
    for op, stages in LEGAL_STAGES.items():
        if op is not Op.ADVANCE or allow_advance:
            table[:, op] = stage_table(stages)
    return table


@device_table
def _blocker_table() -> Tensor:
    return stage_table(GERMINATION_BLOCKERS)


@device_table
def _seed_table() -> Tensor:
    return stage_table(SEED_STAGES)


def holds_seed(states: SlotStates) -> Tensor:
    """Where a seed exists.  # [N, S] bool"""
    return _seed_table(states.device).take(states.stage)


def legal_slots_by_op(
    states: SlotStates, config: LifecycleConfig, governor_override: Tensor | None = None
) -> Tensor:
    """True where an op is legal on a slot.  # [N, ops, S] bool

    `governor_override` [N] bool lifts the rest condition of PRUNE for the members where it is True.
    """
    stage = states.stage * states.enabled  # a disabled slot reads as UNKNOWN: it neither helps nor blocks
    at_rest = states.alpha_mode == int(AlphaMode.HOLD)
    released = at_rest if governor_override is None else at_rest | governor_override.unsqueeze(1)
    conditions: dict[Op, Tensor] = {
        Op.WAIT: states.enabled,
        Op.GERMINATE: _room_for_a_seed(states, stage, config).expand_as(stage),
        Op.SET_ALPHA_TARGET: at_rest,
        Op.PRUNE: released & (states.age >= config.min_prune_age),
        Op.FOSSILIZE: states.enabled,
        Op.ADVANCE: states.enabled,
    }
    by_stage = embedding(stage, _legal_stage_table(states.device, config.allow_advance))  # [N, S, ops]
    return (torch.stack([conditions[op] for op in Op], dim=2) & by_stage).movedim(2, 1)


def _room_for_a_seed(states: SlotStates, enabled_stage: Tensor, config: LifecycleConfig) -> Tensor:
    """Whether no enabled slot raises a seed or cools down, and the seed limit, over all slots, is not
    reached.  # [N, 1] bool
    """
    room = ~_blocker_table(states.device).take(enabled_stage).any(dim=1, keepdim=True)
    if config.max_seeds == 0:
        return room
    return room & (holds_seed(states).sum(dim=1, keepdim=True) < config.max_seeds)
