"""Limits on what growth may add, kept by masking what is not allowed or would not fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from esper.lifecycle.actions import Actions, Blueprint, Head, Op, Style, has_gate
from esper.lifecycle.legality import grows_block
from esper.lifecycle.slot_states import SlotStates
from esper.tamiyo.controller import Controller, Scene
from esper.tamiyo.policy.action_masks import ActionMasks
from esper.tamiyo.policy.features import Observation
from esper.tamiyo.schedule import Schedule
from esper.utils.errors import UserError

if TYPE_CHECKING:
    from esper.growing.live import LivePopulation

PAST_ONLY = {Blueprint.ATTENTION, Blueprint.FLEX_ATTENTION}  # in a transformer these hear no later position
_NO_LIMIT = 1 << 60


class SeedPrices:
    """What seeds cost in parameters now, and which may be planted where.

    In a living model layers and lists may grow, and with them what a seed costs: so nothing is kept.
    """

    def __init__(
        self,
        population: LivePopulation,
        allowed: Sequence[str] | None = None,
        refusals: Callable[[Blueprint], Sequence[str]] = lambda blueprint: (),
    ):
        """allowed: blueprints by name. If left out, all that fit but those that hear only the past, because a
        model need not be causal. Raises a UserError for one that does not fit.
        refusals: by blueprint, why slots do not take it.
        """
        topology, fits = population.topology, population.growable()[0].any(dim=0).tolist()
        fitting = {b.name: b for b in Blueprint if fits[b]}
        shut = PAST_ONLY if topology == "transformer" else set()
        names = [b.name for b in fitting.values() if b not in shut] if allowed is None else list(allowed)
        if not names or not set(names) <= set(fitting):
            known = ", ".join(fitting)
            raise UserError(f"blueprints are {names}; in a {topology} allowed are {known}, at least one")
        self._population, self.refusals = population, refusals
        self._allowed = torch.tensor([b.name in names for b in Blueprint], device=population.device)

    @property
    def seeds(self) -> Tensor:
        """By slot and blueprint.  # [S, blueprints] int64"""
        return self._population.seed_parameters().to(self._population.device)

    @property
    def gates(self) -> Tensor:
        """Of the gate, for the style that has one.  # [S] int64"""
        return self._population.gate_parameters().to(self._population.device)

    @property
    def choosable(self) -> Tensor:
        """What is allowed and fits each slot now.  # [S, blueprints] bool"""
        return self._population.growable()[0] & self._allowed

    def spent(self, slots: SlotStates) -> Tensor:
        """The parameters that growth has added, seeds included.  # [N]"""
        return self._population.parameter_counts(slots) - self._population.host_parameters


def not_taken(controller: Controller, prices: SeedPrices) -> list[str]:
    """The blueprints that a schedule asks for and no slot takes as the model is now, by name."""
    asked = [event.blueprint for event in controller.events] if isinstance(controller, Schedule) else []
    return [b.name for b in dict.fromkeys(asked) if not bool(prices.choosable[:, b].any())]


class Limited:
    """A controller that is never shown a blueprint that is not allowed, nor a seed that breaks the budget.

    A slot stays open for GERMINATE while the cheapest seed fits there; a blueprint stays open while it fits
    in every slot that is open; the gated style stays open while its gate fits as well. So no combination of
    open choices breaks the budget. The budget counts the parameters of the seeds that live at one time.
    """

    def __init__(self, controller: Controller, prices: SeedPrices, budget: int | None = None):
        budget = _NO_LIMIT if budget is None else budget
        cheapest = int(prices.seeds.masked_fill(~prices.choosable, 2 * _NO_LIMIT).min())
        if budget < cheapest:
            raise UserError(
                f"budget is {budget} parameters and the smallest seed that fits this model has "
                f"{cheapest}; give a budget of at least {cheapest}, or None for no limit"
            )
        missing = not_taken(controller, prices)
        if missing and {event.blueprint.name for event in cast(Schedule, controller).events} == {*missing}:
            raise UserError(
                f"the schedule asks for {', '.join(missing)}, {self._why_not(prices, missing[0])}"
            )
        self.remarks = tuple(f"{name} was asked for, {self._why_not(prices, name)}" for name in missing)
        self.controller, self.prices, self.budget = controller, prices, budget
        self.looks = getattr(controller, "looks", True)  # a user's own may say nothing

    @staticmethod
    def _why_not(prices: SeedPrices, name: str) -> str:
        taken = [b.name for b in Blueprint if bool(prices.choosable[:, b].any())]
        reasons = "; ".join(prices.refusals(Blueprint[name])) or f"{name} is not for such a model"
        return f"which no slot of this model takes: {reasons}; here a slot takes {', '.join(taken)}"

    def begin(self, scene: Scene) -> None:
        """An episode begins."""
        self.controller.begin(scene)

    def decide(self, observation: Observation, masks: ActionMasks, step: int) -> Actions | list[Actions]:
        """What the controller asks for, less what is not allowed."""
        asked = self.controller.decide(observation, self.limited(observation.slots, masks), step)
        allowed = self.affordable(observation.slots, [asked] if isinstance(asked, Actions) else asked)
        return allowed[0] if isinstance(asked, Actions) else allowed

    def state_dict(self) -> dict[str, Tensor]:
        """What the controller remembers; nothing of a user's own that has no such method."""
        return self.controller.state_dict() if hasattr(self.controller, "state_dict") else {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a saved state; raises UserError for a controller of the user's that cannot."""
        if not hasattr(self.controller, "load_state_dict"):
            name = type(self.controller).__name__
            raise UserError(
                f"the run was made with a {name}, which has no load_state_dict and cannot be resumed; give "
                "it state_dict() and load_state_dict(state), which keep what it remembers as tensors"
            )
        self.controller.load_state_dict(state)

    def affordable(self, slots: SlotStates, asked: Sequence[Actions]) -> list[Actions]:
        """Actions of one decision, less the seeds that are not allowed or break the budget, whatever a
        controller that looks at no masks asked for.

        Layers that get wider one after the other may have new weights between new units as well, at most as
        many as the later one brings: so that one counts twice.
        """
        left, found = self.budget - self.prices.spent(slots), []  # [N]
        again = torch.zeros_like(left, dtype=torch.bool)  # whether an action before this one widens something
        seeds, gates, choosable = self.prices.seeds, self.prices.gates, self.prices.choosable
        for actions in asked:
            slot, blueprint = actions[Head.SLOT], actions[Head.BLUEPRINT]
            plants = actions[Head.OP] == Op.GERMINATE  # [N]
            grows = grows_block(blueprint)
            price = seeds[slot, blueprint] * (1 + (grows & again).long())
            price = price + has_gate(actions[Head.STYLE]) * gates[slot] * ~grows
            fits = choosable[slot, blueprint] & (price <= left)
            left = left - torch.where(plants & fits, price, 0)
            again = again | (plants & fits & grows)
            waits = (plants & ~fits).unsqueeze(1)
            found.append(Actions(torch.where(waits, torch.zeros_like(actions.choices), actions.choices)))
        return found

    def limited(self, slots: SlotStates, masks: ActionMasks) -> ActionMasks:
        """The masks without what the budget does not allow."""
        prices, left = self.prices, self.budget - self.prices.spent(slots)  # [N]
        choosable, gates = prices.choosable, prices.gates
        seeds = prices.seeds.masked_fill(~choosable, 2 * _NO_LIMIT)
        room = left.view(-1, 1, 1)
        fits = seeds.unsqueeze(0) <= room  # [N, S, blueprints]
        open_slots = masks.slot_by_op[:, Op.GERMINATE] & fits.any(dim=2)  # [N, S]
        shut = ~open_slots.unsqueeze(2)
        absent = shut | ~choosable
        blueprints = masks.blueprint & (fits | absent).all(dim=1) & (~absent).any(dim=1)
        open_slots = open_slots & (blueprints.unsqueeze(1) & choosable).any(dim=2)
        any_open = open_slots.any(dim=1, keepdim=True)
        blueprints = torch.where(any_open, blueprints, masks.blueprint & choosable.any(dim=0))
        with_gate = (seeds + gates.unsqueeze(1)).unsqueeze(0) <= room
        gate_fits = (with_gate | absent | ~blueprints.unsqueeze(1)).flatten(1).all(dim=1, keepdim=True)
        restyled = gates.unsqueeze(0) <= left.unsqueeze(1)  # a living seed may be given a gate
        gate_fits = gate_fits & (restyled | ~masks.slot_by_op[:, Op.SET_ALPHA_TARGET]).all(
            dim=1, keepdim=True
        )
        styles = masks.style & (~has_gate(torch.arange(len(Style), device=left.device)) | gate_fits)
        by_op = masks.slot_by_op.clone()
        by_op[:, Op.GERMINATE] = open_slots
        return replace(masks, blueprint=blueprints, style=styles, slot_by_op=by_op, op=by_op.any(dim=2))
