"""One step of the rules: `apply` executes the actions of all members, `tick` lets time pass.

Both are pure functions over rows. Nothing loops over members or slots and nothing is read back from the
device; a bad choice in one row fails in that row alone and counts as WAIT.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from esper.lifecycle.actions import (
    SPEED_TICKS,
    STYLE_CURVE,
    TARGET_ALPHA,
    TEMPO_TICKS,
    Actions,
    AlphaSpeed,
    Head,
    Op,
    head_sizes,
    relevance_table,
)
from esper.lifecycle.alpha import advance_alpha, retarget
from esper.lifecycle.config import LifecycleConfig
from esper.lifecycle.evidence import SlotEvidence
from esper.lifecycle.gates import (
    Gate,
    g0_valid_blueprint,
    g1_ready_to_train,
    g2_ready_to_blend,
    g3_ready_to_hold,
    g5_ready_to_fossilize,
    gate_table,
)
from esper.lifecycle.legality import holds_seed, legal_slots_by_op
from esper.lifecycle.slot_states import AlphaMode, SlotRecord, SlotStates
from esper.lifecycle.stages import COOLDOWN_STAGES, NEXT_STAGE, STAGE_TABLE_SIZE, TRANSITIONS, Stage
from esper.lifecycle.tables import device_table


@dataclass(frozen=True)
class Outcome:
    """What became of one action per member."""

    states: SlotStates
    legal: Tensor  # [N] bool: the op was legal on the slot, and every head that it reads was in range
    succeeded: Tensor  # [N] bool: legal, and no gate refused it
    executed_op: Tensor  # [N] int64: the op, or WAIT where it failed
    refused_by: Tensor  # [N] int64: a Gate, NONE where no gate refused
    germinated: Tensor  # [N, S] bool: seeds that began here
    pruned: Tensor  # [N, S] bool: seeds that ended here


@dataclass(frozen=True)
class TickOutcome:
    """What a tick did."""

    states: SlotStates
    pruned: Tensor  # [N, S] bool: seeds that ended here
    moved: Tensor  # [N, S] bool: slots that changed stage


@device_table
def _relevance() -> Tensor:
    return relevance_table()


@device_table
def _last_choices(num_slots: int) -> Tensor:
    """The highest choice of each head.  # [heads]"""
    return torch.tensor(head_sizes(num_slots)) - 1


@device_table
def _next_stages() -> Tensor:
    """Where ADVANCE leads from each stage, itself where it leads nowhere.  # [stages]"""
    table = torch.arange(STAGE_TABLE_SIZE)
    for stage, after in NEXT_STAGE.items():
        table[stage] = int(after)
    return table


@device_table
def _cooled_stages() -> Tensor:
    """Where a cooling slot goes next, itself where it does not cool.  # [stages]"""
    table = torch.arange(STAGE_TABLE_SIZE)
    for stage in COOLDOWN_STAGES:
        (table[stage],) = (int(after) for after in TRANSITIONS[stage])
    return table


@device_table
def _cooldown_ticks(embargo_ticks: int, resetting_ticks: int) -> Tensor:
    """How many ticks a slot stays in each stage before it moves by itself.  # [stages]"""
    table = torch.full((STAGE_TABLE_SIZE,), torch.iinfo(torch.long).max)
    table[Stage.PRUNED] = 0
    table[Stage.EMBARGOED] = embargo_ticks
    table[Stage.RESETTING] = resetting_ticks
    return table


@device_table
def _tempo_ticks() -> Tensor:
    return torch.tensor(list(TEMPO_TICKS.values()))


@device_table
def _speed_ticks() -> Tensor:
    return torch.tensor(list(SPEED_TICKS.values()))


@device_table
def _target_alphas() -> Tensor:
    return torch.tensor(list(TARGET_ALPHA.values()))


@device_table
def _style_curves() -> Tensor:
    return torch.tensor([int(curve) for curve in STYLE_CURVE.values()])


def apply(
    states: SlotStates,
    actions: Actions,
    evidence: SlotEvidence,
    config: LifecycleConfig,
    topology: str,
    governor_override: Tensor | None = None,
) -> Outcome:
    """Execute one action per member. Total: what is illegal or refused changes nothing in its row."""
    _check_rows(states, actions, evidence, governor_override)
    last = _last_choices(states.device, states.num_slots)
    choices = actions.choices.clamp(min=0).minimum(last)  # [N, heads], safe to gather with
    op, slot = choices[:, Head.OP], choices[:, Head.SLOT]
    in_range = choices == actions.choices
    read = _relevance(states.device)[op]
    members = torch.arange(states.num_members, device=states.device)
    pair_legal = legal_slots_by_op(states, config, governor_override)[members, op, slot]
    legal = (in_range | ~read).all(dim=1) & (pair_legal | (op == Op.WAIT))

    gate = gate_table(states.device)[op, _at(states.stage, slot)]
    passed = _passed(states, evidence, config, topology, choices)
    succeeded = legal & passed
    executed = op.masked_fill(~succeeded, int(Op.WAIT))
    after, germinated, pruned = _execute(states, choices, executed)
    return Outcome(
        states=after,
        legal=legal,
        succeeded=succeeded,
        executed_op=executed,
        refused_by=gate.masked_fill(~legal | passed, int(Gate.NONE)),
        germinated=germinated,
        pruned=pruned,
    )


def tick(states: SlotStates, config: LifecycleConfig) -> TickOutcome:
    """One decision step passes: ramps move, scheduled prunes end, pruned slots cool down, clocks count.

    A slot moves at most once, judged on the stage in which the tick found it.
    """
    ramped = advance_alpha(states)
    ended = ramped.prune_pending & (ramped.alpha_mode == AlphaMode.HOLD)
    clock = states.epochs_in_stage + 1
    patience = _cooldown_ticks(states.device, config.embargo_ticks, config.resetting_ticks)[states.stage]
    cooled = clock >= patience
    moved = ended | cooled
    stage = torch.where(cooled, _cooled_stages(states.device)[states.stage], states.stage)
    after = _without_seed(ramped, ended).replace(
        stage=stage.masked_fill(ended, int(Stage.PRUNED)),
        epochs_in_stage=clock.masked_fill(moved, 0),
    )
    return TickOutcome(states=after.replace(age=after.age + holds_seed(after)), pruned=ended, moved=moved)


def force_prune(states: SlotStates, where: Tensor) -> SlotStates:
    """End every seed in the given slots at once: the governor's hand.  # where [N, S] bool

    It asks neither age nor rest, and takes fossilised seeds too: a rollback undoes what grew since.
    """
    if where.shape != states.stage.shape:
        raise ValueError(f"where has shape {tuple(where.shape)}; expected {tuple(states.stage.shape)}")
    ending = where & holds_seed(states)
    return _without_seed(states, ending).replace(
        stage=states.stage.masked_fill(ending, int(Stage.PRUNED)),
        epochs_in_stage=states.epochs_in_stage.masked_fill(ending, 0),
    )


def _check_rows(
    states: SlotStates, actions: Actions, evidence: SlotEvidence, governor_override: Tensor | None
) -> None:
    """Shapes only: nothing here reads a value."""
    members, slots = states.stage.shape
    if len(actions) != members:
        raise ValueError(f"{len(actions)} actions for {members} members; give one action per member")
    if evidence.contribution.shape != (members, slots):
        raise ValueError(
            f"evidence has shape {tuple(evidence.contribution.shape)}; "
            f"expected [{members}, {slots}] like the states"
        )
    if governor_override is not None and governor_override.shape != (members,):
        raise ValueError(
            f"governor_override has shape {tuple(governor_override.shape)}; "
            f"expected [{members}], one flag per member"
        )


def _at(values: Tensor, slot: Tensor) -> Tensor:
    """The value at each member's chosen slot.  # [N, S], [N] -> [N]"""
    return values.gather(1, slot.unsqueeze(1)).squeeze(1)


def _passed(
    states: SlotStates, evidence: SlotEvidence, config: LifecycleConfig, topology: str, choices: Tensor
) -> Tensor:
    """Whether the gate before each member's op, if there is one, lets it through.  # [N] bool"""
    op, slot = choices[:, Head.OP], choices[:, Head.SLOT]
    advances = (
        g1_ready_to_train(states)
        | g2_ready_to_blend(states, evidence, config.gates)
        | g3_ready_to_hold(states, config.gates)
    )
    fits = g0_valid_blueprint(choices[:, Head.BLUEPRINT], topology)
    refused = ((op == Op.GERMINATE) & ~fits) | ((op == Op.ADVANCE) & ~_at(advances, slot))
    earned = _at(g5_ready_to_fossilize(states, evidence, config.gates), slot)
    return ~(refused | ((op == Op.FOSSILIZE) & ~earned))


def _execute(states: SlotStates, choices: Tensor, op: Tensor) -> tuple[SlotStates, Tensor, Tensor]:
    """Carry out ops that are legal and let through; also where seeds began and where they ended."""
    slots = torch.arange(states.num_slots, device=states.device)
    here = slots == choices[:, Head.SLOT, None]  # [N, S]
    does = {kind: here & (op == kind).unsqueeze(1) for kind in Op}
    germinate, prune = does[Op.GERMINATE], does[Op.PRUNE]
    at_once = (choices[:, Head.ALPHA_SPEED, None] == AlphaSpeed.INSTANT) | (states.alpha == 0)
    prune_now, prune_later = prune & at_once, prune & ~at_once

    after = _plant(_without_seed(states, germinate | prune_now), germinate, choices)
    after = after.replace(
        style=torch.where(does[Op.SET_ALPHA_TARGET], choices[:, Head.STYLE, None], after.style),
        prune_pending=after.prune_pending | prune_later,
    )
    after = _begin_ramps(after, choices, does[Op.SET_ALPHA_TARGET], prune_later, does[Op.ADVANCE])

    stage = torch.where(does[Op.ADVANCE], _next_stages(states.device)[states.stage], states.stage)
    stage = stage.masked_fill(germinate, int(Stage.GERMINATED)).masked_fill(prune_now, int(Stage.PRUNED))
    lowered = (does[Op.SET_ALPHA_TARGET] | prune_later) & (after.alpha_target < 1.0)
    stage = stage.masked_fill(lowered & (states.stage == Stage.HOLDING), int(Stage.BLENDING))
    stage = stage.masked_fill(does[Op.FOSSILIZE], int(Stage.FOSSILIZED))
    clock = states.epochs_in_stage.masked_fill(stage != states.stage, 0)
    return after.replace(stage=stage, epochs_in_stage=clock), germinate, prune_now


def _plant(states: SlotStates, where: Tensor, choices: Tensor) -> SlotStates:
    """A new seed with the member's choices: it keeps its target until its first ramp."""
    target = _target_alphas(states.device)[choices[:, Head.ALPHA_TARGET, None]]
    return states.replace(
        blueprint=torch.where(where, choices[:, Head.BLUEPRINT, None], states.blueprint),
        style=torch.where(where, choices[:, Head.STYLE, None], states.style),
        tempo=torch.where(where, choices[:, Head.TEMPO, None], states.tempo),
        alpha_target=torch.where(where, target, states.alpha_target),
    )


def _begin_ramps(
    states: SlotStates, choices: Tensor, set_target: Tensor, prune_later: Tensor, advance: Tensor
) -> SlotStates:
    """The first ramp of a seed that enters BLENDING, a new target, or the way down to a prune."""
    device = states.device
    first = advance & (states.stage == Stage.TRAINING)
    chosen = _target_alphas(device)[choices[:, Head.ALPHA_TARGET, None]].masked_fill(prune_later, 0.0)
    return retarget(
        states,
        where=first | set_target | prune_later,
        target=torch.where(first, states.alpha_target, chosen),
        ticks=torch.where(
            first,
            _tempo_ticks(device)[states.tempo],
            _speed_ticks(device)[choices[:, Head.ALPHA_SPEED, None]],
        ),
        curve=torch.where(first, _style_curves(device)[states.style], choices[:, Head.ALPHA_CURVE, None]),
    )


_BLANK = SlotRecord()
_SEED_FIELDS = (
    "blueprint",
    "style",
    "tempo",
    "alpha",
    "alpha_start",
    "alpha_target",
    "alpha_mode",
    "alpha_curve",
    "alpha_steps_total",
    "alpha_steps_done",
    "age",
    "prune_pending",
)


def _without_seed(states: SlotStates, where: Tensor) -> SlotStates:
    """Everything that a seed leaves behind is wiped where True; the stage and its clock are not."""
    fields = states.tensors()
    return states.replace(**{n: fields[n].masked_fill(where, getattr(_BLANK, n)) for n in _SEED_FIELDS})
