"""The parts of a decision step that are functions over rows, so that a GPU can replay them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from esper.lifecycle.actions import Actions
from esper.lifecycle.engine import ActionOutcome, TickOutcome, apply, joined_outcome, tick
from esper.lifecycle.slot_states import SlotEvidence, SlotStates
from esper.population.metrics import TrainMetrics, ValidationMetrics
from esper.simic.bodies import Bodies
from esper.simic.costs import Work
from esper.simic.governor import Governor, MemberRows
from esper.simic.rewards import REWARDS, Potentials, potential
from esper.simic.signals import update_evidence
from esper.simic.steps import RuleSpec
from esper.tamiyo.policy.action_masks import ActionMasks, compute_batch_masks
from esper.utils.rows import choose

ROUNDING = 1e-9  # of a sum of FLOPs, as a share of the budget


@dataclass(frozen=True)
class RulingInputs:
    """What stays the same from step to step; the tensors of the bodies are changed in their places."""

    bodies: Bodies
    spec: RuleSpec
    budget: Tensor  # [N] FLOPs
    steps: int  # the most that anyone gets

    @property
    def by_compute(self) -> bool:
        """Whether compute is the budget; else everyone gets as many steps."""
        return self.spec.episode.clock == "compute"


@dataclass(frozen=True)
class Ruled:
    """What the actions of a step and its tick led to."""

    outcome: ActionOutcome  # of all actions
    ticked: TickOutcome
    evidence: SlotEvidence  # less what ended or was just born


def rule(
    states: SlotStates,
    evidence: SlotEvidence,
    choices: tuple[Tensor, ...],
    active: Tensor,
    left: Tensor,
    looks: Tensor,
    world: RulingInputs,
) -> Ruled:
    """Apply actions one after the other, then tick; for the finished no time passes.

    Rules first, bodies after them: what begins is to get weights, what ends loses them. choices: [N, heads]
    of each action; the rest as in `lifecycle.engine.apply`
    """
    outcomes, bodies = [], world.bodies
    rules, topology = world.spec.lifecycle, bodies.topology
    for wanted in choices:
        fits = world.bodies.growable()  # after what the actions before this one planted
        asked = Actions(torch.where(active.unsqueeze(1), wanted, 0))  # the finished wait
        outcome = apply(states, asked, evidence, rules, topology, left, fits, looks)
        bodies.prune(outcome.pruned)
        bodies.germinate(outcome.germinated, outcome.states.blueprint)
        states, evidence = outcome.states, evidence.forget(outcome.pruned | outcome.germinated)
        outcomes.append(outcome)
    ticked = tick(states, rules)
    nothing = torch.zeros_like(ticked.pruned)
    ticked = choose(active, ticked, TickOutcome(states, nothing, nothing))
    bodies.prune(ticked.pruned)
    bodies.fold(ticked.folded, states.style)
    return Ruled(joined_outcome(outcomes), ticked, evidence.forget(ticked.pruned | ticked.folded))


@dataclass(frozen=True)
class LivedEpoch:
    """What a step leads from, and what its epoch and validation showed."""

    before: MemberRows  # at the decision
    evidence: SlotEvidence  # less what ended or was just born
    slots: SlotStates  # under which the epoch was trained
    active: Tensor  # [N] bool: who lived through it
    training: TrainMetrics
    validation: ValidationMetrics


@dataclass(frozen=True)
class Account:
    """What was spent when, and what that led to so far."""

    flops: Tensor  # [N] spent
    clock: Tensor  # [] int64: decisions made
    looks: Tensor  # [N] bool: who pays for what is measured
    start_potential: Tensor  # [N] when the episode began
    potential: Tensor  # [N] at the latest decision


@dataclass(frozen=True)
class Standing:
    """Where every member stands before a decision, as its rows and what it has spent imply."""

    parameters: Tensor  # [N] int64
    parameter_ratio: Tensor  # [N] over the host's own
    step_cost: Tensor  # [N] over a bare host's
    spent: Tensor  # [N] float64, the share of its budget
    steps_left: Tensor  # [N] float64: decisions that its budget still pays for as it is, this one included
    potential: Tensor  # [N]
    masks: ActionMasks


@dataclass(frozen=True)
class Settled:
    """What an epoch and its validation led to."""

    rows: MemberRows  # to go on with
    flops: Tensor  # [N] spent so far
    panicked: Tensor  # [N] bool: rolled back
    rolled_back: Tensor  # [N, S] bool: seeds that this ended
    ends: Tensor  # [N] bool: this step was the last
    reward: Tensor  # [N] the governor's penalty included
    standing: Standing  # before the next decision


def settle(
    epoch: LivedEpoch, paid: Account, work: Work, keeps: bool, governor: Governor, world: RulingInputs
) -> Settled:
    """After an epoch and its validation: who goes on with what, what was spent, what is paid.

    The rows of the finished stay what they were. paid: before this epoch, but for its clock, which counts
    this decision; work: that of this step; keeps: see `Governor.settle`
    """
    training, validation, active = epoch.training, epoch.validation, epoch.active
    after = MemberRows(
        slots=epoch.slots,
        evidence=update_evidence(epoch.evidence, epoch.slots, training, validation),
        signals=epoch.before.signals.update(validation.loss, validation.accuracy),
    )
    clock, looks = paid.clock, paid.looks
    flops = paid.flops + price(epoch.slots, looks, work, world)
    flops = flops.minimum(world.budget) if world.by_compute else flops
    rows = choose(active, after, epoch.before)
    rows, panicked, rolled_back = governor.settle(rows, training.loss, active, keeps)
    ends = active & ((_spent(flops, clock, world) >= 1.0 - ROUNDING) | (clock >= world.steps))
    world.bodies.finished.logical_or_(ends)
    standing = stand(rows, flops, clock, looks, work, world)
    at = Potentials(paid.start_potential, paid.potential, standing.potential, ends, world.spec.gamma)
    earned = REWARDS[world.spec.reward.mode](at) - world.spec.governor.penalty * panicked
    return Settled(rows, flops, panicked, rolled_back, ends, earned * active, standing)


def stand(
    rows: MemberRows, flops: Tensor, clock: Tensor, looks: Tensor, work: Work, world: RulingInputs
) -> Standing:
    """What these rows imply after so many decisions.

    flops [N] spent so far, clock [] int64, looks [N] bool; work: of any step, as far as it is not ablation
    """
    bodies, slots = world.bodies, rows.slots
    parameters = bodies.parameter_counts(slots)
    ratio = parameters / bodies.host_parameters
    left = torch.zeros_like(flops) + (world.steps - clock)
    if world.by_compute:  # the finished cost nothing and have nothing left
        cost = price(slots, looks, replace(work, ablate=True), world).clamp(min=1.0)
        left = ((world.budget - flops) / cost - ROUNDING).ceil()
    return Standing(
        parameters=parameters,
        parameter_ratio=ratio,
        step_cost=bodies.relative_cost(slots).float(),
        spent=_spent(flops, clock, world),
        steps_left=left,
        potential=potential(rows.signals.accuracy, ratio, world.spec.reward),
        masks=compute_batch_masks(
            slots,
            config=world.spec.lifecycle,
            topology=bodies.topology,
            evidence=rows.evidence,
            steps_left=left,
            looks=looks,
            fits=world.bodies.growable(),
        ),
    )


def _spent(flops: Tensor, clock: Tensor, world: RulingInputs) -> Tensor:
    """The share of its budget that each member has spent.  # [N] float64"""
    if world.by_compute:
        return (flops / world.budget).clamp(max=1.0)
    return torch.zeros_like(flops) + clock.double() / world.steps


def price(slots: SlotStates, looks: Tensor, work: Work, world: RulingInputs) -> Tensor:
    """FLOPs of an epoch, of its validation too for those whose controller looks, none of the finished.

    # [N] float64
    """
    return world.bodies.epoch_flops(slots, work, looks) * ~world.bodies.finished
