"""From rows of work to a plan: which parts they meet at each station, laid out in a room.

A room may be larger than what a plan needs. Spare rows repeat member 0 without its seeds, spare entries read
member 0 with weights of 0 and are heard by nobody, and spare parts never learn: no real row depends on them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from esper.lifecycle.actions import Blend
from esper.population.forms import HALVES
from esper.population.plan import NO_ROW, Bools, Floats, Ints, Plan, Rows, SlotView, Station, ship
from esper.population.rooms import BY_ENTRY, BY_ROW, Frame, GroupKey, Outline, Room, widenings
from esper.population.stations import Entries, Stations

_TABLE = "table "


@dataclass(frozen=True)
class Draft:
    """A plan on the host: two arrays to be sent to the device, and how they are cut there."""

    ints: Ints
    alphas: Floats
    shapes: dict[str, tuple[int, ...]]  # of the fields that lie in `ints`, in their order
    stations: list[Outline]
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
        at_stations = {name: fields.pop(name) for name in (*BY_ENTRY, *BY_ROW)}
        stations: list[list[Station]] = [[] for _ in range(self.slots)]
        for u, at in enumerate(self.stations):
            stations[at.slot].append(at.station(u, alphas, at_stations))
        chains = tuple(tuple(works) for works in stations)
        return Plan(own=self.own, tables=tables, stations=chains, **fields)


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
        first = np.flatnonzero(np.diff((e.at << 32) | e.form, prepend=-1))  # entries of a group lie together
        first_live = np.searchsorted(self.live_entries, [*first, len(e.row)])
        self.keys: list[GroupKey] = list(zip(e.at[first].tolist(), e.form[first].tolist(), strict=True))
        sizes = np.diff(first, append=len(e.row)), np.diff(first_live)
        self.spans = np.stack([first, sizes[0], first_live[:-1], sizes[1]])  # [4, groups]
        self._groups = dict(zip(self.keys, self.spans.T.tolist(), strict=True))

    @cached_property
    def need(self) -> Room:
        """The smallest room that this fits into."""
        e, slots = self.entries, self.view.shape[1]
        by_station: dict[int, list[GroupKey]] = {}
        for key in self._groups:
            by_station.setdefault(key[0], []).append(key)
        pairs = np.flatnonzero(np.bincount(e.at * len(Blend) + e.blend)).tolist()
        blends = frozenset(divmod(pair, len(Blend)) for pair in pairs)
        whole = tuple(keys[0] for v, keys in by_station.items() if self._is_whole(v, keys, blends))
        forks = np.bincount(self.rows.fork + 1, minlength=slots + 1)[1:]
        groups = {key: (n, live) for key, (_, n, _, live) in self._groups.items() if key not in whole}
        return Room(self.view.shape[0], whole, tuple(forks.tolist()), groups, blends)

    def _is_whole(self, station: int, keys: list[GroupKey], blends: frozenset[tuple[int, int]]) -> bool:
        """Whether every row so far meets the one form of a station at full strength."""
        own = {blend for at, blend in blends if at == station}
        if self.met.place(station) == 0 or len(keys) > 1 or own != {int(Blend.ADD)}:
            return False
        so_far = int(np.searchsorted(self.entries.fork, station, side="right"))
        return np.array_equal(self.entries.row[self.span(keys[0])], np.arange(so_far))

    def draft(self, room: Room | None = None) -> Draft:
        """The plan laid out in a room that holds it, by default in one of just its size."""
        return _Layout(self, room or self.need, spare=room is not None).draft()

    def span(self, key: GroupKey) -> slice:
        """The entries of a group."""
        first, size, *_ = self._groups.get(key, (0, 0))
        return slice(first, first + size)


class _Layout:
    """Where the rows, entries and live parts of a sketch lie in a room."""

    def __init__(self, sketch: Sketch, room: Room, spare: bool) -> None:
        self.sketch, self.room = sketch, room
        if not room.frames:
            room.frames.append(Frame.of(room, sketch.met))
        self.frame = frame = room.frames[0]
        rows, (first, size, first_live, live) = sketch.rows, sketch.spans
        real = np.bincount(rows.fork + 1, minlength=len(frame.first_row))
        self.place = _moved(frame.first_row - np.cumsum(real) + real, real)  # [rows]
        self.member = np.zeros(frame.rows, dtype=np.int64)
        self.member[self.place] = rows.member
        starts = np.array([frame.first[key] for key in sketch.keys], dtype=np.int64).reshape(-1, 2)
        self.entry = _moved(starts[:, 0] - first, size)  # [entries]
        self.live = _moved(starts[:, 1] - first_live, live)  # [live parts]
        for key in room.whole:  # a row of a whole station is the entry of the same number
            own = sketch.span(key)
            self.entry[own] = frame.first[key][0] + self.place[sketch.entries.row[own]]
        self.lives = frame.lives + (spare and bool(frame.stations))  # the last is what spare entries meet

    def draft(self) -> Draft:
        """The plan in this layout."""
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
            **self._entries(),
            **tables,
        }
        alphas = np.zeros(self.frame.entries)
        alphas[self.entry] = self.sketch.entries.alpha
        return Draft(
            ints=np.concatenate([array.ravel() for array in fields.values()]),
            alphas=alphas,
            shapes={name: array.shape for name, array in fields.items()},
            stations=self.frame.stations,
            own=self.room.own,
            slots=view.shape[1],
        )

    def _lives(self) -> dict[str, Ints]:
        """The parts that learn: who they are, and the entry where each does."""
        sketch, e, at = self.sketch, self.sketch.entries, self.sketch.live_entries
        station, places = e.at[at], sketch.met.places
        slot = np.where(station % places == places - 1, station // places, NO_ROW)  # seeds come last
        member, seeds = e.member[at], slot != NO_ROW
        seat = np.full(sketch.view.shape, NO_ROW)
        seat[member[seeds], slot[seeds]] = self.live[seeds]

        def spread(values: Ints | Bools, spare: int = 0) -> Ints:
            found = np.full(self.lives, spare)
            found[self.live] = values
            return found

        fading = sketch.view.frozen[member, slot] & seeds
        return {
            "live": spread(e.part[at], sketch.blank),
            "live_member": spread(member),
            "live_slot": spread(slot),
            "learning": spread(~fading),
            "learns": spread(self.entry[at]),
            "seat": seat,
        }

    def _entries(self) -> dict[str, Ints]:
        """What each entry reads and where it is heard; a spare one of a whole station is a spare row."""
        sketch, e, frame = self.sketch, self.sketch.entries, self.frame

        def spread(values: Ints, spare: Ints | int) -> Ints:
            found = np.full(frame.entries, spare, dtype=np.int64)
            found[self.entry] = values
            return found

        met = np.zeros(int(e.part.max(initial=0)) + 1, dtype=np.int64)  # the live part of each part
        met[e.part[sketch.live_entries]] = self.live
        rows = spread(self.place[e.row], np.where(frame.whole, frame.within, 0))
        heard = frame.whole.copy()
        heard[self.entry] = True
        entry = np.full(frame.joins.shape, NO_ROW)
        entry[frame.station[heard], rows[heard]] = frame.within[heard]
        return {
            "seed": spread(met[e.part], self.lives - 1),
            "rows": rows,
            "source": spread(self.place[e.source], np.where(frame.whole, frame.within, 0)),
            "blend": spread(e.blend, int(Blend.ADD)),
            "entry": entry,
            "base": np.where(frame.joins, self.member, np.arange(len(self.member))),
            **self._readings(),
        }

    def _readings(self) -> dict[str, Ints]:
        """Where each widening reads: beside the last block that its row has met in the slot."""
        sketch, e, frame, places = self.sketch, self.sketch.entries, self.frame, self.sketch.met.places
        most = max((at.widened for at in frame.stations), default=0)
        beside = np.full((len(frame.stations), most), NO_ROW)
        read_by = np.full(frame.joins.shape, NO_ROW)
        if most == 0:
            return {"beside": beside, "read_by": read_by}
        slot = e.at // places
        last = sketch.met.last_block[e.member, slot]
        wide = np.isin(e.form, list(HALVES)) & np.isin(e.at, sketch.met.seeds) & (last > 0)
        slot, last = slot[wide], last[wide]
        number = np.searchsorted(frame.numbers, slot * places + last - 1)
        source = self.place[e.source[wide]]
        first = {at.slot: widenings(at.groups).start for at in frame.stations if at.place == 0}
        k = frame.within[self.entry[wide]] - np.array([first[s] for s in slot.tolist()], dtype=np.int64)
        beside[number, k] = source
        goes_on = e.fork[e.row[wide]] != e.at[wide]  # a row that forks there reads a constant
        read_by[number[goes_on], source[goes_on]] = k[goes_on]
        return {"beside": beside, "read_by": read_by}


def _moved(by: Ints, count: Ints) -> Ints:
    """0, 1, 2 and so on, group by group moved by as much.  # [groups] each → [sum of counts]"""
    shift = np.repeat(by, count)
    return np.arange(len(shift)) + shift
