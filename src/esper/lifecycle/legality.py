"""Which op is legal on which slot. Masks and the executor both ask here, so they cannot disagree."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import embedding

from esper.lifecycle.actions import NUM_BLUEPRINTS, NUM_OPS, SPEED_TICKS, Op, Tempo, tempo_ticks
from esper.lifecycle.config import GateConfig, LifecycleConfig
from esper.lifecycle.evidence import SlotEvidence
from esper.lifecycle.gates import grows_block, open_gates
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
from esper.utils.devices import device_table, lookup

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


_in_seed_stage = lookup(stage_table(SEED_STAGES).tolist())
_in_heard_stage = lookup(stage_table(HEARD_STAGES).tolist())
_blocks_germination = lookup(stage_table(GERMINATION_BLOCKERS).tolist())


def holds_seed(states: SlotStates) -> Tensor:
    """Where a seed exists.  # [N, S] bool"""
    return _in_seed_stage(states.stage)


def is_heard(states: SlotStates) -> Tensor:
    """Where the host's output depends on a seed: in BLENDING, HOLDING or FOSSILIZED, and alpha above 0.

    # [N, S] bool
    """
    return _in_heard_stage(states.stage) & (states.alpha > 0)


def legal_slots_by_op(
    states: SlotStates,
    config: LifecycleConfig,
    evidence: SlotEvidence | None = None,
    steps_left: int | Tensor | None = None,
    looks: Tensor | None = None,
    fits: Tensor | None = None,
) -> Tensor:
    """True where an op is legal on a slot.  # [N, ops, S] bool

    With `evidence`, an op that its gate would refuse is not legal either. `steps_left` counts the decisions
    until the episode ends, the next one included, one number or one for each member [N]: with it, what
    cannot be finished in time is not legal, unless `config.allow_unfinished`. looks [N] bool: whose
    controller reads what is measured, by default everyone's; the others' gates are open, and they may begin
    what they cannot finish. fits [N, S, blueprints] bool: which blueprints a seed may have, of
    `fitting_in_time`; a seed may begin where there is one.
    """
    stage = states.stage * states.enabled  # a disabled slot reads as UNKNOWN: it neither helps nor blocks
    at_rest = states.alpha_mode == int(AlphaMode.HOLD)
    conditions: dict[Op, Tensor] = {
        Op.WAIT: states.enabled,
        Op.GERMINATE: _room_for_a_seed(states, stage, config).expand_as(stage),
        Op.SET_ALPHA_TARGET: at_rest,
        Op.PRUNE: at_rest & (states.age >= config.min_prune_age),
        Op.FOSSILIZE: states.enabled,
        Op.ADVANCE: states.enabled,
    }
    if evidence is not None:
        for op, passes in open_gates(states, evidence, config.gates, looks).items():
            conditions[op] = conditions[op] & passes
    by_stage = embedding(stage, _legal_stage_table(states.device, config.allow_advance))  # [N, S, ops]
    legal = torch.stack([conditions[op] for op in Op], dim=2) & by_stage
    if steps_left is not None and not config.allow_unfinished:
        in_time = _in_time(steps_to_finish(states, config.gates), steps_left, looks)
        if fits is not None:
            in_time[..., Op.GERMINATE] = True
        legal = legal & in_time
    if fits is not None:
        legal[..., Op.GERMINATE] &= fits.any(dim=2)
    return legal.movedim(2, 1)


def fitting_in_time(
    fits: Tensor, config: LifecycleConfig, steps_left: int | Tensor | None, looks: Tensor | None = None
) -> Tensor:
    """The blueprints that fit a slot and whose seeds can be HOLDING before the episode ends.

    fits [N, S, blueprints] bool; steps_left and looks as in `legal_slots_by_op` → [N, S, blueprints] bool
    """
    if steps_left is None or config.allow_unfinished:
        return fits
    return fits & _in_time(_raising_table(fits.device, *_dwells(config.gates)), steps_left, looks)


def _in_time(needed: Tensor, steps_left: int | Tensor, looks: Tensor | None) -> Tensor:
    """Where as many decisions are left; everywhere for those who do not look.  # needed [..., choices]"""
    in_time = needed <= (steps_left.view(-1, 1, 1) if isinstance(steps_left, Tensor) else steps_left)
    return in_time if looks is None else in_time | ~looks.view(-1, 1, 1)


def steps_to_finish(states: SlotStates, gates: GateConfig) -> Tensor:
    """The fewest decisions, this one included, that an op needs on a slot to come to something.

    For GERMINATE, of a seed that trains alone first, and ADVANCE: until the seed can be HOLDING, if every
    gate opens as soon as it may. For SET_ALPHA_TARGET: the shortest ramp, and a step at the new strength.
    Else 0.  # [N, S, ops] int64
    """
    table = _finish_table(states.device, *_dwells(gates))
    return table[states.stage, states.tempo, grows_block(states.blueprint).long()]


def _dwells(gates: GateConfig) -> tuple[int, int]:
    """The fewest steps of a fresh seed in TRAINING and in BLENDING."""
    alone = 0 if gates.mode == "open" else gates.training_epochs
    return max(1, alone), gates.blending_epochs if gates.mode == "strict" else 0


@device_table
def _raising_table(alone: int, dwell: int) -> Tensor:
    """The fewest decisions from planting a seed to HOLDING, by blueprint.  # [blueprints]

    A block is repeated or widened within the decision that plants its seed.
    """
    fresh = _finish_table(torch.device("cpu"), alone, dwell)[Stage.DORMANT, 0, 0, Op.GERMINATE]
    return torch.where(grows_block(torch.arange(NUM_BLUEPRINTS)), 1, fresh)


@device_table
def _finish_table(alone: int, dwell: int) -> Tensor:
    """`steps_to_finish` by stage, tempo and kind: other seeds, and those that repeat or widen a block.

    `alone` steps pass in TRAINING, at least `dwell` in BLENDING; the second kind dwells nowhere, and FAST is
    at once.  # [stages, tempos, kinds, ops]
    """
    table = torch.zeros(STAGE_TABLE_SIZE, len(Tempo), 2, NUM_OPS, dtype=torch.long)
    ticks = tempo_ticks(torch.arange(len(Tempo)))
    at_once = ticks.masked_fill(torch.arange(len(Tempo)) == Tempo.FAST, 1)  # HOLDING is the next decision
    table[..., Op.ADVANCE] = 1
    for kind, training, blending in ((0, alone, ticks.clamp(min=dwell)), (1, 1, at_once)):
        table[Stage.GERMINATED, :, kind, Op.ADVANCE] = 1 + training + blending
        table[Stage.TRAINING, :, kind, Op.ADVANCE] = 1 + blending
    table[..., Op.GERMINATE] = 1 + table[Stage.GERMINATED, :, 0, Op.ADVANCE].min()
    table[..., Op.SET_ALPHA_TARGET] = 1 + min(ticks for ticks in SPEED_TICKS.values() if ticks)
    return table


def _room_for_a_seed(states: SlotStates, enabled_stage: Tensor, config: LifecycleConfig) -> Tensor:
    """Whether no enabled slot raises a seed or cools down, and the seed limit, over all slots, is not
    reached.  # [N, 1] bool
    """
    room = ~_blocks_germination(enabled_stage).any(dim=1, keepdim=True)
    if config.max_seeds == 0:
        return room
    return room & (holds_seed(states).sum(dim=1, keepdim=True) < config.max_seeds)
