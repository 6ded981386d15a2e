"""What a growth of a living model needs to go on, beside weights, seeds and the states of slots."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from esper.foundation.rows import part
from esper.growing.live import LivePopulation
from esper.lifecycle.slot_states import SlotStates


def progress_of(bodies: LivePopulation) -> dict[str, Tensor]:
    """The optimiser's state, how much data there was, and the loss that scores begin from."""
    first = math.nan if bodies.judge.first_loss is None else bodies.judge.first_loss
    own = {
        "data": torch.tensor([bodies.batches, *bodies.samples]),
        "first_loss": torch.tensor(first, dtype=torch.float64),
    }
    return own | {f"optimiser.{n}": v for n, v in bodies.optimiser.tensors(_parameters(bodies)).items()}


def put_progress(bodies: LivePopulation, saved: Mapping[str, Tensor], states: SlotStates) -> None:
    """The inverse of `progress_of`, once weights and seeds are those of that time, in these states."""
    bodies.follow(states)
    bodies.batches, trained, validated = (int(n) for n in saved["data"])
    bodies.samples = (trained, validated)
    first = float(saved["first_loss"])
    bodies.judge.first_loss = None if math.isnan(first) else first
    bodies.optimiser.load(_parameters(bodies), part("optimiser", saved))


def _parameters(bodies: LivePopulation) -> dict[str, nn.Parameter]:
    """Every parameter of the model and of its seeds, by name."""
    named = {f"model.{name}": value for name, value in bodies.model.named_parameters()}
    for k, slot in enumerate(bodies.slots):
        named |= {f"slot.{k}.{name}": value for name, value in slot.named_parameters()}
    return named
