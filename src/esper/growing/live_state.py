"""A living model as plain tensors, and back: weights, seeds, what the optimizer remembers of them, and what
else a growth needs to go on."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from itertools import takewhile
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from esper.lifecycle.actions import Blend

if TYPE_CHECKING:
    from esper.growing.live import LivePopulation

OPTIMIZER = "optimizer."
BESIDE = 0.28  # of the memory that training takes on a GPU: as much may be taken there by snapshots
EARLIER = 1 / 3  # of a snapshot with moments: the weights of the best epoch


def tensors_of(live: LivePopulation) -> dict[str, Tensor]:
    """Weights and statistics of a model and of its seeds, and the state of their optimizers, by name.

    Views, not copies. `put_back` is the inverse, in the same process or in another.
    """
    folds = torch.tensor([fold.code for fold in live.hooks.folds], dtype=torch.long).view(-1, 4)
    named = {"births": live.births, "folds": folds}
    named |= {f"model.{name}": value for name, value in _state(live.model)}
    for k, slot in enumerate(live.slots):
        if slot.seed is not None:
            named[f"slot.{k}.seed"] = torch.tensor([slot.blueprint, slot.born])
            named[f"slot.{k}.trained"] = torch.tensor([k in live.optimizer.seeds])
            named[f"slot.{k}.alone"] = torch.tensor([k in live.optimizer.alone])
            named |= {f"slot.{k}.{name}": value for name, value in _state(slot)}
    moments = live.optimizer.tensors(_parameter_names(live))
    return named | {f"{OPTIMIZER}{name}": value for name, value in moments.items()}


def copied(tensors: Mapping[str, Tensor], room: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies of tensors, written over those of `room` that have the same form.

    Tensors of a GPU stay there if that takes little beside training, else the copies are in main memory.
    """
    home = _home(tensors.values(), room.values())
    copies = {}
    for name, value in tensors.items():
        own, place = room.get(name), home if value.is_cuda else value.device
        if own is None or (own.shape, own.dtype, own.device) != (value.shape, value.dtype, place):
            own = torch.empty_like(value, device=place)
        copies[name] = own.copy_(value)
    return copies


def _home(tensors: Collection[Tensor], before: Collection[Tensor]) -> torch.device:
    """Where copies of these tensors belong, beside weights of an earlier epoch that may be kept as well."""
    device = next((value.device for value in tensors if value.is_cuda), None)
    if device is None:
        return torch.device("cpu")
    size, present = (
        sum(v.numel() * v.element_size() for v in values if v.is_cuda) for values in (tensors, before)
    )
    trained = torch.cuda.max_memory_allocated(device) - present
    return device if (1 + EARLIER) * size <= BESIDE * trained else torch.device("cpu")


@torch.no_grad()
def put_back(live: LivePopulation, saved: Mapping[str, Tensor]) -> None:
    """Make a model what it was when `tensors_of` was asked.

    The moments in an optimizer of the user's go back together with the weights that they belong to.
    """
    live.births = saved["births"].clone()
    seeds = {k: f"slot.{k}.seed" for k in range(live.num_slots) if f"slot.{k}.seed" in saved}
    _rebuild(live, saved["folds"].tolist(), {k: tuple(saved[name].tolist()) for k, name in seeds.items()})
    for name, value in _state(live.model):
        value.copy_(saved[f"model.{name}"])
    for k, slot in enumerate(live.slots):
        for name, value in _state(slot):
            value.copy_(saved[f"slot.{k}.{name}"])
        _resume_training(live, k, saved)
    moments = {n.removeprefix(OPTIMIZER): value for n, value in saved.items() if n.startswith(OPTIMIZER)}
    live.optimizer.restore(_parameter_names(live), moments)


def _rebuild(live: LivePopulation, folds: list[list[int]], seeds: Mapping[int, tuple[int, ...]]) -> None:
    """Plant, fold and unfold until the model has these layers and seeds; weights are put back afterwards.

    folds: as `Fold.code`; seeds: by slot, blueprint and the number of folds at its birth. A seed depends on
    the layers that there were when it was planted, so that the story is told again from the earliest birth.
    """
    present, now = [fold.code for fold in live.hooks.folds], len(folds)
    living = {k: (slot.blueprint, slot.born) for k, slot in enumerate(live.slots) if slot.seed is not None}
    others = [k for k in range(live.num_slots) if living.get(k) != seeds.get(k)]
    if present == folds and all(seeds[k][1] == now for k in others if k in seeds):
        first, alive = now, [(k, *seeds[k]) for k in others if k in seeds]
    else:
        others, alive = list(range(live.num_slots)), [(k, *seed) for k, seed in seeds.items()]
        first = sum(1 for _ in takewhile(lambda both: both[0] == both[1], zip(present, folds, strict=False)))
    planted = [(k, blueprint, born) for k, blueprint, _, born in folds]
    while (earliest := min((born for *_, born in [*planted[first:], *alive]), default=first)) < first:
        first = earliest
    for k in others:
        live.end_seed(k)
    while len(live.hooks.folds) > first:
        live.unfold_seed()
    for n in range(first, now + 1):
        for k, blueprint, born in [*planted[n:], *alive]:
            if born == n:
                live.hooks.plant(k, blueprint, live.place, 0)
        if n < now:
            live.fold_seed(folds[n][0], Blend(folds[n][2]))


def progress_of(live: LivePopulation) -> dict[str, Tensor]:
    """How much data there was, the loss that scores begin from, and how far a scheduler of the user's is."""
    first = math.nan if live.judge.first_loss is None else live.judge.first_loss
    live.optimizer.check_savable()
    return {
        "data": torch.tensor([live.batches, *live.samples]),
        "first_loss": torch.tensor(first, dtype=torch.float64),
        "rate_steps": torch.tensor(live.rates.steps),
    }


def put_progress(live: LivePopulation, saved: Mapping[str, Tensor]) -> None:
    """The inverse of `progress_of`."""
    live.batches, trained, validated = (int(n) for n in saved["data"])
    live.samples = (trained, validated)
    first = float(saved["first_loss"])
    live.judge.first_loss = None if math.isnan(first) else first
    live.rates.begin(int(saved.get("rate_steps", 0)))


def _resume_training(live: LivePopulation, k: int, saved: Mapping[str, Tensor]) -> None:
    """The seed of slot k is trained by the optimizer that trained it when it was saved."""
    trained, alone = (bool(saved.get(f"slot.{k}.{by}", False)) for by in ("trained", "alone"))
    if k in live.optimizer.seeds and not trained:
        live.optimizer.let_go(k)
    if trained:
        live.train_seed(k)
    if alone:
        live.optimizer.raise_alone(k, live.slots[k])


def _parameter_names(live: LivePopulation) -> dict[nn.Parameter, str]:
    names = {parameter: f"model.{name}" for name, parameter in live.model.named_parameters()}
    for k, slot in enumerate(live.slots):
        names |= {parameter: f"slot.{k}.{name}" for name, parameter in slot.named_parameters()}
    return names


def _state(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, value in [*module.named_parameters(), *module.named_buffers()]:
        yield name, value.detach()
