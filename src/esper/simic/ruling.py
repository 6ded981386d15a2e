"""The parts of a decision step that are functions over rows, so that a GPU can replay them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from esper.foundation.rows import choose
from esper.lifecycle.actions import Actions, Blueprint
from esper.lifecycle.config import LifecycleConfig
from esper.lifecycle.engine import ActionOutcome, TickOutcome, apply, joined_outcome, tick
from esper.lifecycle.evidence import SlotEvidence
from esper.lifecycle.slot_states import SlotStates
from esper.population.hosts import block_of
from esper.population.metrics import TrainMetrics, ValidationMetrics
from esper.population.population import Population
from esper.simic.costs import ForwardCosts, Work
from esper.simic.governor import Governor, MemberRows
from esper.simic.signals import update_evidence
from esper.tamiyo.policy.action_masks import ActionMasks, compute_batch_masks


@dataclass(frozen=True)
class RulingInputs:
    """What stays the same from step to step; the tensors of the bodies are changed in their places."""

    population: Population
    costs: ForwardCosts
    rules: LifecycleConfig
    topology: str
    allowed: Tensor  # [S, blueprints] bool: what the rules let grow in each slot

    @staticmethod
    def of(
        population: Population, costs: ForwardCosts, rules: LifecycleConfig, topology: str
    ) -> RulingInputs:
        """A world in which slots behind a block take the blueprints that the rules name."""
        segments = population.bodies.host.segments
        allowed = torch.ones(len(segments), len(Blueprint), dtype=torch.bool)
        named = [name.upper() for name in rules.block_blueprints]
        behind_block = [block_of(segment) is not None for segment in segments]
        allowed[behind_block] = torch.tensor([b.name in named for b in Blueprint])
        return RulingInputs(population, costs, rules, topology, allowed.to(population.device))

    def fits(self) -> Tensor:
        """The blueprints that a seed may have now in each slot.  # [N, S, blueprints] bool"""
        return self.population.growable() & self.allowed


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
    outcomes, population = [], world.population
    for wanted in choices:
        fits = world.fits()  # after what the actions before this one planted
        asked = Actions(torch.where(active.unsqueeze(1), wanted, 0))  # the finished wait
        outcome = apply(states, asked, evidence, world.rules, world.topology, left, fits, looks)
        population.prune(outcome.pruned)
        population.germinate(outcome.germinated, outcome.states.blueprint)
        states, evidence = outcome.states, evidence.forget(outcome.pruned | outcome.germinated)
        outcomes.append(outcome)
    ticked = tick(states, world.rules)
    nothing = torch.zeros_like(ticked.pruned)
    ticked = choose(active, ticked, TickOutcome(states, nothing, nothing))
    population.prune(ticked.pruned)
    population.fold(ticked.folded, states.style)
    return Ruled(joined_outcome(outcomes), ticked, evidence.forget(ticked.pruned | ticked.folded))


def settle(
    before: MemberRows,
    evidence: SlotEvidence,
    slots: SlotStates,
    active: Tensor,
    training: TrainMetrics,
    validation: ValidationMetrics,
    keeps: bool,
    governor: Governor,
    world: RulingInputs,
) -> tuple[MemberRows, Tensor, Tensor, tuple[Tensor, Tensor]]:
    """After an epoch and its validation: the rows to go on with, who was rolled back, which seeds that ended,
    and the rows' sizes; the rows of the finished stay what they were. See `Governor.settle` and `sizes`.
    """
    after = MemberRows(
        slots=slots,
        evidence=update_evidence(evidence, slots, training, validation),
        signals=before.signals.update(validation.loss, validation.accuracy),
    )
    rows = choose(active, after, before)
    rows, panicked, rolled_back = governor.settle(rows, training.loss, active, keeps)
    return rows, panicked, rolled_back, sizes(rows.slots, world)


def fitting_masks(
    slots: SlotStates, evidence: SlotEvidence, left: Tensor, looks: Tensor, world: RulingInputs
) -> ActionMasks:
    """What is legal, given what fits the bodies as they are now; see `compute_batch_masks`."""
    return compute_batch_masks(
        slots,
        config=world.rules,
        topology=world.topology,
        evidence=evidence,
        steps_left=left,
        looks=looks,
        fits=world.fits(),
    )


def sizes(slots: SlotStates, world: RulingInputs) -> tuple[Tensor, Tensor]:
    """Parameters of each member, and what a step costs it over a bare host's.  # [N] int64, float32"""
    population = world.population
    return population.parameter_counts(slots), world.costs.relative(slots, population).float()


def price(slots: SlotStates, looks: Tensor, work: Work, world: RulingInputs) -> Tensor:
    """FLOPs of an epoch, of its validation too for those whose controller looks, none of the finished.

    # [N] float64
    """
    return world.costs.epoch(slots, world.population, work, looks) * ~world.population.finished
