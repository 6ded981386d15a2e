"""Which rows of work a step consists of, and which parts they meet at each slot.

The slot states are looked at once per epoch; from there the plan is arithmetic on the host, and every step
of the epoch runs from the same index tensors.

A row is a member with an alpha for each slot. Up to the first slot where its alphas differ from the
member's own it would compute what the member's own row computes, so it only joins there: it forks.

A slot has stations, one behind the other: what was folded into the host there (its residual block first),
then the seed. Every part adds something to the rows that meet it; a seed does so at its alpha, all else at 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from esper.lifecycle.actions import GROWTH_BLUEPRINTS, STYLE_BLEND, Blend, Style
from esper.lifecycle.slot_states import AlphaMode, SlotStates
from esper.lifecycle.stages import HEARD_STAGES, Stage

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

_HEARD = np.isin(np.arange(max(Stage) + 1), [int(s) for s in HEARD_STAGES])
_BLEND = np.array([int(STYLE_BLEND[style]) for style in Style])
NO_ROW = NO_BLEND = -1
LAST_PLAIN = min(GROWTH_BLUEPRINTS) - 1  # forms beyond it grow the block ahead
Kind = tuple[object, ...]


@dataclass(frozen=True)
class SlotView:
    """What shapes the work, on the host. Place 0 of a slot is its seed, the others what was folded in."""

    alpha: Floats  # [N, S] 0 where the host does not hear the slot
    training: Bools  # [N, S] a seed that trains in isolation
    frozen: Bools  # [N, S] a seed that is fading out keeps its weights
    form: Ints  # [N, S, places]
    blend: Ints  # [N, S, places]
    part: Ints  # [N, S, places] the row of weights that stands there
    fold: Ints  # [N, S] how a fossil blends that is to become part of the host, NO_BLEND elsewhere
    active: Bools  # [N] not finished
    member: Ints  # [N] positions in all rows

    @staticmethod
    def read(states: SlotStates, form: Tensor, folded_blend: Tensor, flags: Tensor) -> tuple[SlotView, Ints]:
        """One read of the device: the view, and the blueprints of seeds that wait for weights.

        form [N, S, places], folded_blend [N, S, places - 1], flags [N, S, 3]: how a fossil that waits to be
        folded blends or -1, the blueprint of a seed that waits or -1, finished → view, [N, S]
        """
        places = form.shape[2]
        slots = torch.stack([states.stage, states.style, states.alpha_mode, states.alpha], dim=2)
        packed = torch.cat([slots.double(), flags, form, folded_blend], dim=2).cpu().numpy()
        alpha, numbers = packed[..., 3].copy(), packed.astype(np.int64)
        stage, style, mode, _, folds, births, finished = np.moveaxis(numbers[..., :7], 2, 0)
        forms, blends = numbers[..., 7 : 7 + places], numbers[..., 7 + places :]
        grows = forms[..., :1] > LAST_PLAIN  # these are added, whatever the style
        own = np.where(grows, int(Blend.ADD), _BLEND[style][..., None])
        view = SlotView(
            alpha=np.where(_HEARD[stage], alpha, 0.0),
            training=stage == Stage.TRAINING,
            frozen=mode == AlphaMode.DOWN,
            form=forms,
            blend=np.concatenate([own, blends], axis=2),
            part=np.moveaxis(np.arange(forms.size).reshape(places, *stage.shape), 0, 2),
            fold=folds,
            active=finished[:, 0] == 0,
            member=np.arange(len(stage)),
        )
        return view, births

    def of(self, members: Ints) -> SlotView:
        """Some of the members; the finished among them show no seed.  # members [n]"""
        everyone = np.array_equal(members, np.arange(len(self.member)))
        some = self if everyone else SlotView(**{name: value[members] for name, value in vars(self).items()})
        seen = some.active[:, None]
        return replace(some, alpha=np.where(seen, some.alpha, 0.0), training=some.training & seen)

    @property
    def shape(self) -> tuple[int, int]:
        return self.alpha.shape[0], self.alpha.shape[1]


@dataclass(frozen=True)
class Rows:
    """Rows of work. Own rows come first, in member order, then the others in the order of their forks."""

    member: Ints  # [R]
    alpha: Floats  # [R, S]
    shadow_slot: Ints  # [R], the slot whose seed this row trains in isolation, or -1
    fork: Ints  # [R] the first slot where a row differs from its member's own, -1 for own rows


@dataclass(frozen=True)
class Group:
    """The rows that meet one form at one station."""

    slot: int
    place: int  # 0 is the seed
    form: int
    size: int  # G
    live: int  # how many learn here, the first ones; the rest are met with their weights held fixed


def span_of(groups: Sequence[Group], low: int, high: int) -> slice:
    """The entries of a station whose form is low <= form < high; forms ascend from group to group."""
    start = sum(group.size for group in groups if group.form < low)
    return slice(start, start + sum(g.size for g in groups if low <= g.form < high))


@dataclass(frozen=True)
class Station:
    """The parts that are met at one place of a slot, group by group, and the rows that fork there.

    `before` rows come in and `after` go out; those that fork here continue the row of their member.
    """

    slot: int
    place: int
    groups: tuple[Group, ...]
    before: int
    after: int
    base: Tensor  # [after] the incoming row that each outgoing row continues
    rows: Tensor  # [E] the outgoing row of each entry, in the order of the groups; no row twice
    source: Tensor  # [E] the incoming row of each entry
    alpha: Tensor  # [E]
    blend: Tensor  # [E]
    blends: frozenset[Blend]  # those that occur
    entry: Tensor  # [after] the entry of each outgoing row, or -1
    beside: Tensor  # [W] the incoming row that each widening of the slot reads here, or -1
    read_by: Tensor  # [before] the widening that reads each incoming row as a variable, or -1
    whole: bool  # every row meets the same form, in order, at full strength

    def span(self, low: int, high: int) -> slice:
        """The entries whose form is low <= form < high."""
        return span_of(self.groups, low, high)


@dataclass(frozen=True)
class Plan:
    """Index tensors for `forward`, on the device."""

    members: Tensor  # [R] the own row that each row belongs to
    ids: Tensor  # [own] the members of the own rows, as positions in all rows
    active: Tensor  # [own] who of them learns
    own: int  # rows 0..own are the members themselves
    live: Tensor  # [L] the parts that learn, as rows of all parts, in the order of the groups
    live_member: Tensor  # [L] whose they are
    live_slot: Tensor  # [L] the slot of a seed, -1 of what was folded in
    seed: Tensor  # [entries of all stations] which live part each entry meets
    learns: Tensor  # [L] the entry where each live part learns; elsewhere it is held fixed
    learning: Tensor  # [L] bool: a seed that is fading out keeps its weights, and so does spare room
    seat: Tensor  # [N, S] which live part is the seed of that slot, or -1
    tables: tuple[Tensor, ...]  # row numbers that were asked for, -1 where none was
    stations: tuple[tuple[Station, ...], ...]  # of each slot, in the order in which they are met

    @property
    def groups(self) -> list[Group]:
        return [group for slot in self.stations for station in slot for group in station.groups]

    @property
    def num_rows(self) -> int:
        return self.members.shape[0]

    @property
    def kinds(self) -> frozenset[Kind]:
        """Everything that decides which kernels a step runs, whatever its numbers of rows."""
        bodies = {(g.slot, g.place, g.form) for g in self.groups}
        works = [work for slot in self.stations for work in slot]
        blends = {(w.slot, w.place, w.whole, blend) for w in works for blend in w.blends}
        return frozenset({*bodies, *blends, (self.num_rows > self.own,)})


def shadow_table(rows: Rows, shape: tuple[int, int]) -> Ints:
    """The row in which the seed of each slot trains in isolation, or -1.  # shape [N, S]"""
    table, alone = np.full(shape, NO_ROW), np.flatnonzero(rows.shadow_slot != NO_ROW)
    table[rows.member[alone], rows.shadow_slot[alone]] = alone
    return table


def training_rows(view: SlotView) -> Rows:
    """Every member as it is, then one shadow per isolated seed with that seed's alpha at 1."""
    num_members = view.shape[0]
    slot, member = np.nonzero(view.training.T)
    shadow = view.alpha[member]
    shadow[np.arange(len(member)), slot] = 1.0
    shadow_slot = np.concatenate([np.full(num_members, NO_ROW), slot])
    return Rows(
        member=np.concatenate([np.arange(num_members), member]),
        alpha=np.concatenate([view.alpha, shadow]),
        shadow_slot=shadow_slot,
        fork=shadow_slot,
    )


@dataclass(frozen=True)
class Measurement:
    """The rows of a validation and where each answer is found."""

    rows: Rows
    without: Ints  # [N, S] row with that heard slot off, or -1
    shadow: Ints  # [N, S] row with that isolated seed on, or -1


def measurement_rows(view: SlotView, ablate: bool = True) -> Measurement:
    """Build every member's own row, then one row for each seed: without it if it is heard, else with it.

    A seed that trains in isolation is not heard, so that no slot of a member asks for two rows and no subset
    of seeds occurs twice. Row numbers follow from positions alone, for any number of slots.
    """
    num_members = view.shape[0]
    asked = ((view.alpha > 0) | view.training) & ablate
    slot, member = np.nonzero(asked.T)
    others = view.alpha[member]
    others[np.arange(len(member)), slot] = np.where(view.training[member, slot], 1.0, 0.0)
    row = np.full(view.shape, NO_ROW)
    row[member, slot] = num_members + np.arange(len(member))
    rows = Rows(
        member=np.concatenate([np.arange(num_members), member]),
        alpha=np.concatenate([view.alpha, others]),
        shadow_slot=np.full(num_members + len(member), NO_ROW),
        fork=np.concatenate([np.full(num_members, NO_ROW), slot]),
    )
    return Measurement(rows, np.where(view.training, NO_ROW, row), np.where(view.training, row, NO_ROW))


def ship(array: NDArray[Any], device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Send an array to the device without waiting for it."""
    packed = torch.as_tensor(array, dtype=dtype)
    return packed.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else packed


def ship_to(place: Tensor, array: NDArray[Any]) -> None:
    """Write an array into a tensor on the device without waiting for it."""
    packed = torch.as_tensor(array, dtype=place.dtype)
    place.copy_(packed.pin_memory() if place.is_cuda else packed, non_blocking=True)
