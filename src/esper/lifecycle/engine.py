"""One step of the rules: `apply` executes the actions of all members, `tick` lets time pass.

Both are pure functions over rows. Nothing loops over members or slots and nothing is read back from the
device; a bad choice in one row fails in that row alone and counts as WAIT.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from esper.lifecycle.actions import (
    SPEED_TICKS,
    STYLE_CURVE,
    TARGET_ALPHA,
    Actions,
    AlphaCurve,
    AlphaSpeed,
    Blueprint,
    Head,
    Op,
    Style,
    Tempo,
    head_sizes,
    relevance,
    tempo_ticks,
)
from esper.lifecycle.config import LifecycleConfig
from esper.lifecycle.legality import (
    Gate,
    fitting_in_time,
    gate_table,
    grows_block,
    holds_seed,
    legal_slots_by_op,
    open_gates,
)
from esper.lifecycle.slot_states import BLANK_SLOT, AlphaMode, SlotEvidence, SlotStates
from esper.lifecycle.stages import COOLDOWN_STAGES, NEXT_STAGE, STAGE_TABLE_SIZE, TRANSITIONS, Stage
from esper.utils.devices import device_table, lookup

# Of the sigmoid curves, in the order of `AlphaCurve`; the first two are no sigmoids.
_steepness = lookup([1.0, 1.0, 6.0, 12.0, 24.0])


def ease(curve: Tensor, t: Tensor) -> Tensor:
    """Ease a ramp: map the share t of its time to the share of its way, 0 to 0 and 1 to 1.

    curve int64 and t float32 of one shape. LINEAR: t; COSINE: ½(1 − cos πt); sigmoids of steepness k:
    (σ(k(t − ½)) − σ(−k/2)) / (σ(k/2) − σ(−k/2)), here as ½ + ½·tanh(k(t − ½)/2) / tanh(k/4), which is the
    same and, unlike torch's sigmoid, gives a member the same bits beside any number of others.
    """
    k = _steepness(curve)
    eased = 0.5 + 0.5 * torch.tanh(0.5 * k * (t - 0.5)) / torch.tanh(0.25 * k)
    eased = torch.where(curve == AlphaCurve.LINEAR, t, eased)
    return torch.where(curve == AlphaCurve.COSINE, 0.5 * (1.0 - torch.cos(math.pi * t)), eased)


def retarget(states: SlotStates, where: Tensor, target: Tensor, ticks: Tensor, curve: Tensor) -> SlotStates:
    """Begin a ramp from the present alpha to `target` in `ticks` steps, where `where` is True.

    `where` [N, S] bool; the others broadcast to it. No ticks, or no way to go, snaps and stays at rest.
    Whether a slot may be retargeted is a question of legality and is settled before this call.
    """
    here = (ticks == 0) | (target == states.alpha)
    snapped = torch.where(here, target, states.alpha)
    mode = torch.where(target > states.alpha, int(AlphaMode.UP), int(AlphaMode.DOWN))
    mode, total = mode.masked_fill(here, int(AlphaMode.HOLD)), ticks.expand_as(here).masked_fill(here, 0)
    return states.replace(
        alpha=torch.where(where, snapped, states.alpha),
        alpha_start=torch.where(where, snapped, states.alpha_start),
        alpha_target=torch.where(where, target, states.alpha_target),
        alpha_mode=torch.where(where, mode, states.alpha_mode),
        alpha_curve=torch.where(where, curve, states.alpha_curve),
        alpha_steps_total=torch.where(where, total, states.alpha_steps_total),
        alpha_steps_done=states.alpha_steps_done.masked_fill(where, 0),
    )


def advance_alpha(states: SlotStates) -> SlotStates:
    """Advance every ramp by one tick; a ramp that is through rests exactly on its target."""
    moving = states.alpha_mode != AlphaMode.HOLD
    done = states.alpha_steps_done + moving
    arrived = moving & (done >= states.alpha_steps_total)
    # alpha = start + (target − start)·E(done / total), exact at the end.
    share = done / states.alpha_steps_total.clamp(min=1)
    rise = states.alpha_target - states.alpha_start
    alpha = (states.alpha_start + rise * ease(states.alpha_curve, share)).clamp(0.0, 1.0)
    alpha = torch.where(moving, alpha, states.alpha)
    return states.replace(
        alpha=torch.where(arrived, states.alpha_target, alpha),
        alpha_mode=states.alpha_mode.masked_fill(arrived, int(AlphaMode.HOLD)),
        alpha_steps_done=done,
    )


@dataclass(frozen=True)
class ActionOutcome:
    """What became of one action per member."""

    states: SlotStates
    legal: Tensor  # [N] bool: the op was legal on the slot, and every head that it reads was in range
    succeeded: Tensor  # [N] bool: legal, and no gate refused it
    asked_op: Tensor  # [N] int64: the op as asked for
    executed_op: Tensor  # [N] int64: the op, or WAIT where it failed
    refused_by: Tensor  # [N] int64: a Gate, NONE where no gate refused
    germinated: Tensor  # [N, S] bool: seeds that began here
    pruned: Tensor  # [N, S] bool: seeds that ended here


@dataclass(frozen=True)
class TickOutcome:
    """What a tick did."""

    states: SlotStates
    pruned: Tensor  # [N, S] bool: seeds that ended here
    folded: Tensor  # [N, S] bool: fossils that became part of the host, so that their slots are free again


@device_table
def _last_choices(num_slots: int) -> Tensor:
    """Return the highest choice of each head.  # [heads]"""
    return torch.tensor(head_sizes(num_slots)) - 1


@device_table
def _cooldown_ticks(embargo_ticks: int) -> Tensor:
    """Return how many ticks a slot stays in each stage before it moves by itself.  # [stages]"""
    # A stage that does not cool down is never left by waiting: no clock counts that far.
    table = torch.full((STAGE_TABLE_SIZE,), torch.iinfo(torch.long).max)
    table[Stage.PRUNED] = 0
    table[Stage.EMBARGOED] = embargo_ticks
    table[Stage.RESETTING] = 1
    return table


# Where ADVANCE leads from a stage, and time from one that cools down; elsewhere a slot stays.
_next_stage, _cooled_stage = (
    lookup([int(moves.get(stage, stage)) for stage in range(STAGE_TABLE_SIZE)])  # type: ignore[call-overload]
    for moves in (NEXT_STAGE, {stage: min(TRANSITIONS[stage]) for stage in COOLDOWN_STAGES})
)
_speed_ticks = lookup(list(SPEED_TICKS.values()))
_target_alpha = lookup(list(TARGET_ALPHA.values()))
_style_curve = lookup([int(STYLE_CURVE[style]) for style in Style])


def apply(
    states: SlotStates,
    actions: Actions,
    evidence: SlotEvidence,
    config: LifecycleConfig,
    fits: Tensor,
    steps_left: int | Tensor | None = None,
    uses_metrics: Tensor | None = None,
) -> ActionOutcome:
    """Execute one action per member; what is illegal or refused by a gate changes nothing in its row.

    evidence: what is measured of every slot, for the gates. fits [N, S, blueprints] bool: what G0 lets
    through in each slot. steps_left, uses_metrics: as in `legal_slots_by_op`.
    """
    last = _last_choices(states.device, states.num_slots)
    # Out-of-range choices are clamped to be safe indices; `in_range` makes such a row illegal below.
    choices = actions.choices.clamp(min=0).minimum(last)  # [N, heads], safe to gather with
    op, slot = choices[:, Head.OP], choices[:, Head.SLOT]
    in_range = choices == actions.choices
    read = relevance(op)  # [N, heads]
    members = torch.arange(states.num_members, device=states.device)
    fits = fitting_in_time(fits, config, steps_left, uses_metrics)
    # Without evidence: what a gate refuses is legal and costs the step, so `refused_by` can name the gate.
    pair_legal = legal_slots_by_op(states, config, None, steps_left, uses_metrics, fits)[members, op, slot]
    legal = (in_range | ~read).all(dim=1) & (pair_legal | (op == Op.WAIT))

    gate = gate_table(states.device)[op, _at(states.stage, slot)]
    # G0, into GERMINATED: the blueprint fits its slot. The other gates are asked about the slot alone.
    refused = (op == Op.GERMINATE) & ~fits[members, slot, choices[:, Head.BLUEPRINT]]
    for gated, passes in open_gates(states, evidence, config.gates, uses_metrics).items():
        refused = refused | ((op == gated) & ~_at(passes, slot))
    succeeded = legal & ~refused
    executed = op.masked_fill(~succeeded, int(Op.WAIT))
    after, germinated, pruned = _execute(states, choices, executed)
    return ActionOutcome(
        states=after,
        legal=legal,
        succeeded=succeeded,
        asked_op=actions[Head.OP],
        executed_op=executed,
        refused_by=gate.masked_fill(~(legal & refused), int(Gate.NONE)),
        germinated=germinated,
        pruned=pruned,
    )


def merge_outcomes(outcomes: Sequence[ActionOutcome]) -> ActionOutcome:
    """Merge the outcomes of consecutive actions of a step: the first op, all births and ends."""
    return replace(
        outcomes[0],
        states=outcomes[-1].states,
        germinated=torch.stack([outcome.germinated for outcome in outcomes]).any(0),
        pruned=torch.stack([outcome.pruned for outcome in outcomes]).any(0),
    )


def tick(states: SlotStates, config: LifecycleConfig) -> TickOutcome:
    """Let one decision step pass: ramps move, scheduled prunes end, pruned slots cool down, clocks count.

    A fossil whose slot has room becomes part of the host, and its slot is empty again. A slot moves at most
    once, judged on the stage in which the tick found it.
    """
    ramped = advance_alpha(states)
    ended = ramped.prune_pending & (ramped.alpha_mode == AlphaMode.HOLD)
    clock = states.epochs_in_stage + 1
    cooled = clock >= _cooldown_ticks(states.device, config.embargo_ticks).take(states.stage)
    # A clone is trained already. New units first train for a step beside their block: their moments need a
    # count of their own until they stand for something.
    ripe = (states.age > 0) | (states.blueprint == Blueprint.CLONE)
    folded = (states.stage == Stage.FOSSILIZED) & (states.room > 0) & ripe
    moved = ended | cooled | folded
    stage = torch.where(cooled, _cooled_stage(states.stage), states.stage)
    after = _without_seed(ramped, ended | folded).replace(
        stage=stage.masked_fill(ended, int(Stage.PRUNED)).masked_fill(folded, int(Stage.DORMANT)),
        epochs_in_stage=clock.masked_fill(moved, 0),
        room=states.room - folded.long(),
    )
    return TickOutcome(after.replace(age=after.age + holds_seed(after)), pruned=ended, folded=folded)


def force_prune(states: SlotStates, where: Tensor) -> SlotStates:
    """End every seed in the given slots at once.  # where [N, S] bool

    It asks neither age nor rest, and takes fossilised seeds too: a rollback undoes what grew since.
    """
    ending = where & holds_seed(states)
    return _without_seed(states, ending).replace(
        stage=states.stage.masked_fill(ending, int(Stage.PRUNED)),
        epochs_in_stage=states.epochs_in_stage.masked_fill(ending, 0),
    )


def _at(values: Tensor, slot: Tensor) -> Tensor:
    """Return the value at each member's chosen slot.  # [N, S], [N] -> [N]"""
    return values.gather(1, slot.unsqueeze(1)).squeeze(1)


def _execute(states: SlotStates, choices: Tensor, op: Tensor) -> tuple[SlotStates, Tensor, Tensor]:
    """Execute ops that are legal and let through; return the states, where seeds began and where they ended.

    choices [N, heads]: the members' choices, in range; op [N]: what is carried out
    """
    pick = dict(zip(Head, choices.unsqueeze(2).unbind(1), strict=True))  # each [N, 1]
    here = torch.arange(states.num_slots, device=op.device) == pick[Head.SLOT]  # [N, S]
    kinds = op.unsqueeze(1) == torch.arange(len(Op), device=op.device)  # [N, ops]
    # Where each op is carried out.  # each [N, S] bool
    at = dict(zip(Op, (here.unsqueeze(1) & kinds.unsqueeze(2)).unbind(1), strict=True))
    # INSTANT, or an alpha of 0, prunes in this step; otherwise a ramp to 0 comes first.
    at_once = (pick[Head.ALPHA_SPEED] == AlphaSpeed.INSTANT) | (states.alpha == 0)
    prune_now, prune_later = at[Op.PRUNE] & at_once, at[Op.PRUNE] & ~at_once
    new = at[Op.GERMINATE]
    after = _without_seed(states, new | prune_now)
    target = _target_alpha(pick[Head.ALPHA_TARGET])
    after = after.replace(
        blueprint=torch.where(new, pick[Head.BLUEPRINT], after.blueprint),
        style=torch.where(new | at[Op.SET_ALPHA_TARGET], pick[Head.STYLE], after.style),
        tempo=torch.where(new, pick[Head.TEMPO], after.tempo),
        alpha_target=torch.where(new, target, after.alpha_target),  # kept until the first ramp
    )
    # A block that is repeated or widened with a FAST tempo has no ramp: it is active from its first step on.
    at_once = grows_block(after.blueprint) & (after.tempo == Tempo.FAST)
    immediate = new & at_once
    # The first ramp of a seed, which enters BLENDING, a ramp to a new target, or one down to a prune.
    first = immediate | (at[Op.ADVANCE] & (after.stage == Stage.TRAINING))
    tempo = tempo_ticks(after.tempo).masked_fill(at_once, 0)
    after = retarget(
        after,
        where=first | at[Op.SET_ALPHA_TARGET] | prune_later,
        target=torch.where(first, after.alpha_target, target.masked_fill(prune_later, 0.0)),
        ticks=torch.where(first, tempo, _speed_ticks(pick[Head.ALPHA_SPEED])),
        curve=torch.where(first, _style_curve(after.style), pick[Head.ALPHA_CURVE]),
    )

    stage = torch.where(at[Op.ADVANCE], _next_stage(states.stage), states.stage)
    # HOLDING means alpha 1 at rest: leaving full alpha leaves HOLDING.
    lowered = (at[Op.SET_ALPHA_TARGET] | prune_later) & (after.alpha_target < 1.0)
    entered = {
        Stage.GERMINATED: new,
        Stage.HOLDING: immediate,
        Stage.BLENDING: (lowered & (states.stage == Stage.HOLDING))
        | (immediate & (after.alpha_target < 1.0)),
        Stage.FOSSILIZED: at[Op.FOSSILIZE],
        Stage.PRUNED: prune_now,
    }
    for into, where in entered.items():
        stage = stage.masked_fill(where, int(into))
    clock = states.epochs_in_stage.masked_fill(stage != states.stage, 0)
    pending = after.prune_pending | prune_later
    return after.replace(stage=stage, epochs_in_stage=clock, prune_pending=pending), new, prune_now


_SLOT_FIELDS = ("stage", "epochs_in_stage", "room", "enabled")  # that stay when its seed goes


def _without_seed(states: SlotStates, where: Tensor) -> SlotStates:
    """Reset every field of a seed where True; the stage and its clock stay."""
    seed = {name: value for name, value in states.tensors().items() if name not in _SLOT_FIELDS}
    return states.replace(**{n: value.masked_fill(where, BLANK_SLOT.get(n, 0)) for n, value in seed.items()})
