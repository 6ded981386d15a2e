"""FLOPs of one living model and of its seeds."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from esper.growing.live_hooks import Hooks
from esper.growing.places import Place
from esper.lifecycle.actions import GROWTH_BLUEPRINTS, NUM_BLUEPRINTS, Blueprint
from esper.lifecycle.slot_states import SlotStates
from esper.population.blueprints import BlendGate, build_blueprint
from esper.simic.costs import ForwardCosts, SlotForms, Work

_GATE = -1  # stands for a gate where a blueprint is asked for


class LiveCosts:
    """Answers what `ForwardCosts` does, for layers that change and seeds that come and go.

    A seed is counted when one first lives at a place of its size: to count all that could grow there takes
    longer than many steps of training.
    """

    def __init__(self, hooks: Hooks):
        self.host = hooks.flops  # of one sample's forward pass through the model as it was given
        self._hooks = hooks
        self._counted: dict[tuple[int, Place], float] = {}  # by blueprint or _GATE

    def relative(self, slots: SlotStates, population: SlotForms) -> Tensor:
        """What a training sample costs now over what it cost the model as it was given.  # [1]"""
        return self._now().relative(slots, population)

    def epoch(
        self, slots: SlotStates, population: SlotForms, work: Work, looks: Tensor | None = None
    ) -> Tensor:
        """Operations of one epoch of training and one validation, as `ForwardCosts`.  # [1] float64"""
        return self._now().epoch(slots, population, work, looks)

    def _now(self) -> ForwardCosts:
        """One sample through the model and every living seed. A row of the model with another strength is a
        whole pass, so the model's cost lies behind the last slot."""
        hooks = self._hooks
        parts = torch.zeros(len(hooks.slots), NUM_BLUEPRINTS, dtype=torch.float64)
        gates = torch.zeros(len(hooks.slots), dtype=torch.float64)
        trunk = torch.zeros(len(hooks.slots) + 1, dtype=torch.float64)
        trunk[-1] = hooks.flops
        for k, slot in enumerate(hooks.slots):
            if slot.seed is None:
                continue
            if slot.blueprint in GROWTH_BLUEPRINTS:
                parts[k, slot.blueprint] = hooks.offers[k].flops.get(Blueprint(slot.blueprint), 0.0)
            else:
                parts[k, slot.blueprint] = self._count(slot.blueprint, hooks.place(k))
                gates[k] = self._count(_GATE, hooks.place(k))
        return ForwardCosts(trunk, parts, gates, self.host)

    def _count(self, blueprint: int, place: Place) -> float:
        """Operations of a seed, or of a gate, on one sample at a place; counted without data, once."""
        key = (blueprint, place)
        if key not in self._counted:
            with torch.device("meta"):
                body = (
                    BlendGate(place.width, place.topology)
                    if blueprint == _GATE
                    else build_blueprint(blueprint, place.topology, place.width, place.spatial_dims)
                )
                with torch.no_grad(), FlopCounterMode(display=False) as counter:
                    body(torch.zeros(1, *place.shape))
            self._counted[key] = float(counter.get_total_flops())
        return self._counted[key]
