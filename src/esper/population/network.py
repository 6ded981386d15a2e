"""The architecture of a population: what runs at each segment and each slot, for any rows of weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache, cached_property, partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from esper.lifecycle.actions import FIRST_GROWTH, NUM_BLUEPRINTS, Blend, Blueprint
from esper.population.blueprints import BlendGate
from esper.population.config import PopulationConfig
from esper.population.forms import FormCodes, SlotForms
from esper.population.gather import AddToRows, ReadRows
from esper.population.hosts import EntrySegment, Host, block_of
from esper.population.optimizer import has_triton
from esper.population.plan.packing import Group, Plan, Station, widened_span
from esper.population.row_module import RowModule, flatten
from esper.utils.graphs import run_beside

MOST_BESIDE = 2**25  # elements of a station's entries up to which its groups run beside each other


def convolution_method(device: torch.device) -> str:
    """Return how convolutions run over rows on this device, see `row_layers`."""
    return "fused" if device.type == "cuda" and has_triton() else "grouped"


class StationWeights(NamedTuple):
    """The weights of the entries of a station."""

    groups: Sequence[Tensor]  # of each group: [G, P or more], of which the body uses the first columns
    gates: Tensor | None  # [E, gate's] of all entries, where an entry has one; else None


class _SplitParts(torch.autograd.Function):
    """Views of the rows of each group, and of the gates of some stations, of all groups together.

    Slices of their own would make zeros for all columns and add to them, for each group and its gate.
    """

    @staticmethod
    def forward(
        ctx: Any, parts: Tensor, sizes: list[int], gates: list[tuple[slice, slice]]
    ) -> tuple[Tensor, ...]:
        ctx.sizes, ctx.gates = [*sizes, len(parts) - sum(sizes)], gates
        *groups, _ = parts.split(ctx.sizes)
        return *groups, *[parts[entries, columns] for entries, columns in gates]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        groups, rest = grads[: len(ctx.sizes) - 1], ctx.sizes[-1]
        whole = torch.cat([*groups, groups[0].new_zeros(rest, groups[0].shape[1])])
        for (entries, columns), grad in zip(ctx.gates, grads[len(groups) :], strict=True):
            whole[entries, columns] += grad
        return whole, None, None


class RowNetwork:
    """Segments, slots and head, run with weights that come in as rows."""

    def __init__(self, make_host: Callable[[], Host], config: PopulationConfig, device: torch.device):
        method = convolution_method(device)

        def rows(module: nn.Module) -> RowModule:
            return RowModule(module, device, method)

        self.host = host = make_host()
        self.make_host = make_host
        self.device = device
        self.bfloat16 = config.precision == "bfloat16"
        self.channels_last = host.topology == "cnn" and method == "fused"
        self.membership = cache(self._membership)
        self.trunk = [None if module is None else rows(module) for module in trunk_of(host)]
        self.codes = FormCodes(1 + 2 * (config.widest - 1))
        self.slots: list[SlotForms] = []
        shared: dict[str, SlotForms] = {}  # slots with the same architectures share their modules
        for k, segment in enumerate(host.segments):
            ahead = host.segments[k - 1] if host.repeats[k] > 1 else None
            # The text of a module names all of its layers and sizes: equal text is an equal architecture.
            kind = f"{host.widths[k]} {block_of(segment)} {host.repeats[k]} {ahead and block_of(ahead)}"
            if kind not in shared:
                shared[kind] = SlotForms(host, k, rows, self.codes)
            self.slots.append(shared[kind])
        self.trunk_sizes = [0 if module is None else module.layout.total for module in self.trunk]
        self.host_width = sum(self.trunk_sizes)  # parameters of the host but for its residual blocks
        self.part_width = max(slot.width for slot in self.slots)
        self.has_blocks = any(slot.branch is not None for slot in self.slots)
        self.host_parameters = host.num_parameters  # its blocks included

    @property
    def in_row_form(self) -> bool:
        """Whether every module takes rows itself, with nothing left to vmap."""
        bodies = [slot.body(form) for slot in set(self.slots) for form in slot.forms]
        gates = [slot.gate for slot in self.slots]
        return all(module is None or module.in_row_form for module in (*self.trunk, *gates, *bodies))

    # ---- sizes ----

    @cached_property
    def parameter_table(self) -> Tensor:
        """Parameters by slot and form.  # [S, forms]"""
        table = torch.zeros(len(self.slots), self.codes.total, dtype=torch.long)
        for s, slot in enumerate(self.slots):
            for form in slot.forms:
                table[s, form] = slot.body(form).parameters
        return table

    def seed_parameters(self) -> Tensor:
        """Return the parameters of a seed by slot and blueprint.  # [S, blueprints]

        CLONE is what it repeats in a host without growth.
        """
        table = self.parameter_table[:, :NUM_BLUEPRINTS].clone()
        for s, slot in enumerate(self.slots):
            repeated = self.codes.block if slot.repeats == 1 else self.codes.pair
            table[s, Blueprint.CLONE] = self.parameter_table[s, repeated]
        return table

    def gate_parameters(self) -> Tensor:
        """Return the parameters of a gate by slot.  # [S]"""
        return torch.tensor([slot.gate.layout.total for slot in self.slots])

    def _membership(self, slot: int, form: int) -> tuple[Tensor, Tensor]:
        """Return which tensor each element of a row of this form belongs to, one-hot, and the number of its
        tensors, at least 1.  # [part_width, most tensors], []"""
        most = max(len(s.body(f).spans()) or 1 for s in self.slots for f in s.forms)
        table, body = torch.zeros(self.part_width, most), self.slots[slot].body(form)
        for tensor, (start, stop) in enumerate(body.spans()):
            table[start:stop, tensor] = 1.0
        return table.to(self.device), torch.tensor(len(body.spans()) or 1.0).to(self.device)

    def columns(self, group: Group) -> tuple[slice, slice]:
        """Return which columns of a part the body and the gate of a group use; what grows has no gate."""
        forms = self.slots[group.slot]
        gate = 0 if group.form >= FIRST_GROWTH else forms.gate.layout.total
        return slice(0, forms.body(group.form).width), slice(forms.gate_start, forms.gate_start + gate)

    def used_width(self, plan: Plan) -> int:
        """Return how many columns of the parts a plan uses, up to a multiple of 8 where there are as many.

        The widest form may have many more. Products are faster where every row begins at 16 bytes.
        """
        used = max((span.stop for group in plan.groups for span in self.columns(group)), default=0)
        return min(-(-used // 8) * 8, self.part_width)

    # ---- initial weights ----

    def initial_host(self, seed: int) -> tuple[Tensor, Tensor]:
        """Return the flat weights of a newly made host, and those of its blocks.  # [P], [S, part_width]"""
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)  # a thousandth of torch.manual_seed's time
            fresh = self.make_host()
        blocks = torch.zeros(len(self.slots), self.part_width)
        for s, segment in enumerate(fresh.segments):
            block = block_of(segment)
            row = torch.zeros(0) if block is None else flatten(block.branch)
            blocks[s, : row.numel()] = row
        return torch.cat([flatten(module) for module in trunk_of(fresh) if module is not None]), blocks

    def initial_seed(self, slot: int, blueprint: Blueprint, seed: int) -> Tensor:
        """Return the flat row of a newly made seed with its gate.  # [part_width]"""
        forms = self.slots[slot]
        row = torch.zeros(self.part_width)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            body = flatten(forms.module(int(blueprint)))
            gate = flatten(BlendGate(self.host.widths[slot], self.host.spatial_dims))
        row[: body.numel()] = body
        row[forms.gate_start : forms.gate_start + gate.numel()] = gate
        return row

    # ---- the forward pass ----

    def split_parts(self, plan: Plan, parts: Tensor) -> list[StationWeights]:
        """Return the weights of each station; rows behind those of the last are left out.

        parts [entries or more, part_width]
        """
        stations, gates = _stations_of(plan), []
        for station in stations:
            if Blend.GATE in station.blends:
                forms = self.slots[station.slot]
                gate = slice(forms.gate_start, forms.gate_start + forms.gate.layout.total)
                gates.append((station.span, gate))
        sizes = [group.size for group in plan.groups]
        pieces = iter(_SplitParts.apply(self.cast(parts), sizes, gates) if sizes else ())  # type: ignore[no-untyped-call]
        groups = [[next(pieces) for _ in station.groups] for station in stations]
        return [
            StationWeights(own, next(pieces) if Blend.GATE in station.blends else None)
            for station, own in zip(stations, groups, strict=True)
        ]

    def join_groups(self, plan: Plan, groups: Iterable[Tensor]) -> list[StationWeights]:
        """Return the weights of each station out of those of each group: [G, body and gate] each."""
        rows, found = map(self.cast, groups), []
        for station in _stations_of(plan):
            own, gates = [next(rows) for _ in station.groups], None
            if Blend.GATE in station.blends:
                size = self.slots[station.slot].gate.layout.total
                pairs = zip(own, station.groups, strict=True)
                each = [part[:, self.columns(group)[0].stop :] for part, group in pairs]
                gates = torch.cat([F.pad(gate, (0, size - gate.shape[1])) for gate in each])
            found.append(StationWeights(own, gates))
        return found

    def gather_parts(self, plan: Plan, parts: Tensor) -> list[StationWeights]:
        """Return the weights of each station out of those of all parts.  # parts [all parts, part_width]"""
        index = plan.live.index_select(0, plan.live_index)
        if parts.device.type != "cpu":
            return self.split_parts(plan, parts[:, : self.used_width(plan)].index_select(0, index))
        found = []
        for group, own in zip(plan.groups, index.split([group.size for group in plan.groups]), strict=True):
            pieces = [parts[:, span].index_select(0, own) for span in self.columns(group)]
            found.append(torch.cat(pieces, dim=1))
        return self.join_groups(plan, found)

    def forward(self, plan: Plan, host: Tensor, parts: Sequence[StationWeights], x: Tensor) -> Tensor:
        """Run the forward pass of training, validation, ablation and shadow rows alike.

        host [R, P]; parts: the weights of each station of the plan; x [own, B, ...]: the members' own inputs,
        other rows start where they fork → [R, B, ...]
        """
        *trunk, head = host.split(self.trunk_sizes, dim=1)
        weights = iter(parts)
        x = self.cast(x)
        for k, stations in enumerate(plan.stations):
            x = self._run_segment(k, trunk[k], x)
            beside = None  # the inputs of the blocks that widenings of this slot run beside
            for station in stations:
                x, beside = self._read_beside(station, x, beside)
                x = self._run_station(station, next(weights), x, beside)
        return self._run_segment(-1, head, x)

    def cast(self, x: Tensor) -> Tensor:
        """Cast to the precision of activations and products; indices stay what they are."""
        return x.bfloat16() if self.bfloat16 and x.is_floating_point() else x

    def _run_segment(self, k: int, rows: Tensor, x: Tensor) -> Tensor:
        """Run a segment without its block, or the head (k = -1) in the precision of its weights."""
        module = self.trunk[k]
        if module is None:
            return x
        if k == -1:
            return module(rows, x.to(rows.dtype) if x.is_floating_point() else x)
        if rows.shape[0] > x.shape[0]:  # a slice of all rows would make zeros and add to them in the backward
            rows = rows[: x.shape[0]]
        return self.cast(module(self.cast(rows), x))

    def _read_beside(
        self, station: Station, x: Tensor, beside: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the rows, and `beside` with the inputs of this station's blocks.  # beside [W, B, ...]"""
        if not station.beside.shape[0]:
            return x, beside
        last = self._to_channels_last(x)
        kept, read = ReadRows.apply(last, beside, station.beside, station.read_by)  # type: ignore[no-untyped-call]
        return self._to_channels_first(kept), read

    def _run_station(
        self, station: Station, weights: StationWeights, x: Tensor, beside: Tensor | None
    ) -> Tensor:
        """Return the rows behind a station.  # beside [W, B, ...] with channels last"""
        forms = self.slots[station.slot]
        if station.whole:
            (group,) = station.groups
            body = forms.body(group.form)
            for start, module in zip(body.starts, body.modules, strict=True):
                x = module.add_to(weights.groups[0][:, start:], x)
            return x
        # h is what each entry reads; a widening reads what the block that it widens was given.
        x, h = self._take_entries(x, station)
        wider = widened_span(station.groups)
        if station.position == 0 and beside is not None and wider.stop > wider.start:
            sizes = [wider.start, beside.shape[0], h.shape[0] - wider.stop]
            first, _, last = self._to_channels_last(h).split(sizes)
            h = self._to_channels_first(torch.cat([first, beside, last]))
        return self._add_entries(x, self._part_outputs(forms, station, weights, h), h, weights, station)

    def _take_entries(self, x: Tensor, station: Station) -> tuple[Tensor, Tensor]:
        """Return the rows that go on, and the activation that each entry reads.

        A row that forks here takes its member's activation as a constant: it trains only what lies behind.
        """
        entry = station.entry[: station.before]
        kept, h = ReadRows.apply(self._to_channels_last(x), None, station.source, entry)  # type: ignore[no-untyped-call]
        return self._to_channels_first(kept), self._to_channels_first(h)

    def _part_outputs(self, forms: SlotForms, station: Station, weights: StationWeights, h: Tensor) -> Tensor:
        """Return what the bodies of a station make of the activations, group by group.  # h → [E, B, ...]"""
        inputs = _split_rows(self._to_channels_last(h), [group.size for group in station.groups])
        bodies = [
            partial(forms.body(group.form), rows, self._to_channels_first(own))
            for group, rows, own in zip(station.groups, weights.groups, inputs, strict=True)
        ]
        # The kernels of few entries do not fill a GPU; those of many do, and branches cost memory.
        small = h.numel() <= MOST_BESIDE
        outputs = run_beside(bodies, [h, *weights.groups]) if small else [body() for body in bodies]
        return self._to_channels_first(_join_rows([self._to_channels_last(out) for out in outputs]))

    def _add_entries(
        self, x: Tensor, s: Tensor, h: Tensor, weights: StationWeights, station: Station
    ) -> Tensor:
        """Return the rows with alpha · delta added, where s is what the bodies made of h.  # [after, B, ...]

        ADD: delta = s; GATE: gate(h) · s; MULTIPLY: h · tanh(s)
        """
        last, gates = self._to_channels_last, weights.gates
        if station.blends <= {Blend.ADD}:
            added = AddToRows.apply(last(x), last(s), station)  # type: ignore[no-untyped-call]
        elif x.is_cuda and has_triton():
            from esper.population import kernels

            pooled = self.host.spatial_dims > 0
            added = kernels.RowBlend.apply(last(x), last(s), last(h), gates, station, pooled)  # type: ignore[no-untyped-call]
        else:
            delta, per_row = s, (-1, *[1] * (s.ndim - 1))
            if gates is not None:
                gated = self.slots[station.slot].gate(gates, h) * s
                delta = torch.where((station.blend == Blend.GATE).view(per_row), gated, delta)
            if Blend.MULTIPLY in station.blends:
                scaled = h * torch.tanh(s)
                delta = torch.where((station.blend == Blend.MULTIPLY).view(per_row), scaled, delta)
            added = AddToRows.apply(last(x), last(delta), station)  # type: ignore[no-untyped-call]
        return self._to_channels_first(added)

    # On a GPU the channels of images and signals lie last in memory.

    def _to_channels_last(self, x: Tensor) -> Tensor:
        return x.movedim(2, -1) if self.channels_last else x

    def _to_channels_first(self, x: Tensor) -> Tensor:
        return x.movedim(-1, 2) if self.channels_last else x


def _stations_of(plan: Plan) -> list[Station]:
    return [station for slot in plan.stations for station in slot]


def _split_rows(x: Tensor, sizes: list[int]) -> Sequence[Tensor]:
    """Split along the first axis; torch joins what has more than four axes with a copy for each piece."""
    if x.ndim <= 4 or not x.is_contiguous():
        return x.split(sizes)
    return [piece.view(-1, *x.shape[1:]) for piece in x.flatten(1).split(sizes)]


def _join_rows(pieces: list[Tensor]) -> Tensor:
    """Join along the first axis, see `_split_rows`."""
    if pieces[0].ndim <= 4 or not all(piece.is_contiguous() for piece in pieces):
        return torch.cat(pieces)
    return torch.cat([piece.flatten(1) for piece in pieces]).view(-1, *pieces[0].shape[1:])


def trunk_of(host: Host) -> list[nn.Module | None]:
    """Return the segments of a host without their blocks, None where nothing is left, and the head."""
    left = [
        segment if block_of(segment) is None else segment[0] if isinstance(segment, EntrySegment) else None
        for segment in host.segments
    ]
    return [*left, host.head]
