"""A living model as plain tensors, and back: weights, seeds, what the optimiser remembers of them, and what
else a growth needs to go on."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from esper.growing.live import LivePopulation

OPTIMISER = "optimiser."


def tensors_of(live: LivePopulation) -> dict[str, Tensor]:
    """Weights and statistics of a model and of its seeds, and the state of their optimisers, by name.

    Views, not copies. `put_back` is the inverse, in the same process or in another.
    """
    named = {"births": live.births}
    named |= {f"model.{name}": value for name, value in _state(live.model)}
    for k, slot in enumerate(live.slots):
        if slot.seed is not None:
            named[f"slot.{k}.blueprint"] = torch.tensor([slot.blueprint])
            named[f"slot.{k}.trained"] = torch.tensor([k in live.optimiser.seeds])
            named[f"slot.{k}.alone"] = torch.tensor([k in live.optimiser.alone])
            named |= {f"slot.{k}.{name}": value for name, value in _state(slot)}
    moments = live.optimiser.tensors(_parameter_names(live))
    return named | {f"{OPTIMISER}{name}": value for name, value in moments.items()}


@torch.no_grad()
def put_back(live: LivePopulation, saved: Mapping[str, Tensor]) -> None:
    """Make a model what it was when `tensors_of` was asked.

    The moments in an optimiser of the user's go back together with the weights that they belong to.
    """
    live.births = saved["births"].clone()
    for name, value in _state(live.model):
        value.copy_(saved[f"model.{name}"])
    for k, slot in enumerate(live.slots):
        then = int(saved.get(f"slot.{k}.blueprint", torch.tensor(-1)))
        if then != slot.blueprint:
            live.end_seed(k)
            if then >= 0:
                slot.plant(then, live.place, 0)
        for name, value in _state(slot):
            value.copy_(saved[f"slot.{k}.{name}"])
        _resume_training(live, k, saved)
    moments = {n.removeprefix(OPTIMISER): value for n, value in saved.items() if n.startswith(OPTIMISER)}
    live.optimiser.restore(_parameter_names(live), moments)


def progress_of(live: LivePopulation) -> dict[str, Tensor]:
    """How much data there was, and the loss that scores begin from."""
    first = math.nan if live.judge.first_loss is None else live.judge.first_loss
    live.optimiser.check_savable()
    return {
        "data": torch.tensor([live.batches, *live.samples]),
        "first_loss": torch.tensor(first, dtype=torch.float64),
    }


def put_progress(live: LivePopulation, saved: Mapping[str, Tensor]) -> None:
    """The inverse of `progress_of`."""
    live.batches, trained, validated = (int(n) for n in saved["data"])
    live.samples = (trained, validated)
    first = float(saved["first_loss"])
    live.judge.first_loss = None if math.isnan(first) else first


def _resume_training(live: LivePopulation, k: int, saved: Mapping[str, Tensor]) -> None:
    """The seed of slot k is trained by the optimiser that trained it when it was saved."""
    trained, alone = (bool(saved.get(f"slot.{k}.{by}", False)) for by in ("trained", "alone"))
    if k in live.optimiser.seeds and not trained:
        live.optimiser.let_go(k)
    if trained:
        live.optimiser.take_in(k, live.slots[k].parameters())
    if alone:
        live.optimiser.raise_alone(k, live.slots[k])


def _parameter_names(live: LivePopulation) -> dict[nn.Parameter, str]:
    names = {parameter: f"model.{name}" for name, parameter in live.model.named_parameters()}
    for k, slot in enumerate(live.slots):
        names |= {parameter: f"slot.{k}.{name}" for name, parameter in slot.named_parameters()}
    return names


def _state(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, value in [*module.named_parameters(), *module.named_buffers()]:
        yield name, value.detach()
