"""How much room a captured step has, and where everything lies in it that is laid out there.

A captured step of training has the sizes that it was captured with. A plan is therefore laid out in a room
that may be larger than what it needs: see `planning`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, groupby
from typing import Any

import numpy as np
from torch import Tensor

from esper.lifecycle.actions import NUM_BLUEPRINTS, Blend
from esper.population.forms import HALVES
from esper.population.plan import NO_ROW, Bools, Group, Ints, Station, span_of
from esper.population.stations import Stations

GroupKey = tuple[int, int]  # station, form
BY_ENTRY = ("rows", "source", "blend")  # fields of stations that have a line for each entry,
BY_ROW = {"entry": "after", "base": "after", "read_by": "before", "beside": "widened"}  # or a number of rows
LAUNCHES = 40  # launching the kernels of a group takes as long as this many light rows


@dataclass(frozen=True)
class Room:
    """How much of everything a plan needs, or a captured step has room for."""

    own: int  # members
    whole: tuple[GroupKey, ...]  # stations where every row meets one form at full strength
    forks: tuple[int, ...]  # [S] rows that join at each slot
    groups: Mapping[GroupKey, tuple[int, int]]  # of the other stations: entries, and how many of them learn
    blends: frozenset[tuple[int, int]]  # (station, blend) that occur
    frames: list[Frame] = field(default_factory=list, compare=False)  # what follows from it, once asked for

    def holds(self, need: Room) -> bool:
        """Whether a plan with that need can be laid out here."""
        sizes = all(
            a <= b
            for key, asked in need.groups.items()
            for a, b in zip(asked, self.groups.get(key, (-1, -1)), strict=True)
        )
        forks = all(a <= b for a, b in zip(need.forks, self.forks, strict=True))
        return self._kind == need._kind and sizes and forks and need.blends <= self.blends

    def joined(self, other: Room) -> Room | None:
        """The smallest room that holds both; None where no room can."""
        if self._kind != other._kind:
            return None
        keys = {*self.groups, *other.groups}
        both = [(self.groups.get(key, (0, 0)), other.groups.get(key, (0, 0))) for key in keys]
        sizes = [(max(a[0], b[0]), max(a[1], b[1])) for a, b in both]
        forks = tuple(max(pair) for pair in zip(self.forks, other.forks, strict=True))
        return Room(
            self.own, self.whole, forks, dict(zip(keys, sizes, strict=True)), self.blends | other.blends
        )

    def roomier(self, light: bool) -> Room:
        """With room to spare: as much as chance moves the numbers, and more where rows are light."""

        def more(n: int) -> int:
            return n + math.ceil(3 * math.sqrt(n)) + (2 + n // 8) * light if n else 0

        groups = {key: (more(size), more(live)) for key, (size, live) in self.groups.items()}
        return Room(self.own, self.whole, tuple(map(more, self.forks)), groups, self.blends)

    @property
    def cost(self) -> int:
        """About what a step takes, in rows: a group is launched, however small it is."""
        entries = sum(size + LAUNCHES for size, _ in self.groups.values())
        return self.own + sum(self.forks) + entries

    @property
    def _kind(self) -> tuple[int, tuple[GroupKey, ...], int]:
        return self.own, self.whole, len(self.forks)


@dataclass(frozen=True)
class Outline:
    """A station without its tensors."""

    slot: int
    place: int
    groups: tuple[Group, ...]
    before: int
    after: int
    span: slice  # of the entries
    blends: frozenset[Blend]
    whole: bool
    widened: int  # how many entries of the slot's seeds read beside a block of an earlier station

    def station(self, number: int, alphas: Tensor, fields: Mapping[str, Tensor]) -> Station:
        """With its tensors: those of all entries, and a line for each station of what is told row by row."""
        tensors: dict[str, Any] = {name: fields[name][self.span] for name in BY_ENTRY}
        tensors |= {name: fields[name][number, : getattr(self, size)] for name, size in BY_ROW.items()}
        outline = {name: value for name, value in vars(self).items() if name not in ("span", "widened")}
        return Station(**outline, **tensors, alpha=alphas[self.span])


@dataclass(frozen=True)
class Frame:
    """What follows from a room alone: where rows, entries and live parts lie that are laid out in it."""

    rows: int
    first_row: Ints  # [1 + S] of the own rows, then of those that join at each slot
    first: dict[GroupKey, tuple[int, int]]  # entry and live part of each group
    entries: int
    lives: int
    stations: list[Outline]  # those where anything is met,
    numbers: list[int]  # and which ones they are
    station: Ints  # [entries] the place in these lists
    within: Ints  # [entries] the number of an entry in its station
    whole: Bools  # [entries] the entry of a whole station, which is the row of the same number
    joins: Bools  # [stations, R] whether a row joins there

    @staticmethod
    def of(room: Room, met: Stations) -> Frame:
        """met: the stations of any population with these slots"""
        counts = np.array([room.own, *room.forks], dtype=np.int64)
        fork = np.repeat(np.array([NO_ROW, *met.seeds], dtype=np.int64), counts)  # the station of each row
        sides = [
            np.searchsorted(fork, np.arange(met.count), side=side).tolist() for side in ("left", "right")
        ]
        full = {key: (sides[1][key[0]], room.own) for key in room.whole}
        sizes = {key: full.get(key) or room.groups[key] for key in sorted({*room.groups, *room.whole})}
        starts = [[0, *accumulate(count)] for count in zip(*sizes.values(), strict=True)] or [[0], [0]]
        stations = _outlines(room, sizes, met, *sides)
        numbers = sorted({station for station, _ in sizes})
        lengths = [at.span.stop - at.span.start for at in stations]
        return Frame(
            rows=len(fork),
            first_row=counts.cumsum() - counts,
            first=dict(zip(sizes, zip(*starts, strict=True), strict=False)),
            entries=starts[0][-1],
            lives=starts[1][-1],
            stations=stations,
            numbers=numbers,
            station=np.repeat(np.arange(len(stations)), lengths),
            within=np.concatenate([np.zeros(0, dtype=np.int64), *map(np.arange, lengths)]),
            whole=np.repeat(np.array([at.whole for at in stations], dtype=bool), lengths),
            joins=fork == np.array(numbers, dtype=np.int64)[:, None],
        )


def _outlines(
    room: Room, sizes: Mapping[GroupKey, tuple[int, int]], met: Stations, before: list[int], after: list[int]
) -> list[Outline]:
    """The stations where anything is met, in their order.

    sizes: of the groups, in their order; before, after: the rows ahead of every station and behind it
    """
    found, start = [], 0
    for v, groups in groupby(sizes.items(), key=lambda group: group[0][0]):
        slot, place = v // met.places, met.place(v)
        own = tuple(Group(slot, place, form, *size) for (_, form), size in groups)
        stop = start + sum(group.size for group in own)
        found.append(
            Outline(
                slot=slot,
                place=place,
                groups=own,
                before=before[v],
                after=after[v],
                span=slice(start, stop),
                blends=frozenset(Blend(blend) for at, blend in room.blends if at == v),
                whole=any(at == v for at, _ in room.whole),
                widened=0,
            )
        )
        start = stop
    spans = {at.slot: widenings(at.groups) for at in found if at.place == 0}
    readers = {slot: span.stop - span.start for slot, span in spans.items()}
    return [replace(at, widened=readers.get(at.slot, 0) * _has_block(at)) for at in found]


def widenings(groups: Sequence[Group]) -> slice:
    """The entries of a seed's station that run beside the block ahead."""
    return span_of(groups, min(HALVES), max(HALVES) + 1)


def _has_block(at: Outline) -> bool:
    return at.place > 0 and any(group.form >= NUM_BLUEPRINTS for group in at.groups)
