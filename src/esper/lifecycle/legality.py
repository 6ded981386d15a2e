"""Which op is legal on which slot, and the gates between stages.

Masks and the executor both ask here, so they cannot disagree. What was never measured passes no gate.
"""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor
from torch.nn.functional import embedding

from esper.lifecycle.actions import (
    GROWTH_BLUEPRINTS,
    NUM_BLUEPRINTS,
    NUM_OPS,
    SPEED_TICKS,
    Blueprint,
    Op,
    Tempo,
    selectable_blueprints,
    tempo_ticks,
)
from esper.lifecycle.config import GateConfig, LifecycleConfig
from esper.lifecycle.slot_states import AlphaMode, SlotEvidence, SlotStates
from esper.lifecycle.stages import (
    ADVANCEABLE_STAGES,
    FORWARD_STAGES,
    FOSSILIZABLE_STAGES,
    GERMINATION_BLOCKERS,
    NEXT_STAGE,
    PRUNABLE_STAGES,
    SEED_STAGES,
    STAGE_TABLE_SIZE,
    Stage,
    stage_table,
)
from esper.utils.devices import device_table, lookup


class Gate(IntEnum):
    """What refused an action; NONE where nothing did."""

    NONE = -1
    G0 = 0
    G1 = 1
    G2 = 2
    G3 = 3
    G5 = 5


GATE_INTO: dict[Stage, Gate] = {
    Stage.GERMINATED: Gate.G0,
    Stage.TRAINING: Gate.G1,
    Stage.BLENDING: Gate.G2,
    Stage.HOLDING: Gate.G3,
    Stage.FOSSILIZED: Gate.G5,
}


@device_table
def gate_table() -> Tensor:
    """Return the gate before an op on a slot in a stage, NONE where there is none.  # [ops, stages] int64"""
    table = torch.full((NUM_OPS, STAGE_TABLE_SIZE), int(Gate.NONE))
    table[Op.GERMINATE, Stage.DORMANT] = GATE_INTO[Stage.GERMINATED]
    for stage, after in NEXT_STAGE.items():
        table[Op.ADVANCE, stage] = GATE_INTO[after]
    for stage in FOSSILIZABLE_STAGES:
        table[Op.FOSSILIZE, stage] = GATE_INTO[Stage.FOSSILIZED]
    return table


@device_table
def blueprint_table(topology: str) -> Tensor:
    """Return True for the blueprints that may be germinated in a host of this topology.  # [blueprints]"""
    table = torch.zeros(NUM_BLUEPRINTS, dtype=torch.bool)
    table[[int(b) for b in selectable_blueprints(topology)]] = True
    return table


# Where a seed repeats or widens the block ahead of it: a function over tensors of blueprints, of any shape.
# The last value is the one that NO_BLUEPRINT, -1, finds.
grows_block = lookup([*(blueprint in GROWTH_BLUEPRINTS for blueprint in Blueprint), False])


def g0_valid_blueprint(blueprint: Tensor, topology: str) -> Tensor:
    """Check G0, into GERMINATED: the blueprint exists and fits the topology. Any shape, any integer."""
    known = blueprint_table(blueprint.device, topology)[blueprint.clamp(0, NUM_BLUEPRINTS - 1)]
    return known & (blueprint >= 0) & (blueprint < NUM_BLUEPRINTS)


def g1_ready_to_train(states: SlotStates) -> Tensor:
    """Check G1, into TRAINING: the seed has germinated.  # [N, S]"""
    return states.stage == Stage.GERMINATED


def g2_ready_to_blend(states: SlotStates, evidence: SlotEvidence, config: GateConfig) -> Tensor:
    """Check G2, into BLENDING: long enough in TRAINING, healthy (permissive) or useful (strict).  # [N, S]

    A seed that repeats or widens a block needs no training alone: it moves on at once.
    """
    training = states.stage == Stage.TRAINING
    if config.mode == "open":
        return training
    dwelt = states.epochs_in_stage >= config.training_epochs
    if config.mode == "strict":
        gains = _at_least(evidence.shadow_gain, config.min_shadow_gain)
        ready = dwelt & gains & _at_least(evidence.gradient_ratio, config.min_gradient_ratio)
    else:
        ready = dwelt & (evidence.exploding == 0) & _at_least(evidence.gradient_health, config.min_health)
    return training & (ready | grows_block(states.blueprint))


def g3_ready_to_hold(states: SlotStates, config: GateConfig) -> Tensor:
    """Check G3, into HOLDING: a target of 1, reached and at rest; strict asks for time too.  # [N, S]"""
    full = (states.alpha_target == 1.0) & (states.alpha == 1.0) & (states.alpha_mode == AlphaMode.HOLD)
    ready = (states.stage == Stage.BLENDING) & full
    if config.mode == "strict":
        return ready & ((states.epochs_in_stage >= config.blending_epochs) | grows_block(states.blueprint))
    return ready


def g5_ready_to_fossilize(states: SlotStates, evidence: SlotEvidence, config: GateConfig) -> Tensor:
    """Check G5, into FOSSILIZED: a contribution above 0 or (strict) at least the minimum.  # [N, S]"""
    contribution = evidence.contribution
    if config.mode == "open":
        return states.stage == Stage.HOLDING
    if config.mode == "strict":
        earned = _at_least(contribution, config.min_contribution)
    else:
        earned = (contribution > 0) & contribution.isfinite()
    return (states.stage == Stage.HOLDING) & earned


OPEN = GateConfig(mode="open")


def open_gates(
    states: SlotStates, evidence: SlotEvidence, config: GateConfig, uses_metrics: Tensor | None = None
) -> dict[Op, Tensor]:
    """Return where the gate before each op lets it through, by what is measured.  # each [N, S] bool

    An op that is not named meets no gate on a slot: G0, before GERMINATE, asks about the blueprint alone.
    uses_metrics [N] bool: whose seeds are judged by what was measured, by default everyone's; the gates of
    the others are open.
    """
    if uses_metrics is not None:
        judged, unjudged = open_gates(states, evidence, config), open_gates(states, evidence, OPEN)
        return {op: torch.where(uses_metrics.unsqueeze(1), judged[op], unjudged[op]) for op in judged}
    return {
        Op.ADVANCE: g1_ready_to_train(states)
        | g2_ready_to_blend(states, evidence, config)
        | g3_ready_to_hold(states, config),
        Op.FOSSILIZE: g5_ready_to_fossilize(states, evidence, config),
    }


def _at_least(value: Tensor, minimum: float) -> Tensor:
    """Find finite values that reach the minimum: NaN is unmeasured, infinity is no measurement."""
    # NaN compares as False, infinity has to be excluded.
    return (value >= minimum) & value.isfinite()


LEGAL_STAGES: dict[Op, frozenset[Stage]] = {
    Op.WAIT: frozenset(Stage),
    Op.GERMINATE: frozenset({Stage.DORMANT}),
    Op.SET_ALPHA_TARGET: FORWARD_STAGES & PRUNABLE_STAGES,  # active, and not yet permanent
    Op.PRUNE: PRUNABLE_STAGES,
    Op.FOSSILIZE: FOSSILIZABLE_STAGES,
    Op.ADVANCE: ADVANCEABLE_STAGES,
}


@device_table
def _legal_stage_table(allow_advance: bool) -> Tensor:
    """Return True where a stage admits an op.  # [stages, ops]"""
    table = torch.zeros(STAGE_TABLE_SIZE, NUM_OPS, dtype=torch.bool)
    for op, stages in LEGAL_STAGES.items():
        if op is not Op.ADVANCE or allow_advance:
            table[:, op] = stage_table(stages)
    return table


_in_seed_stage = lookup(stage_table(SEED_STAGES).tolist())
_in_heard_stage = lookup(stage_table(FORWARD_STAGES).tolist())
_blocks_germination = lookup(stage_table(GERMINATION_BLOCKERS).tolist())


def holds_seed(states: SlotStates) -> Tensor:
    """Return where a seed exists.  # [N, S] bool"""
    return _in_seed_stage(states.stage)


def in_forward_pass(states: SlotStates) -> Tensor:
    """Find seeds that the host's output depends on: in BLENDING, HOLDING or FOSSILIZED, alpha above 0.

    # [N, S] bool
    """
    return _in_heard_stage(states.stage) & (states.alpha > 0)


def legal_slots_by_op(
    states: SlotStates,
    config: LifecycleConfig,
    evidence: SlotEvidence | None = None,
    steps_left: int | Tensor | None = None,
    uses_metrics: Tensor | None = None,
    fits: Tensor | None = None,
) -> Tensor:
    """Return True where an op is legal on a slot.  # [N, ops, S] bool

    With `evidence`, an op that its gate would refuse is not legal either. `steps_left` counts the decisions
    until the episode ends, the next one included, one number or one for each member [N]: with it, what
    cannot be finished in time is not legal, unless `config.allow_unfinished`. uses_metrics [N] bool: whose
    controller reads what is measured, by default everyone's; the others' gates are open, and they may begin
    what they cannot finish. fits [N, S, blueprints] bool: which blueprints a seed may have, of
    `fitting_in_time`; a seed may begin where there is one.
    """
    # UNKNOWN is 0.
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
        for op, passes in open_gates(states, evidence, config.gates, uses_metrics).items():
            conditions[op] = conditions[op] & passes
    by_stage = embedding(stage, _legal_stage_table(states.device, config.allow_advance))  # [N, S, ops]
    # [N, S, ops]: the conditions of each op and the stages that admit it.
    legal = torch.stack([conditions[op] for op in Op], dim=2) & by_stage
    if steps_left is not None and not config.allow_unfinished:
        in_time = _in_time(steps_to_finish(states, config.gates), steps_left, uses_metrics)
        if fits is not None:
            # Which blueprints can be finished is part of `fits`.
            in_time[..., Op.GERMINATE] = True
        legal = legal & in_time
    if fits is not None:
        legal[..., Op.GERMINATE] &= fits.any(dim=2)
    return legal.movedim(2, 1)


def fitting_in_time(
    fits: Tensor, config: LifecycleConfig, steps_left: int | Tensor | None, uses_metrics: Tensor | None = None
) -> Tensor:
    """Return the blueprints that fit a slot and whose seeds can be HOLDING before the episode ends.

    fits [N, S, blueprints] bool; the others as in `legal_slots_by_op` → [N, S, blueprints] bool
    """
    if steps_left is None or config.allow_unfinished:
        return fits
    needed = _steps_by_blueprint(fits.device, *_least_dwell_times(config.gates))  # [blueprints]
    return fits & _in_time(needed, steps_left, uses_metrics)


def _in_time(needed: Tensor, steps_left: int | Tensor, uses_metrics: Tensor | None) -> Tensor:
    """Find where enough decisions are left; everywhere for those who use no metrics.  # needed [..., C]"""
    in_time = needed <= (steps_left.view(-1, 1, 1) if isinstance(steps_left, Tensor) else steps_left)
    return in_time if uses_metrics is None else in_time | ~uses_metrics.view(-1, 1, 1)


def steps_to_finish(states: SlotStates, gates: GateConfig) -> Tensor:
    """Return the fewest decisions, this one included, that an op needs on a slot to come to something.

    For GERMINATE, of a seed that trains alone first, and ADVANCE: until the seed can be HOLDING, if every
    gate opens as soon as it may. For SET_ALPHA_TARGET: the shortest ramp, and a step at the new strength.
    Else 0.  # [N, S, ops] int64
    """
    table = _finish_table(states.device, *_least_dwell_times(gates))
    return table[states.stage, states.tempo, grows_block(states.blueprint).long()]


def _least_dwell_times(gates: GateConfig) -> tuple[int, int]:
    """Return the fewest steps of a fresh seed in TRAINING and in BLENDING."""
    alone = 0 if gates.mode == "open" else gates.training_epochs
    return max(1, alone), gates.blending_epochs if gates.mode == "strict" else 0


@device_table
def _steps_by_blueprint(alone: int, dwell: int) -> Tensor:
    """Return the fewest decisions from planting a seed to HOLDING, by blueprint.  # [blueprints]

    A block is repeated or widened within the decision that plants its seed.
    """
    fresh = _finish_table(torch.device("cpu"), alone, dwell)[Stage.DORMANT, 0, 0, Op.GERMINATE]
    return torch.where(grows_block(torch.arange(NUM_BLUEPRINTS)), 1, fresh)


@device_table
def _finish_table(alone: int, dwell: int) -> Tensor:
    """Tabulate `steps_to_finish` by stage, tempo and kind: other seeds, and those that grow a block.

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
    # One decision plants, then the fewest of a germinated seed.
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
