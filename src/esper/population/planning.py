"""From rows of work to a plan: which parts they meet at each station, and how much room there is to spare.

A captured step of training has the sizes that it was captured with. A plan is therefore laid out in a room
that may be larger than what it needs. Spare rows repeat member 0 without its seeds, spare entries read member
0 with weights of 0 and are heard by nobody, and spare parts never learn: no real row depends on them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from esper.lifecycle.actions import NUM_BLUEPRINTS, Blend
from esper.population.forms import HALVES
from esper.population.plan import (
    NO_ROW,
    Floats,
    Group,
    Ints,
    Plan,
    Rows,
    SlotView,
    Station,
    ship,
    span_of,
)
from esper.population.stations import Entries, Stations

GroupKey = tuple[int, int]  # station, form
_TABLE = "table "
_BY_ENTRY = ("rows", "source", "blend")  # fields of stations that have a line for each entry,
_BY_ROW = {"entry": "after", "base": "after", "read_by": "before", "beside": "widened"}  # or a number of rows
LAUNCHES = 40  # launching the kernels of a group takes as long as this many light rows


@dataclass(frozen=True)
class Room:
    """How much of everything a plan needs, or a captured step has room for."""

    own: int  # members
    whole: tuple[GroupKey, ...]  # stations where every row meets one form at full strength
    forks: tuple[int, ...]  # [S] rows that join at each slot
    groups: Mapping[GroupKey, tuple[int, int]]  # of the other stations: entries, and how many of them learn
    blends: frozenset[tuple[int, int]]  # (station, blend) that occur
    outlines: list[Any] = field(default_factory=list, compare=False)  # of its stations, once they are known

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
class Draft:
    """A plan on the host: two arrays to be sent to the device, and how they are cut there."""

    ints: Ints
    alphas: Floats
    shapes: dict[str, tuple[int, ...]]  # of the fields that lie in `ints`, in their order
    stations: list[_Outline]
    own: int
    slots: int

    def on(self, device: torch.device) -> Plan:
        """The plan, sent without waiting."""
        return self.cut(ship(self.ints, device), ship(self.alphas, device, torch.float32))

    def cut(self, ints: Tensor, alphas: Tensor) -> Plan:
        """A plan of views: what is later written into the two tensors is written into the plan."""
        parts = ints.split([math.prod(shape) for shape in self.shapes.values()])
        fields = {
            name: part.view(shape) for (name, shape), part in zip(self.shapes.items(), parts, strict=True)
        }
        tables = tuple(fields.pop(name) for name in list(fields) if name.startswith(_TABLE))
        at_stations = {name: fields.pop(name) for name in (*_BY_ENTRY, *_BY_ROW)}
        stations: list[list[Station]] = [[] for _ in range(self.slots)]
        for u, at in enumerate(self.stations):
            stations[at.slot].append(at.station(u, alphas, at_stations))
        chains = tuple(tuple(works) for works in stations)
        return Plan(own=self.own, tables=tables, stations=chains, **fields)


@dataclass(frozen=True)
class _Outline:
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
        tensors: dict[str, Any] = {name: fields[name][self.span] for name in _BY_ENTRY}
        tensors |= {name: fields[name][number, : getattr(self, size)] for name, size in _BY_ROW.items()}
        outline = {name: value for name, value in vars(self).items() if name not in ("span", "widened")}
        return Station(**outline, **tensors, alpha=alphas[self.span])


def build_plan(rows: Rows, view: SlotView, device: torch.device, tables: Sequence[Ints] = ()) -> Plan:
    """The plan of some rows, with no room to spare; `tables` of row numbers come along as they are."""
    return Sketch(rows, view, tables).draft().on(device)


class Sketch:
    """Rows of work and the parts that they meet, by station, then form, those that learn first.

    `tables`: arrays of row numbers, -1 for none, that are wanted on the device; `blank`: a row of all parts
    that belongs to nobody and is 0.
    """

    def __init__(self, rows: Rows, view: SlotView, tables: Sequence[Ints] = (), blank: int = 0) -> None:
        self.rows, self.view, self.tables, self.blank = rows, view, tables, blank
        self.met = Stations.of(view)
        self.entries = e = Entries.of(rows, self.met)
        self.live_entries = np.flatnonzero(~e.held)  # the entry of each live part
        code, first, size = np.unique((e.at << 32) | e.form, return_index=True, return_counts=True)
        first_live = np.searchsorted(self.live_entries, [*first, len(e.row)])
        keys = [(c >> 32, c & 0xFFFFFFFF) for c in code.tolist()]
        spans = np.stack([first, size, first_live[:-1], np.diff(first_live)], axis=1).tolist()
        self._groups = dict(zip(keys, map(tuple, spans), strict=True))

    @cached_property
    def need(self) -> Room:
        """The smallest room that this fits into."""
        e, slots = self.entries, self.view.shape[1]
        by_station: dict[int, list[GroupKey]] = {}
        for key in self._groups:
            by_station.setdefault(key[0], []).append(key)
        pairs = np.unique((e.at << 8) | e.blend).tolist()
        blends = frozenset((pair >> 8, pair & 0xFF) for pair in pairs)
        whole = tuple(keys[0] for v, keys in by_station.items() if self._is_whole(v, keys, blends))
        forks = np.bincount(self.rows.fork + 1, minlength=slots + 1)[1:]
        groups = {key: (n, live) for key, (_, n, _, live) in self._groups.items() if key not in whole}
        return Room(self.view.shape[0], whole, tuple(forks.tolist()), groups, blends)

    def _is_whole(self, station: int, keys: list[GroupKey], blends: frozenset[tuple[int, int]]) -> bool:
        """Whether every row so far meets the one form of a station at full strength."""
        own = {blend for at, blend in blends if at == station}
        if self.met.place(station) == 0 or len(keys) > 1 or own != {int(Blend.ADD)}:
            return False
        first, size, *_ = self._groups[keys[0]]
        so_far = int(np.searchsorted(self.entries.fork, station, side="right"))
        return np.array_equal(self.entries.row[first : first + size], np.arange(so_far))

    def draft(self, room: Room | None = None) -> Draft:
        """The plan laid out in a room that holds it, by default in one of just its size."""
        return _Layout(self, room or self.need, spare=room is not None).draft()

    def span(self, key: GroupKey) -> tuple[int, int, int, int]:
        """The first entry of a group and how many it has, and the same of its parts that learn."""
        return self._groups.get(key, (0, 0, 0, 0))


class _Layout:
    """Where everything of a sketch lies in a room; -1 marks what is spare."""

    def __init__(self, sketch: Sketch, room: Room, spare: bool) -> None:
        self.sketch, self.room = sketch, room
        self._lay_rows()
        keys = sorted({*room.groups, *room.whole})
        full = {key: (int(self.joined[key[0]]), room.own) for key in room.whole}
        self.sizes = {key: full[key] if key in full else room.groups[key] for key in keys}
        real = np.array([sketch.span(key) for key in keys], dtype=np.int64).reshape(-1, 4)
        size = np.array(list(self.sizes.values()), dtype=np.int64).reshape(-1, 2)
        self.entry, self.live = (_spread(real[:, 2 * k], real[:, 2 * k + 1], size[:, k]) for k in range(2))
        for key, end in zip(keys, size[:, 0].cumsum().tolist(), strict=True):
            if key in full:  # a row of a whole station is the entry of the same number
                own = self.entry[end - full[key][0] : end]
                entries = own[own != NO_ROW]
                own[:] = NO_ROW
                own[self.place[sketch.entries.row[entries]]] = entries
        if spare and keys:  # what spare entries meet
            self.live = np.append(self.live, NO_ROW)

    def _lay_rows(self) -> None:
        """Spare rows behind the real ones that join at the same slot."""
        rows, room = self.sketch.rows, self.room
        slots = np.arange(len(room.forks))
        real = np.bincount(rows.fork + 1, minlength=len(slots) + 1)[1:]
        spare = np.repeat(slots, np.array(room.forks, dtype=np.int64) - real)
        fork = np.concatenate([rows.fork, spare])
        order = np.argsort(fork, kind="stable")
        self.place = np.empty(len(order), dtype=np.int64)  # of each real row, then of the spare ones
        self.place[order] = np.arange(len(order))
        self.member = np.concatenate([rows.member, np.zeros(len(spare), dtype=np.int64)])[order]
        places = self.sketch.met.places
        self.fork = np.where(fork[order] < 0, NO_ROW, (fork[order] + 1) * places - 1)  # as a station
        ends = np.arange(self.sketch.met.count)
        self.joined = np.searchsorted(self.fork, ends, side="right")  # rows behind each station
        self.before = np.searchsorted(self.fork, ends, side="left")

    def draft(self) -> Draft:
        """The plan in this layout."""
        stations, numbers = self._stations()
        tables = {
            f"{_TABLE}{k}": np.where(table == NO_ROW, NO_ROW, self.place[np.maximum(table, 0)])
            for k, table in enumerate(self.sketch.tables)
        }
        view = self.sketch.view
        fields = {
            "members": self.member,
            "ids": view.member,
            "active": view.active.astype(np.int64),
            **self._lives(),
            **self._entries(stations, numbers),
            **tables,
        }
        e = self.sketch.entries
        alphas = np.zeros(len(self.entry))
        alphas[self.entry != NO_ROW] = e.alpha[self.entry[self.entry != NO_ROW]]
        return Draft(
            ints=np.concatenate([array.ravel() for array in fields.values()]),
            alphas=alphas,
            shapes={name: array.shape for name, array in fields.items()},
            stations=stations,
            own=self.room.own,
            slots=view.shape[1],
        )

    def _lives(self) -> dict[str, Ints]:
        """The parts that learn: who they are, and the entry where each does."""
        sketch, e, alive = self.sketch, self.sketch.entries, self.live != NO_ROW
        at = sketch.live_entries[self.live[alive]]  # the entry of each real one
        new_entry = np.zeros(len(e.row), dtype=np.int64)
        new_entry[self.entry[self.entry != NO_ROW]] = np.flatnonzero(self.entry != NO_ROW)
        station, places = e.at[at], sketch.met.places
        slot = np.where(station % places == places - 1, station // places, NO_ROW)  # seeds come last
        member, seeds = e.member[at], slot != NO_ROW
        seat = np.full(sketch.view.shape, NO_ROW)
        seat[member[seeds], slot[seeds]] = np.flatnonzero(alive)[seeds]

        def spread(values: Ints, spare: int = 0) -> Ints:
            found = np.full(len(alive), spare)
            found[alive] = values
            return found

        fading = sketch.view.frozen[member, slot] & seeds
        return {
            "live": spread(e.part[at], sketch.blank),
            "live_member": spread(member),
            "live_slot": spread(slot),
            "learning": spread(~fading),
            "learns": spread(new_entry[at]),
            "seat": seat,
        }

    def _entries(self, stations: list[_Outline], numbers: list[int]) -> dict[str, Ints]:
        """What each entry reads and where it is heard; a spare one of a whole station is a spare row."""
        sketch, e, real = self.sketch, self.sketch.entries, self.entry != NO_ROW
        sizes = [at.span.stop - at.span.start for at in stations]
        within = _joined([np.arange(size) for size in sizes])
        whole = np.repeat(np.array([at.whole for at in stations], dtype=bool), sizes)

        def spread(values: Ints, spare: Ints | int) -> Ints:
            found = np.full(len(real), spare, dtype=np.int64)
            found[real] = values[self.entry[real]]
            return found

        alive = np.flatnonzero(self.live != NO_ROW)
        met = np.full(int(e.part.max(initial=0)) + 1, 0)  # the live part of each part
        met[e.part[sketch.live_entries[self.live[alive]]]] = alive
        rows = spread(self.place[e.row], np.where(whole, within, 0))
        entry = np.full((len(stations), len(self.member)), NO_ROW)
        heard = real | whole
        entry[np.repeat(np.arange(len(stations)), sizes)[heard], rows[heard]] = within[heard]
        here = np.array(numbers, dtype=np.int64)[:, None]
        return {
            "seed": spread(met[e.part], len(self.live) - 1),
            "rows": rows,
            "source": spread(self.place[e.source], np.where(whole, within, 0)),
            "blend": spread(e.blend, int(Blend.ADD)),
            "entry": entry,
            "base": np.where(self.fork == here, self.member, np.arange(len(self.member))),
            **self._readings(stations, numbers, within),
        }

    def _readings(self, stations: list[_Outline], numbers: list[int], within: Ints) -> dict[str, Ints]:
        """Where each widening reads: beside the last block that its row has met in the slot."""
        sketch, e, places = self.sketch, self.sketch.entries, self.sketch.met.places
        most = max((at.widened for at in stations), default=0)
        beside = np.full((len(stations), most), NO_ROW)
        read_by = np.full((len(stations), len(self.member)), NO_ROW)
        if most == 0:
            return {"beside": beside, "read_by": read_by}
        real = np.flatnonzero(self.entry != NO_ROW)
        asked = self.entry[real]
        slot = e.at[asked] // places
        last = sketch.met.last_block[e.member[asked], slot]
        wide = np.isin(e.form[asked], list(HALVES)) & np.isin(e.at[asked], sketch.met.seeds) & (last > 0)
        real, asked, slot, last = real[wide], asked[wide], slot[wide], last[wide]
        number, source = np.searchsorted(numbers, slot * places + last - 1), self.place[e.source[asked]]
        first = {at.slot: _widenings(at.groups).start for at in stations if at.place == 0}
        k = within[real] - np.array([first[s] for s in slot.tolist()], dtype=np.int64)
        beside[number, k] = source
        goes_on = e.fork[e.row[asked]] != e.at[asked]  # a row that forks there reads a constant
        read_by[number[goes_on], source[goes_on]] = k[goes_on]
        return {"beside": beside, "read_by": read_by}

    def _stations(self) -> tuple[list[_Outline], list[int]]:
        """The stations where anything is met, and their numbers; they follow from the room alone."""
        if self.room.outlines:
            return cast(tuple[list[_Outline], list[int]], self.room.outlines[0])
        met, found = self.sketch.met, []
        numbers = sorted({station for station, _ in self.sizes})
        grouped = {v: [(f, *size) for (at, f), size in self.sizes.items() if at == v] for v in numbers}
        ends = accumulate((sum(size for _, size, _ in grouped[v]) for v in numbers), initial=0)
        for v, (start, stop) in zip(numbers, pairwise(ends), strict=True):
            slot, place = v // met.places, met.place(v)
            found.append(
                _Outline(
                    slot=slot,
                    place=place,
                    groups=tuple(Group(slot, place, *group) for group in grouped[v]),
                    before=int(self.before[v]),
                    after=int(self.joined[v]),
                    span=slice(start, stop),
                    blends=frozenset(Blend(blend) for at, blend in self.room.blends if at == v),
                    whole=any(at == v for at, _ in self.room.whole),
                    widened=0,
                )
            )
        spans = {at.slot: _widenings(at.groups) for at in found if at.place == 0}
        readers = {slot: span.stop - span.start for slot, span in spans.items()}
        found = [replace(at, widened=readers.get(at.slot, 0) * _has_block(at)) for at in found]
        self.room.outlines.append((found, numbers))
        return found, numbers


def _widenings(groups: Sequence[Group]) -> slice:
    """The entries of a seed's station that run beside the block ahead."""
    return span_of(groups, min(HALVES), max(HALVES) + 1)


def _has_block(at: _Outline) -> bool:
    return at.place > 0 and any(group.form >= NUM_BLUEPRINTS for group in at.groups)


def _spread(first: Ints, count: Ints, size: Ints) -> Ints:
    """Group by group the numbers from `first` on, as many as `count`, then -1 up to `size`.

    # [groups] each → [sum of sizes]
    """
    found = np.full(int(size.sum()), NO_ROW)
    within = np.arange(int(count.sum())) - np.repeat(count.cumsum() - count, count)
    found[within + np.repeat(size.cumsum() - size, count)] = within + np.repeat(first, count)
    return found


def _joined(arrays: Sequence[Ints]) -> Ints:
    return np.concatenate([np.zeros(0, dtype=np.int64), *arrays])
