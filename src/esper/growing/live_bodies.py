"""The sizes of a living model: of its own layers, of the seeds that live in it and of those that could."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from esper.growing.live_hooks import Hooks
from esper.lifecycle.actions import Blueprint, selectable_blueprints
from esper.population.blueprints import gate_parameter_count, parameter_count
from esper.population.hosts import Host


class LiveBodies:
    """The sizes of what lives in a model, and of what could."""

    def __init__(self, model: nn.Module, hooks: Hooks):
        self.model, self.hooks, self.frozen = model, hooks, not trained(model)
        self.host_parameters = max(1, self.model_parameters())  # of the model as it was given

    def model_parameters(self) -> int:
        """Trained parameters of the model; of one that is frozen as a whole, all."""
        own = self.model.parameters() if self.frozen else trained(self.model)
        return sum(p.numel() for p in own)

    @property
    def host(self) -> Host:
        """The places of the model as a host's joints."""
        places = [self.hooks.place(k) for k in range(len(self.hooks.slots))]
        blanks, widths = [nn.Identity() for _ in places], [place.width for place in places]
        return Host(blanks, places[0].topology, nn.Identity(), widths, places[0].spatial_dims)

    def seed_parameters(self) -> Tensor:
        """Parameters of a seed by slot and blueprint, 0 where it does not fit.  # [S, blueprints]"""
        table = torch.zeros(len(self.hooks.slots), len(Blueprint), dtype=torch.long)
        for s, offer in enumerate(self.hooks.offers):
            place = self.hooks.place(s)
            for b in selectable_blueprints(place.topology):
                table[s, b] = parameter_count(b, place.topology, place.width, place.spatial_dims)
            for grown in offer.parameters:
                table[s, grown] = self.hooks.price(s, grown)
        return table

    def gate_parameters(self) -> Tensor:
        """Parameters of a gate by slot.  # [S]"""
        return torch.tensor([gate_parameter_count(width) for width in self.host.widths])


def trained(model: nn.Module) -> list[nn.Parameter]:
    """The parameters of a model that are not frozen."""
    return [p for p in model.parameters() if p.requires_grad]
