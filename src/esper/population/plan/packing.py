"""Build the gather and scatter indices of a step, padded to a bucket.

A bucket may be larger than what a plan needs. Padding rows repeat member 0 without its seeds, padding entries
read member 0 with weights of 0 and are added to no row, and padding parts never learn: no real row depends on
them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor

from esper.lifecycle.actions import NUM_BLUEPRINTS, Blend
from esper.population.forms import HALVES, NO_FORM
from esper.population.plan.rows import NO_ROW, Bools, Floats, Ints, Rows, SlotView, to_device

GroupKey = tuple[int, int]  # station, form
BY_ENTRY = ("rows", "source", "blend")  # fields of a station with a number for each entry,
# or for each of so many rows
BY_ROW = {"entry": "after", "base": "after", "read_by": "before", "beside": "widened"}
LAUNCH_COST = 40  # launching the kernels of a group takes as long as computing this many rows
_TABLE = "table "


@dataclass(frozen=True)
class Group:
    """The entries of one station whose parts have the same form."""

    slot: int
    position: int  # 0 is the seed
    form: int
    size: int  # G
    live: int  # how many learn here, the first ones; the others use weights that are held fixed


def widened_span(groups: Sequence[Group]) -> slice:
    """Return the entries of a seed's station that widen the block ahead; forms ascend from group to group."""
    start = sum(group.size for group in groups if group.form < min(HALVES))
    return slice(start, start + sum(group.size for group in groups if group.form in HALVES))


@dataclass(frozen=True)
class StationShape:
    """The parts at one position of a slot, group by group, and how many rows pass.

    `before` rows come in and `after` go out; those that fork here continue the row of their member.
    """

    slot: int
    position: int
    groups: tuple[Group, ...]
    before: int
    after: int
    span: slice  # of its entries among those of all stations
    blends: frozenset[Blend]  # those that occur
    whole: bool  # every row runs the same form, in order, at full strength
    widened: int  # how many entries of the slot's seeds read beside a block of this station

    def with_tensors(self, number: int, alphas: Tensor, fields: Mapping[str, Tensor]) -> Station:
        """Cut the tensors of the station with this number out of those of all stations."""
        tensors: dict[str, Any] = {name: fields[name][self.span] for name in BY_ENTRY}
        tensors |= {name: fields[name][number, : getattr(self, size)] for name, size in BY_ROW.items()}
        return Station(**vars(self), **tensors, alpha=alphas[self.span])


@dataclass(frozen=True)
class Station(StationShape):
    """A station with its index tensors."""

    base: Tensor  # [after] the incoming row that each outgoing row continues
    rows: Tensor  # [E] the outgoing row of each entry, in the order of the groups; no row twice
    source: Tensor  # [E] the incoming row of each entry
    alpha: Tensor  # [E]
    blend: Tensor  # [E]
    entry: Tensor  # [after] the entry of each outgoing row, or -1
    beside: Tensor  # [W] the incoming row that each widening of the slot reads here, or -1
    read_by: Tensor  # [before] the widening that reads each incoming row as a variable, or -1


@dataclass(frozen=True)
class Plan:
    """The index tensors of a forward pass, on the device."""

    members: Tensor  # [R] the own row that each row belongs to
    ids: Tensor  # [own] the members of the own rows, as indices into all members
    active: Tensor  # [own] which of them learn
    own: int  # rows 0..own are the members themselves
    live: Tensor  # [L] the parts that learn, as rows of all parts, in the order of the groups
    live_member: Tensor  # [L] the own row that each belongs to
    live_slot: Tensor  # [L] the slot of a seed, -1 for what was folded in
    live_index: Tensor  # [entries of all stations] the live part whose weights each entry uses
    learning_entry: Tensor  # [L] the entry in which each live part learns; elsewhere it is held fixed
    learning: Tensor  # [L] 0 for padding and for seeds that fade out, which keep their weights
    seed_of_slot: Tensor  # [N, S] the live part that is the seed of that slot, or -1
    tables: tuple[Tensor, ...]  # the tables of the rows, see `Rows`
    stations: tuple[tuple[Station, ...], ...]  # of each slot, in the order in which rows pass them

    @property
    def groups(self) -> list[Group]:
        return [group for slot in self.stations for station in slot for group in station.groups]

    @property
    def num_rows(self) -> int:
        return self.members.shape[0]

    @property
    def signature(self) -> frozenset[tuple[object, ...]]:
        """Everything that decides which kernels a step launches, whatever its numbers of rows."""
        forms = {(g.slot, g.position, g.form) for g in self.groups}
        stations = [station for slot in self.stations for station in slot]
        blends = {(s.slot, s.position, s.whole, blend) for s in stations for blend in s.blends}
        return frozenset({*forms, *blends, (self.num_rows > self.own,)})


@dataclass(frozen=True)
class Bucket:
    """The capacity that a plan needs, or that a captured step has."""

    own: int  # members
    positions: int  # of a slot
    whole: tuple[GroupKey, ...]  # stations where every row runs one form at full strength
    forks: tuple[int, ...]  # [S] rows that fork at each slot
    groups: Mapping[GroupKey, tuple[int, int]]  # of the other stations: entries, and how many of them learn
    blends: frozenset[tuple[int, int]]  # (station, blend) that occur

    def holds(self, need: Bucket) -> bool:
        """Return whether a plan that needs `need` can be padded to this bucket."""
        return (
            self._kind == need._kind
            and all(
                a <= b
                for key, asked in need.groups.items()
                for a, b in zip(asked, self.groups.get(key, (-1, -1)), strict=True)
            )
            and all(a <= b for a, b in zip(need.forks, self.forks, strict=True))
            and need.blends <= self.blends
        )

    def merge(self, other: Bucket) -> Bucket | None:
        """Return the smallest bucket that holds both, or None where there is none."""
        if self._kind != other._kind:
            return None
        keys = {*self.groups, *other.groups}
        both = [(self.groups.get(key, (0, 0)), other.groups.get(key, (0, 0))) for key in keys]
        sizes = [(max(a[0], b[0]), max(a[1], b[1])) for a, b in both]
        forks = tuple(max(pair) for pair in zip(self.forks, other.forks, strict=True))
        groups = dict(zip(keys, sizes, strict=True))
        return replace(self, forks=forks, groups=groups, blends=self.blends | other.blends)

    def with_margin(self) -> Bucket:
        """Return a larger bucket: by as much as chance moves the counts."""

        def more(n: int) -> int:
            # Counts of independent events vary by about sqrt(n): three times that covers nearly all of them.
            return n + math.ceil(3 * math.sqrt(n)) + 2 if n else 0

        groups = {key: (more(size), more(live)) for key, (size, live) in self.groups.items()}
        return replace(self, forks=tuple(map(more, self.forks)), groups=groups)

    @property
    def cost(self) -> int:
        """About what a step takes, in rows: a group is launched, however small it is."""
        entries = sum(size + LAUNCH_COST for size, _ in self.groups.values())
        return self.own + sum(self.forks) + entries

    @property
    def _kind(self) -> tuple[int, tuple[GroupKey, ...], int]:
        return self.own, self.whole, len(self.forks)

    @cached_property
    def layout(self) -> BucketLayout:
        """Where rows, entries and live parts lie in this bucket."""
        counts = np.array([self.own, *self.forks], dtype=np.int64)
        num_stations = len(self.forks) * self.positions
        seeds = seed_stations(len(self.forks), self.positions)
        # Rows are ordered by the station where they fork, so those at a station are the first so many.
        fork = np.repeat(np.array([NO_ROW, *seeds], dtype=np.int64), counts)  # the station of each row
        before, after = (
            np.searchsorted(fork, np.arange(num_stations), side=side).tolist() for side in ("left", "right")
        )
        full = {key: (after[key[0]], self.own) for key in self.whole}
        sizes = {key: full.get(key) or self.groups[key] for key in sorted({*self.groups, *self.whole})}
        starts = [[0, *accumulate(count)] for count in zip(*sizes.values(), strict=True)] or [[0], [0]]
        stations = self._station_shapes(sizes, before, after)
        numbers = sorted({station for station, _ in sizes})
        lengths = [at.span.stop - at.span.start for at in stations]
        return BucketLayout(
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
            forks=fork == np.array(numbers, dtype=np.int64)[:, None],
        )

    def _station_shapes(
        self, sizes: Mapping[GroupKey, tuple[int, int]], before: list[int], after: list[int]
    ) -> list[StationShape]:
        """Return the stations where anything runs, in their order.

        sizes: of the groups, in their order; before, after: the rows ahead of every station and behind it
        """
        found, start = [], 0
        for number, groups in groupby(sizes.items(), key=lambda group: group[0][0]):
            slot, position = number // self.positions, (number + 1) % self.positions
            own = tuple(Group(slot, position, form, *size) for (_, form), size in groups)
            stop = start + sum(group.size for group in own)
            blends = frozenset(Blend(blend) for at, blend in self.blends if at == number)
            whole = any(at == number for at, _ in self.whole)
            span, rows = slice(start, stop), (before[number], after[number])
            found.append(StationShape(slot, position, own, *rows, span, blends, whole, widened=0))
            start = stop
        # Widenings of a slot read at every station of it that has blocks.
        spans = {at.slot: widened_span(at.groups) for at in found if at.position == 0}
        readers = {slot: span.stop - span.start for slot, span in spans.items()}
        blocks = [at.position > 0 and any(g.form >= NUM_BLUEPRINTS for g in at.groups) for at in found]
        pairs = zip(found, blocks, strict=True)
        return [replace(at, widened=readers.get(at.slot, 0) * has_block) for at, has_block in pairs]


@dataclass(frozen=True)
class BucketLayout:
    """Where rows, entries and live parts lie in a bucket."""

    rows: int
    first_row: Ints  # [1 + S] of the own rows, then of those that fork at each slot
    first: dict[GroupKey, tuple[int, int]]  # the first entry and the first live part of each group
    entries: int
    lives: int
    stations: list[StationShape]  # those where anything runs,
    numbers: list[int]  # and which stations they are
    station: Ints  # [entries] the index into these lists
    within: Ints  # [entries] the number of an entry in its station
    whole: Bools  # [entries] the entry of a whole station, which is the row of the same number
    forks: Bools  # [stations, R] whether a row forks there


@dataclass(frozen=True)
class PackedPlan:
    """A plan on the host: two arrays to copy to the device, and how to cut them there."""

    ints: Ints
    alphas: Floats
    shapes: dict[str, tuple[int, ...]]  # of the fields that lie in `ints`, in their order
    stations: list[StationShape]
    own: int
    slots: int

    def to(self, device: torch.device) -> Plan:
        """Copy the plan to the device without waiting."""
        return self.cut(to_device(self.ints, device), to_device(self.alphas, device, torch.float32))

    def cut(self, ints: Tensor, alphas: Tensor) -> Plan:
        """Return a plan of views: what is later written into the two tensors changes the plan."""
        pieces = ints.split([math.prod(shape) for shape in self.shapes.values()])
        fields = {
            name: piece.view(shape) for (name, shape), piece in zip(self.shapes.items(), pieces, strict=True)
        }
        tables = tuple(fields.pop(name) for name in list(fields) if name.startswith(_TABLE))
        at_stations = {name: fields.pop(name) for name in (*BY_ENTRY, *BY_ROW)}
        stations: list[list[Station]] = [[] for _ in range(self.slots)]
        for number, shape in enumerate(self.stations):
            stations[shape.slot].append(shape.with_tensors(number, alphas, at_stations))
        return Plan(own=self.own, tables=tables, stations=tuple(map(tuple, stations)), **fields)


def seed_stations(slots: int, positions: int) -> Ints:
    """Return the station of each seed: rows pass the folded parts of a slot first, its seed last.  # [S]"""
    return np.arange(1, slots + 1) * positions - 1


class PlanSpec:
    """What every row runs at every station: entries by station, then form, those that learn first.

    `blank` is a row of the parts that belongs to no member and is 0: the weights of padding entries.
    """

    def __init__(self, rows: Rows, view: SlotView, blank: int = 0) -> None:
        self.rows, self.view, self.blank = rows, view, blank
        _, num_slots, self.positions = view.form.shape
        self.seeds = seed_stations(num_slots, self.positions)
        self.fork = np.append(self.seeds, NO_ROW)[rows.fork]  # [R] the station where a row starts
        self._find_entries()
        first = np.flatnonzero(np.diff((self.station << 32) | self.form, prepend=-1))  # of each group
        first_live = np.searchsorted(self.live_entries, [*first, len(self.row)])
        self.keys: list[GroupKey] = list(
            zip(self.station[first].tolist(), self.form[first].tolist(), strict=True)
        )
        sizes = np.diff(first, append=len(self.row)), np.diff(first_live)
        self.spans = np.stack([first, sizes[0], first_live[:-1], sizes[1]])  # [4, groups]
        self._groups = dict(zip(self.keys, self.spans.T.tolist(), strict=True))

    def _find_entries(self) -> None:
        """Set the arrays of the entries, each [E]."""
        rows, view, positions = self.rows, self.view, self.positions
        folded = np.zeros(view.form.shape, dtype=bool)
        folded[:, :, :-1] = view.form[:, :, 1:] != NO_FORM  # by station: the seed, at position 0, is last
        runs = folded.reshape(len(folded), -1)[rows.member]  # [R, stations]
        # A row runs what was folded in everywhere, and a seed where its alpha is above 0,
        runs[:, self.seeds] = rows.alpha > 0
        own = np.searchsorted(self.fork, NO_ROW, side="right")
        # but nothing ahead of its fork, where its member's own row computes the same.
        runs[own:] &= np.arange(runs.shape[1]) >= self.fork[own:, None]
        row, station = np.divmod(np.flatnonzero(runs), runs.shape[1])  # faster than over two axes
        at = rows.member[row], station // positions, (station + 1) % positions
        form = view.form[at]
        # In a shadow all but its own seed is held fixed; else a part learns in the first row that runs it.
        in_shadow = (row >= own) & (self.fork[row] != station)
        held = in_shadow if rows.isolates else _seen_before(view.part[at])
        # Groups are contiguous runs of entries: one call of a form serves all of them.
        order = np.argsort((station * (form.max(initial=0) + 1) + form) * 2 + held, kind="stable")
        self.row, self.station, self.form = row[order], station[order], form[order]
        at = at[0][order], at[1][order], at[2][order]
        self.member, slot, position = at
        self.part, self.blend = view.part[at], view.blend[at]
        self.alpha = np.where(position == 0, rows.alpha[self.row, slot], 1.0)
        self.source = np.where(self.fork[self.row] == self.station, self.member, self.row)  # incoming row
        self.live_entries = np.flatnonzero(~held[order])  # [L]

    @cached_property
    def need(self) -> Bucket:
        """The smallest bucket that this fits into."""
        by_station: dict[int, list[GroupKey]] = {}
        for key in self._groups:
            by_station.setdefault(key[0], []).append(key)
        pairs = np.flatnonzero(np.bincount(self.station * len(Blend) + self.blend)).tolist()
        blends = frozenset(divmod(pair, len(Blend)) for pair in pairs)
        whole = tuple(keys[0] for v, keys in by_station.items() if self._is_whole(v, keys, blends))
        forks = np.bincount(self.rows.fork + 1, minlength=len(self.seeds) + 1)[1:]
        groups = {key: (n, live) for key, (_, n, _, live) in self._groups.items() if key not in whole}
        return Bucket(self.view.shape[0], self.positions, whole, tuple(forks.tolist()), groups, blends)

    def _is_whole(self, station: int, keys: list[GroupKey], blends: frozenset[tuple[int, int]]) -> bool:
        """Return whether every row so far runs the one form of a station at full strength."""
        own = {blend for at, blend in blends if at == station}
        is_seed = (station + 1) % self.positions == 0
        if is_seed or len(keys) > 1 or own != {int(Blend.ADD)}:
            return False
        so_far = int(np.searchsorted(self.fork, station, side="right"))
        return np.array_equal(self.row[self.span(keys[0])], np.arange(so_far))

    def pack(self, bucket: Bucket | None = None) -> PackedPlan:
        """Return the plan padded to a bucket that holds it, by default without padding."""
        return _Packer(self, bucket or self.need, padded=bucket is not None).pack()

    def span(self, key: GroupKey) -> slice:
        """Return the entries of a group."""
        first, size, *_ = self._groups.get(key, (0, 0))
        return slice(first, first + size)


class _Packer:
    """Writes the rows, entries and live parts of a spec to where they lie in a bucket."""

    def __init__(self, spec: PlanSpec, bucket: Bucket, padded: bool) -> None:
        self.spec, self.bucket, self.layout = spec, bucket, bucket.layout
        layout, rows, (first, size, first_live, live) = self.layout, spec.rows, spec.spans
        # Rows of one fork keep their order and move by as much padding as lies ahead of them.
        real = np.bincount(rows.fork + 1, minlength=len(layout.first_row))
        self.row = _shifted(layout.first_row - np.cumsum(real) + real, real)  # [R] where each row goes
        self.member = np.zeros(layout.rows, dtype=np.int64)
        self.member[self.row] = rows.member
        starts = np.array([layout.first[key] for key in spec.keys], dtype=np.int64).reshape(-1, 2)
        self.entry = _shifted(starts[:, 0] - first, size)  # [E] where each entry goes
        self.live = _shifted(starts[:, 1] - first_live, live)  # [L] where each live part goes
        for key in bucket.whole:  # a row of a whole station is the entry of the same number
            own = spec.span(key)
            self.entry[own] = layout.first[key][0] + self.row[spec.row[own]]
        self.lives = layout.lives + (padded and bool(layout.stations))  # the last is that of padding entries

    def pack(self) -> PackedPlan:
        view = self.spec.view
        tables = {
            f"{_TABLE}{k}": np.where(table == NO_ROW, NO_ROW, self.row[np.maximum(table, 0)])
            for k, table in enumerate(self.spec.rows.tables)
        }
        fields = {
            "members": self.member,
            "ids": view.member,
            "active": view.active.astype(np.int64),
            **self._live_parts(),
            **self._entries(),
            **self._readings(),
            **tables,
        }
        alphas = np.zeros(self.layout.entries)
        alphas[self.entry] = self.spec.alpha
        return PackedPlan(
            ints=np.concatenate([array.ravel() for array in fields.values()]),
            alphas=alphas,
            shapes={name: array.shape for name, array in fields.items()},
            stations=self.layout.stations,
            own=self.bucket.own,
            slots=view.shape[1],
        )

    def _live_parts(self) -> dict[str, Ints]:
        """The parts that learn: whose they are, and the entry where each does."""
        spec, at = self.spec, self.spec.live_entries
        station, positions, member = spec.station[at], spec.positions, spec.member[at]
        slot = np.where(station % positions == positions - 1, station // positions, NO_ROW)  # of seeds alone
        seeds = slot != NO_ROW
        seed_of_slot = np.full(spec.view.shape, NO_ROW)
        seed_of_slot[member[seeds], slot[seeds]] = self.live[seeds]

        def scatter(values: Ints | Bools, padding: int = 0) -> Ints:
            found = np.full(self.lives, padding)
            found[self.live] = values
            return found

        fading = spec.view.frozen[member, slot] & seeds
        return {
            "live": scatter(spec.part[at], spec.blank),
            "live_member": scatter(member),
            "live_slot": scatter(slot),
            "learning": scatter(~fading),
            "learning_entry": scatter(self.entry[at]),
            "seed_of_slot": seed_of_slot,
        }

    def _entries(self) -> dict[str, Ints]:
        """What each entry reads and the row it is added to; padding of a whole station is a padding row."""
        spec, layout = self.spec, self.layout

        def scatter(values: Ints, padding: Ints | int) -> Ints:
            found = np.full(layout.entries, padding, dtype=np.int64)
            found[self.entry] = values
            return found

        # Every part learns in exactly one entry, and the others gather its weights from there.
        live_of = np.zeros(int(spec.part.max(initial=0)) + 1, dtype=np.int64)  # the live part of each part
        live_of[spec.part[spec.live_entries]] = self.live
        rows = scatter(self.row[spec.row], np.where(layout.whole, layout.within, 0))
        added = layout.whole.copy()
        added[self.entry] = True
        entry = np.full(layout.forks.shape, NO_ROW)
        entry[layout.station[added], rows[added]] = layout.within[added]
        return {
            "live_index": scatter(live_of[spec.part], self.lives - 1),
            "rows": rows,
            "source": scatter(self.row[spec.source], np.where(layout.whole, layout.within, 0)),
            "blend": scatter(spec.blend, int(Blend.ADD)),
            "entry": entry,
            "base": np.where(layout.forks, self.member, np.arange(len(self.member))),
        }

    def _readings(self) -> dict[str, Ints]:
        """Where each widening reads: beside the last block that its row has passed in the slot."""
        spec, layout, positions = self.spec, self.layout, self.spec.positions
        most = max((at.widened for at in layout.stations), default=0)
        beside = np.full((len(layout.stations), most), NO_ROW)
        read_by = np.full(layout.forks.shape, NO_ROW)
        if most == 0:
            return {"beside": beside, "read_by": read_by}
        is_block = spec.view.form[:, :, 1:] >= NUM_BLUEPRINTS
        last_block = (is_block * np.arange(1, positions)).max(axis=2, initial=0)  # [N, S], 0 for none
        slot = spec.station // positions
        last = last_block[spec.member, slot]
        wide = np.isin(spec.form, list(HALVES)) & np.isin(spec.station, spec.seeds) & (last > 0)
        slot, last = slot[wide], last[wide]
        number = np.searchsorted(layout.numbers, slot * positions + last - 1)
        source = self.row[spec.source[wide]]
        first = {at.slot: widened_span(at.groups).start for at in layout.stations if at.position == 0}
        k = layout.within[self.entry[wide]] - np.array([first[s] for s in slot.tolist()], dtype=np.int64)
        beside[number, k] = source
        goes_on = spec.fork[spec.row[wide]] != spec.station[wide]  # a row that forks there reads a constant
        read_by[number[goes_on], source[goes_on]] = k[goes_on]
        return {"beside": beside, "read_by": read_by}


def _shifted(by: Ints, count: Ints) -> Ints:
    """Return 0, 1, 2 and so on, each group shifted by its own amount.  # [groups] each → [sum of counts]"""
    shift = np.repeat(by, count)
    return np.arange(len(shift)) + shift


def _seen_before(part: Ints) -> Bools:
    """Return whether each number occurs earlier in the array.  # [E] → [E]"""
    number, first = np.arange(len(part)), np.zeros(int(part.max(initial=-1)) + 1, dtype=np.int64)
    first[part[::-1]] = number[::-1]
    return first[part] != number
