"""Which rows of work a step consists of, and which seeds they meet at each slot.

The slot states are looked at once per epoch; from there the plan is arithmetic on the host, and every step
of the epoch runs from the same index tensors.

A row is a member with an alpha for each slot. Up to the first slot where its alphas differ from the
member's own it would compute what the member's own row computes, so it only joins there: it forks.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from esper.lifecycle.actions import STYLE_BLEND, Blend, Style
from esper.lifecycle.slot_states import AlphaMode, SlotStates
from esper.lifecycle.stages import HEARD_STAGES, Stage

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

_HEARD = np.isin(np.arange(max(Stage) + 1), [int(s) for s in HEARD_STAGES])
_BLEND = np.array([int(STYLE_BLEND[style]) for style in Style])
NO_ROW = -1
Kind = tuple[object, ...]


@dataclass(frozen=True)
class SlotView:
    """The slot states that shape the work, on the host.  # each [N, S]"""

    alpha: Floats  # 0 where the host does not hear the slot
    training: Bools  # a seed that trains in isolation
    frozen: Bools  # a seed that is fading out keeps its weights
    blueprint: Ints
    blend: Ints

    @staticmethod
    def of(states: SlotStates) -> SlotView:
        """One read of the device."""
        packed = torch.stack(
            [states.stage, states.blueprint, states.style, states.alpha_mode, states.alpha], dim=0
        )
        stage, blueprint, style, mode, alpha = packed.double().cpu().numpy()
        stage = stage.astype(np.int64)
        return SlotView(
            alpha=np.where(_HEARD[stage], alpha, 0.0),
            training=stage == Stage.TRAINING,
            frozen=mode == AlphaMode.DOWN,
            blueprint=blueprint.astype(np.int64),
            blend=_BLEND[style.astype(np.int64)],
        )

    def members(self, start: int, stop: int) -> SlotView:
        return SlotView(**{name: value[start:stop] for name, value in vars(self).items()})

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
    """The rows that meet one blueprint at one slot."""

    slot: int
    blueprint: int
    size: int  # G
    live: int  # how many learn here, the first ones; the rest are heard with their weights held fixed


@dataclass(frozen=True)
class SlotWork:
    """The seeds that are met at one slot, group by group, and the rows that fork there.

    `before` rows come in and `after` go out; those that fork here continue the row of their member.
    """

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


@dataclass(frozen=True)
class Plan:
    """Index tensors for `forward`, on the device."""

    members: Tensor  # [R]
    own: int  # rows 0..own are the members themselves
    live_seeds: Tensor  # [L] member · S + slot, in the order of the groups
    seed: Tensor  # [entries of all slots] which live seed each entry meets
    learns: Tensor  # [L] the entry where each live seed learns; elsewhere it is held fixed
    slots: tuple[SlotWork, ...]

    @property
    def groups(self) -> list[Group]:
        return [group for slot in self.slots for group in slot.groups]

    @property
    def num_rows(self) -> int:
        return self.members.shape[0]

    @property
    def kinds(self) -> frozenset[Kind]:
        """Everything that decides which kernels a step runs, whatever its numbers of rows."""
        bodies = {(g.slot, g.blueprint) for g in self.groups}
        blends = {(s, blend) for s, work in enumerate(self.slots) for blend in work.blends}
        return frozenset({*bodies, *blends, (self.num_rows > self.own,)})


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
    """The rows of a validation, each distinct subset of seeds once, and where each answer is found."""

    rows: Rows
    without: Ints  # [N, S] row with that heard slot off, or -1
    shadow: Ints  # [N, S] row with that isolated seed on, or -1
    without_pair: Ints  # [N, S, S] row with both slots off, or -1


def measurement_rows(view: SlotView, ablate: bool = True, pairs: bool = False) -> Measurement:
    """Own rows, leave-one-out rows, shadow rows and, where asked, leave-two-out rows."""
    num_members, num_slots = view.shape
    bit = 1 << np.arange(num_slots, dtype=np.int64)
    heard = (view.alpha > 0) & ablate
    subset = ((view.alpha > 0) * bit).sum(1)  # [N]
    both = heard[:, :, None] & heard[:, None, :] & (bit[:, None] != bit) & pairs
    wanted = [
        (subset, np.ones(num_members, dtype=bool)),
        (subset[:, None] & ~bit, heard),
        (subset[:, None] | bit, view.training & ablate),
        (subset[:, None, None] & ~(bit[:, None] | bit), both),
    ]
    keys, position = _distinct(wanted, num_slots)
    member = keys >> num_slots
    active = (keys[:, None] & bit) > 0
    alpha = np.where(active, np.where(view.training[member], 1.0, view.alpha[member]), 0.0)
    rows = Rows(
        member=member,
        alpha=alpha,
        shadow_slot=np.full(len(member), NO_ROW),
        fork=_lowest_bit(keys ^ keys[member]),
    )
    return Measurement(rows, *position[1:])


def _lowest_bit(numbers: Ints) -> Ints:
    """The place of the lowest bit that is set, -1 where none is."""
    lowest = numbers & -numbers
    return np.frexp(lowest.astype(np.float64))[1].astype(np.int64) - 1


def _distinct(wanted: list[tuple[Ints, Bools]], num_slots: int) -> tuple[Ints, list[Ints]]:
    """Distinct (member, subset) keys in the order of `Rows`, and the row of every request, or -1."""
    keyed = []
    for subset, asked in wanted:
        member = np.arange(len(subset)).reshape(-1, *[1] * (subset.ndim - 1))
        key = np.broadcast_to((member << num_slots) | subset, asked.shape)
        keyed.append((key, asked))
    own = keyed[0][0]
    others = np.setdiff1d(np.concatenate([key[asked] for key, asked in keyed[1:]]), own)
    forks = _lowest_bit(others ^ own[others >> num_slots])
    keys = np.concatenate([own, others[np.argsort(forks, kind="stable")]])
    order = np.argsort(keys)
    position = [
        np.where(asked, order[np.searchsorted(keys, key, sorter=order).clip(max=len(keys) - 1)], NO_ROW)
        for key, asked in keyed
    ]
    return keys, position


def build_plan(rows: Rows, view: SlotView, device: torch.device) -> Plan:
    """Group the (row, slot) pairs that meet a seed by slot and blueprint, live ones first."""
    num_members, num_slots = view.shape
    row, slot = np.nonzero((rows.alpha > 0) & (np.arange(num_slots) >= rows.fork[:, None]))
    member = rows.member[row]
    blueprint = view.blueprint[member, slot]
    shadow = rows.shadow_slot[row]
    held = (shadow != NO_ROW) & (shadow != slot)
    order = np.lexsort((held, blueprint, slot))
    row, slot, member, blueprint = (a[order] for a in (row, slot, member, blueprint))
    held = held[order]
    seed = member * num_slots + slot
    live_place = np.zeros(num_members * num_slots, dtype=np.int64)  # of each live seed among its kind
    live_place[seed[~held]] = np.arange((~held).sum())
    source = np.where(rows.fork[row] == slot, member, row)
    alpha = rows.alpha[row, slot]
    blend = view.blend[member, slot]

    entry = np.full((num_slots, len(rows.member)), NO_ROW)
    starts = np.searchsorted(slot, np.arange(num_slots + 1))  # of each slot's entries
    entry[slot, row] = np.arange(len(row)) - starts[slot]
    base = np.where(rows.fork == np.arange(num_slots)[:, None], rows.member, np.arange(len(rows.member)))
    integers = _ship(
        [
            *(rows.member, row, source, blend, seed[~held], live_place[seed], np.flatnonzero(~held)),
            *(entry.ravel(), base.ravel()),
        ],
        torch.long,
        device,
    )
    alphas = _ship([alpha], torch.float32, device)[0]
    members, row_of, source_of, blend_of, live, seed_of, learns, entries, bases = integers

    joined = np.searchsorted(rows.fork, np.arange(-1, num_slots), side="right").tolist()  # rows so far
    slots: list[SlotWork] = []  # the forward pass goes from slot to slot, so the plan does too
    for s in range(num_slots):
        span = slice(int(starts[s]), int(starts[s + 1]))
        before, after = joined[s], joined[s + 1]
        slots.append(
            SlotWork(
                groups=_groups(s, span, blueprint, held),
                before=before,
                after=after,
                base=bases.view(num_slots, -1)[s, :after],
                rows=row_of[span],
                source=source_of[span],
                alpha=alphas[span],
                blend=blend_of[span],
                blends=frozenset(Blend(k) for k in np.unique(blend[span])),
                entry=entries.view(num_slots, -1)[s, :after],
            )
        )
    return Plan(members, num_members, live, seed_of, learns, tuple(slots))


def _groups(slot: int, span: slice, blueprint: Ints, held: Bools) -> tuple[Group, ...]:
    """The entries of one slot, blueprint by blueprint. The arrays are those of all entries."""
    names, first = np.unique(blueprint[span], return_index=True)
    bounds = [*(first + span.start).tolist(), span.stop]
    return tuple(
        Group(slot=slot, blueprint=name, size=b - a, live=int((~held[a:b]).sum()))
        for name, (a, b) in zip(names.tolist(), pairwise(bounds), strict=True)
    )


def _ship(arrays: list[Ints] | list[Floats], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Send several arrays to the device in one copy."""
    return list(ship(np.concatenate(arrays), device, dtype).split([len(a) for a in arrays]))


def ship(array: NDArray[Any], device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Send an array to the device without waiting for it."""
    packed = torch.as_tensor(array, dtype=dtype)
    return packed.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else packed
