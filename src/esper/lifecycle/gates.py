"""The gates between stages. What was never measured never passes."""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor

from esper.lifecycle.actions import (
    GROWTH_BLUEPRINTS,
    NUM_BLUEPRINTS,
    NUM_OPS,
    Blueprint,
    Op,
    selectable_blueprints,
)
from esper.lifecycle.config import GateConfig
from esper.lifecycle.evidence import SlotEvidence
from esper.lifecycle.slot_states import AlphaMode, SlotStates
from esper.lifecycle.stages import FOSSILIZABLE_STAGES, NEXT_STAGE, STAGE_TABLE_SIZE, Stage
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
    """The gate before an op on a slot in a stage, NONE where there is none.  # [ops, stages] int64"""
    table = torch.full((NUM_OPS, STAGE_TABLE_SIZE), int(Gate.NONE))
    table[Op.GERMINATE, Stage.DORMANT] = GATE_INTO[Stage.GERMINATED]
    for stage, after in NEXT_STAGE.items():
        table[Op.ADVANCE, stage] = GATE_INTO[after]
    for stage in FOSSILIZABLE_STAGES:
        table[Op.FOSSILIZE, stage] = GATE_INTO[Stage.FOSSILIZED]
    return table


@device_table
def blueprint_table(topology: str) -> Tensor:
    """True for the blueprints that may be germinated in a host of this topology.  # [blueprints]"""
    table = torch.zeros(NUM_BLUEPRINTS, dtype=torch.bool)
    table[[int(b) for b in selectable_blueprints(topology)]] = True
    return table


# Where a seed repeats or widens the block ahead of it: a function over tensors of blueprints, of any shape.
# The last value is the one that NO_BLUEPRINT, -1, finds.
grows_block = lookup([*(blueprint in GROWTH_BLUEPRINTS for blueprint in Blueprint), False])


def g0_valid_blueprint(blueprint: Tensor, topology: str) -> Tensor:
    """Into GERMINATED: the blueprint exists and fits the topology. Any shape, any integer."""
    known = blueprint_table(blueprint.device, topology)[blueprint.clamp(0, NUM_BLUEPRINTS - 1)]
    return known & (blueprint >= 0) & (blueprint < NUM_BLUEPRINTS)


def g1_ready_to_train(states: SlotStates) -> Tensor:
    """Into TRAINING: the seed has germinated.  # [N, S]"""
    return states.stage == Stage.GERMINATED


def g2_ready_to_blend(states: SlotStates, evidence: SlotEvidence, config: GateConfig) -> Tensor:
    """Into BLENDING: long enough in TRAINING, and healthy (permissive) or useful (strict).  # [N, S]

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
    """Into HOLDING: a target of 1, reached and at rest; strict asks for time in BLENDING too.  # [N, S]"""
    full = (states.alpha_target == 1.0) & (states.alpha == 1.0) & (states.alpha_mode == AlphaMode.HOLD)
    ready = (states.stage == Stage.BLENDING) & full
    if config.mode == "strict":
        return ready & ((states.epochs_in_stage >= config.blending_epochs) | grows_block(states.blueprint))
    return ready


def g5_ready_to_fossilize(states: SlotStates, evidence: SlotEvidence, config: GateConfig) -> Tensor:
    """Into FOSSILIZED: a measured contribution, above 0 or (strict) at least the minimum.  # [N, S]"""
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
    states: SlotStates, evidence: SlotEvidence, config: GateConfig, looks: Tensor | None = None
) -> dict[Op, Tensor]:
    """Where the gate before an op would let it through now, by what is already measured.  # each [N, S] bool

    An op that is not named meets no gate on a slot: G0, before GERMINATE, asks about the blueprint alone.
    looks [N] bool: whose seeds are judged by what was measured, by default everyone's; the others' gates
    are open.
    """
    if looks is not None:
        judged, unjudged = open_gates(states, evidence, config), open_gates(states, evidence, OPEN)
        return {op: torch.where(looks.unsqueeze(1), judged[op], unjudged[op]) for op in judged}
    return {
        Op.ADVANCE: g1_ready_to_train(states)
        | g2_ready_to_blend(states, evidence, config)
        | g3_ready_to_hold(states, config),
        Op.FOSSILIZE: g5_ready_to_fossilize(states, evidence, config),
    }


def _at_least(value: Tensor, minimum: float) -> Tensor:
    """A finite value that reaches the minimum: NaN is unmeasured, infinity is no measurement."""
    return (value >= minimum) & value.isfinite()
