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
    PRUNABLE_STAGES,
    SEED_STAGES,
    STAGE_TABLE_SIZE,
    Stage,
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


# The gate before an op on a slot in a stage.
GATES: dict[tuple[Op, Stage], Gate] = {
    (Op.GERMINATE, Stage.DORMANT): Gate.G0,
    (Op.ADVANCE, Stage.GERMINATED): Gate.G1,
    (Op.ADVANCE, Stage.TRAINING): Gate.G2,
    (Op.ADVANCE, Stage.BLENDING): Gate.G3,
    (Op.FOSSILIZE, Stage.HOLDING): Gate.G5,
}


@device_table
def gate_table() -> Tensor:
    """Return the gate before an op on a slot in a stage, NONE where there is none.  # [ops, stages] int64"""
    table = torch.full((NUM_OPS, STAGE_TABLE_SIZE), int(Gate.NONE))
    for pair, gate in GATES.items():
        table[pair] = gate
    return table


@device_table
def blueprint_table(topology: str) -> Tensor:
    """Return True for the blueprints that may be germinated in a host of this topology.  # [blueprints]"""
    selectable = selectable_blueprints(topology)
    return torch.tensor([blueprint in selectable for blueprint in Blueprint])


# Where a seed repeats or widens the block ahead of it: a function over tensors of blueprints, of any shape.
# The last value is the one that NO_BLUEPRINT, -1, finds.
grows_block = lookup([*(blueprint in GROWTH_BLUEPRINTS for blueprint in Blueprint), False])


def open_gates(
    states: SlotStates, evidence: SlotEvidence, config: GateConfig, uses_metrics: Tensor | None = None
) -> dict[Op, Tensor]:
    """Return where the gate before each op lets it through, by what is measured.  # each [N, S] bool

    An op that is not named meets no gate on a slot: G0, before GERMINATE, asks about the blueprint alone.
    uses_metrics [N] bool: whose seeds are judged by what was measured, by default everyone's; the gates of
    the others are open. What was never measured is NaN and compares as False.
    """
    stage = states.stage
    # G2, into BLENDING: long enough in TRAINING, and healthy. A block that is repeated or widened needs no
    # training alone: it moves on at once.
    healthy = (evidence.exploding == 0) & (evidence.gradient_health >= config.min_health)
    trained = (states.epochs_in_stage >= config.training_epochs) & healthy | grows_block(states.blueprint)
    # G5, into FOSSILIZED: a contribution above 0.
    earned = (evidence.contribution > 0) & evidence.contribution.isfinite()
    if uses_metrics is not None:
        unjudged = ~uses_metrics.unsqueeze(1)
        trained, earned = trained | unjudged, earned | unjudged
    # G3, into HOLDING: a target of 1, reached and at rest.
    full = (states.alpha_target == 1.0) & (states.alpha == 1.0) & (states.alpha_mode == AlphaMode.HOLD)
    return {
        # G1, into TRAINING, lets every germinated seed through.
        Op.ADVANCE: (stage == Stage.GERMINATED)
        | ((stage == Stage.TRAINING) & trained)
        | ((stage == Stage.BLENDING) & full),
        Op.FOSSILIZE: (stage == Stage.HOLDING) & earned,
    }


LEGAL_STAGES: dict[Op, frozenset[Stage]] = {
    Op.WAIT: frozenset(Stage),
    Op.GERMINATE: frozenset({Stage.DORMANT}),
    Op.SET_ALPHA_TARGET: FORWARD_STAGES & PRUNABLE_STAGES,  # active, and not yet permanent
    Op.PRUNE: PRUNABLE_STAGES,
    Op.FOSSILIZE: FOSSILIZABLE_STAGES,
    Op.ADVANCE: ADVANCEABLE_STAGES,
}


@device_table
def _legal_stage_table(allow_growth: bool, allow_advance: bool) -> Tensor:
    """Return True where a stage admits an op.  # [stages, ops]"""
    allowed = {Op.GERMINATE: allow_growth, Op.ADVANCE: allow_advance}
    return torch.tensor(
        [
            [stage in LEGAL_STAGES[op] and allowed.get(op, True) for op in Op]
            for stage in range(STAGE_TABLE_SIZE)
        ]
    )


_in_seed_stage, _in_forward_stage, _blocks_germination = (
    lookup([stage in stages for stage in range(STAGE_TABLE_SIZE)])
    for stages in (SEED_STAGES, FORWARD_STAGES, GERMINATION_BLOCKERS)
)


def holds_seed(states: SlotStates) -> Tensor:
    """Return where a seed exists.  # [N, S] bool"""
    return _in_seed_stage(states.stage)


def in_forward_pass(states: SlotStates) -> Tensor:
    """Find seeds that the host's output depends on: in a forward stage, alpha above 0.  # [N, S] bool"""
    return _in_forward_stage(states.stage) & (states.alpha > 0)


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
    # A disabled slot reads as UNKNOWN, which is 0: it neither helps nor blocks.
    stage = states.stage * states.enabled
    at_rest = states.alpha_mode == int(AlphaMode.HOLD)
    # No slot holds a young seed or cools down, and max_seeds is not reached.  # [N, 1]
    may_germinate = ~_blocks_germination(stage).any(dim=1, keepdim=True)
    if config.max_seeds:
        may_germinate = may_germinate & (holds_seed(states).sum(dim=1, keepdim=True) < config.max_seeds)
    conditions = dict.fromkeys(Op, states.enabled) | {
        Op.GERMINATE: may_germinate.expand_as(stage),
        Op.SET_ALPHA_TARGET: at_rest,
        Op.PRUNE: at_rest & (states.age >= config.min_prune_age),
    }
    if evidence is not None:
        for op, passes in open_gates(states, evidence, config.gates, uses_metrics).items():
            conditions[op] = conditions[op] & passes
    table = _legal_stage_table(states.device, config.allow_growth, config.allow_advance)
    # [N, S, ops]: the conditions of each op and the stages that admit it.
    legal = torch.stack([conditions[op] for op in Op], dim=2) & embedding(stage, table)
    if steps_left is not None and not config.allow_unfinished:
        fewest = _finish_table(states.device, config.gates.training_epochs)
        needed = fewest[states.stage, states.tempo, grows_block(states.blueprint).long()]  # [N, S, ops]
        in_time = _in_time(needed, steps_left, uses_metrics)
        if fits is not None:  # which tells the blueprints that can be finished
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
    needed = _steps_by_blueprint(fits.device, config.gates.training_epochs)  # [blueprints]
    return fits & _in_time(needed, steps_left, uses_metrics)


def _in_time(needed: Tensor, steps_left: int | Tensor, uses_metrics: Tensor | None) -> Tensor:
    """Find where enough decisions are left; everywhere for those who use no metrics.  # needed [..., C]"""
    in_time = needed <= (steps_left.view(-1, 1, 1) if isinstance(steps_left, Tensor) else steps_left)
    return in_time if uses_metrics is None else in_time | ~uses_metrics.view(-1, 1, 1)


@device_table
def _steps_by_blueprint(training_epochs: int) -> Tensor:
    """Return the fewest decisions from planting a seed to HOLDING, by blueprint.  # [blueprints]

    A block is repeated or widened within the decision that plants its seed.
    """
    fresh = _finish_table(torch.device("cpu"), training_epochs)[Stage.DORMANT, 0, 0, Op.GERMINATE]
    return torch.where(grows_block(torch.arange(NUM_BLUEPRINTS)), 1, fresh)


@device_table
def _finish_table(training_epochs: int) -> Tensor:
    """Tabulate the fewest decisions, this one included, that an op needs on a slot to come to something.

    For GERMINATE, of a seed that trains alone first, and ADVANCE: until the seed can be HOLDING, if every
    gate opens as soon as it may. For SET_ALPHA_TARGET: the shortest ramp, and a step at the new strength.
    Else 0. Kind 1 is a seed that grows a block: it waits nowhere, and FAST is at once; any other seed spends
    at least `training_epochs` steps in TRAINING.  # [stages, tempos, kinds, ops] int64
    """
    table = torch.zeros(STAGE_TABLE_SIZE, len(Tempo), 2, NUM_OPS, dtype=torch.long)
    ticks = tempo_ticks(torch.arange(len(Tempo)))
    at_once = ticks.masked_fill(torch.arange(len(Tempo)) == Tempo.FAST, 1)  # HOLDING is the next decision
    table[..., Op.ADVANCE] = 1
    for kind, training, blending in ((0, max(1, training_epochs), ticks), (1, 1, at_once)):
        table[Stage.GERMINATED, :, kind, Op.ADVANCE] = 1 + training + blending
        table[Stage.TRAINING, :, kind, Op.ADVANCE] = 1 + blending
    # One decision plants, then the fewest of a germinated seed.
    table[..., Op.GERMINATE] = 1 + table[Stage.GERMINATED, :, 0, Op.ADVANCE].min()
    table[..., Op.SET_ALPHA_TARGET] = 1 + min(ticks for ticks in SPEED_TICKS.values() if ticks)
    return table
