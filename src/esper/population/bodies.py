"""The architecture of a population: what runs at each segment and at each slot, for any rows of weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, cached_property

import numpy as np
import torch
from torch import Tensor, nn

from esper.lifecycle.actions import NUM_BLUEPRINTS, Blend, Blueprint
from esper.population.blueprints import BlendGate
from esper.population.config import PopulationConfig
from esper.population.forms import HALVES, NO_FORM, FormCodes, SlotForms
from esper.population.hosts import Entered, GlobalMean, Host, block_of
from esper.population.layout import flatten
from esper.population.optimizer import has_triton
from esper.population.plan import Bools, Ints, Plan, SlotView, Station
from esper.population.row_gathers import ReadRows, TakeWholeRows
from esper.population.row_module import RowModule


def convolution_method(chosen: str, device: torch.device, compiled: bool = False) -> str:
    """How convolutions run over rows: as chosen, or the fastest that the device has.

    The number of groups is a constant of a compiled graph, so grouped ones would be traced anew for every
    number of rows: what is compiled for a CPU runs as products.
    """
    if chosen == "auto":
        on_gpu = "fused" if has_triton() else "product"
        on_cpu = "product" if compiled else "grouped"
        return on_gpu if device.type == "cuda" else on_cpu
    if chosen == "fused" and device.type != "cuda":
        raise ValueError(
            f"population.convolution is fused, which needs a GPU, but the device is {device}; use auto"
        )
    return chosen


class Bodies:
    """Segments, slots and head, run with weights that come in as rows."""

    def __init__(self, make_host: Callable[[], Host], config: PopulationConfig, device: torch.device):
        method = convolution_method(config.convolution, device, config.compile)
        self.slots: list[SlotForms] = []

        def rows(module: nn.Module) -> RowModule:
            return RowModule(module, device, method, config.compile)

        host = make_host()
        self.host = host
        self.make_host = make_host
        self.device = device
        self.fused = method == "fused"
        self.halved = config.precision == "bfloat16"
        self.channels_last = host.topology == "cnn" and self.fused
        self.pools = isinstance(host.head, nn.Sequential) and isinstance(host.head[0], GlobalMean)
        self.membership = cache(self._membership)
        self.trunk = [None if part is None else rows(part) for part in trunk_of(host)]
        self.codes = FormCodes(1 + 2 * (config.widest - 1))
        shared: dict[str, SlotForms] = {}
        for k, segment in enumerate(host.segments):
            ahead = host.segments[k - 1] if host.repeats[k] > 1 else None
            kind = f"{host.widths[k]} {block_of(segment)} {host.repeats[k]} {ahead and block_of(ahead)}"
            if kind not in shared:
                shared[kind] = SlotForms(host, k, rows, self.codes)
            self.slots.append(shared[kind])
        self.trunk_sizes = [0 if part is None else part.layout.total for part in self.trunk]
        self.part_width = max(slot.width for slot in self.slots)
        self.has_blocks = any(slot.branch is not None for slot in self.slots)
        self.host_parameters = host.num_parameters  # its blocks included

    @property
    def in_row_form(self) -> bool:
        """Whether every module takes rows itself, with nothing left to vmap."""
        parts = [slot.body(form) for slot in set(self.slots) for form in slot.forms]
        trunk = [part for part in (*self.trunk, *(slot.gate for slot in self.slots)) if part is not None]
        return all(body.in_row_form for body in parts) and all(body.in_row_form for body in trunk)

    @property
    def host_width(self) -> int:
        """How many parameters a member's host row has: all of the host but its residual blocks."""
        return sum(self.trunk_sizes)

    @cached_property
    def parameter_table(self) -> Tensor:
        """Parameters by slot and form; under CLONE those of the host's own block, repeated.  # [S, forms]"""
        table = torch.zeros(len(self.slots), self.codes.total, dtype=torch.long)
        for s, slot in enumerate(self.slots):
            for form in slot.forms:
                table[s, form] = slot.body(form).parameters
            if Blueprint.CLONE in slot.blueprints:
                table[s, Blueprint.CLONE] = slot.body(slot.first_clone).parameters
        return table

    def seed_parameters(self) -> Tensor:
        """Parameters of a seed by slot and blueprint; a clone's are those of what it repeats in a bare host.

        # [S, blueprints]
        """
        return self.by_blueprint(self.parameter_table)

    def by_blueprint(self, table: Tensor) -> Tensor:
        """A table of forms as one of blueprints, a clone being what it repeats in a bare host.

        # [S, forms] → [S, blueprints]
        """
        found = table[:, :NUM_BLUEPRINTS].clone()
        for s, slot in enumerate(self.slots):
            found[s, Blueprint.CLONE] = table[s, self.codes.block if slot.repeats == 1 else self.codes.pair]
        return found

    def gate_parameters(self) -> Tensor:
        """Parameters of a gate by slot.  # [S]"""
        return torch.tensor([slot.gate.layout.total for slot in self.slots])

    def check_forms(self, view: SlotView, born: Ints) -> None:
        """Refuse a seed that is born, trains or is heard and has no body at its slot.

        born [N, S]: the blueprints of seeds that wait for weights, NO_FORM elsewhere
        """
        slot = np.arange(len(self.slots))
        forms, blueprints = self._known
        met = (born != NO_FORM) | view.training | (view.alpha > 0)
        strange = ~blueprints[slot, born]
        unknown = strange | (met & ~forms[slot, view.form[:, :, 0]])
        if not unknown.any():
            return
        member, s = (int(axis[0]) for axis in np.nonzero(unknown))
        name = int(np.where(strange, born, view.form[:, :, 0])[member, s])
        allowed = ", ".join(b.name for b in self.slots[s].blueprints)
        given = Blueprint(name).name if name in tuple(Blueprint) else "no seed that fits"
        raise ValueError(
            f"member {member} has {given} in slot {s}; the blueprints of this {self.host.topology} "
            f"host there are {allowed}: germinate one of them"
        )

    @cached_property
    def _known(self) -> tuple[Bools, Bools]:
        """The forms that can stand at each slot, and what can be born there.  # [S, forms, then NO_FORM]"""
        forms, blueprints = np.zeros((2, len(self.slots), self.codes.total + 1), dtype=bool)
        blueprints[:, NO_FORM] = True
        for s, slot in enumerate(self.slots):
            forms[s, list(slot.forms)] = True
            blueprints[s, list(slot.blueprints)] = True
        return forms, blueprints

    def _membership(self, slot: int, form: int) -> tuple[Tensor, Tensor]:
        """Which of its tensors each element of a part's row belongs to, and how many tensors and parameters
        it has, at least 1.  # [part_width, most tensors], [2]"""
        most = max(len(s.body(f).spans()) or 1 for s in self.slots for f in s.forms)
        table, body = torch.zeros(self.part_width, most), self.slots[slot].body(form)
        for tensor, (start, stop) in enumerate(body.spans()):
            table[start:stop, tensor] = 1.0
        numbers = torch.tensor([len(body.spans()) or 1.0, body.parameters or 1.0])
        return table.to(self.device), numbers.to(self.device)

    def initial_host(self, seed: int) -> tuple[Tensor, Tensor]:
        """The flat weights of a newly made host, and of its blocks.  # [P], [S, part_width]"""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            fresh = self.make_host()
        blocks = torch.zeros(len(self.slots), self.part_width)
        for s, segment in enumerate(fresh.segments):
            block = block_of(segment)
            row = torch.zeros(0) if block is None else flatten(block.branch)
            blocks[s, : row.numel()] = row
        return torch.cat([flatten(part) for part in trunk_of(fresh) if part is not None]), blocks

    def initial_seed(self, slot: int, blueprint: Blueprint, seed: int) -> Tensor:
        """The flat row of a newly made seed with its gate.  # [part_width]"""
        forms = self.slots[slot]
        row = torch.zeros(self.part_width)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            body = flatten(forms.module(int(blueprint)))
            gate = flatten(BlendGate(self.host.widths[slot], self.host.topology))
        row[: body.numel()] = body
        row[forms.gate_start : forms.gate_start + gate.numel()] = gate
        return row

    def forward(self, plan: Plan, host: Tensor, parts: Tensor, x: Tensor) -> Tensor:
        """The one forward pass: training, validation, ablation and shadow rows alike.

        host [R, P], parts: the weights that each entry of the plan meets, station by station [entries,
        part_width], x: the members' own inputs [own, B, ...]; other rows join where they fork.
        → [R, B, ...]
        """
        *trunk, head = host.split(self.trunk_sizes, dim=1)
        sizes = [station.rows.shape[0] for slot in plan.stations for station in slot]
        met = iter(self.lowered(parts).split(sizes))
        x = self.lowered(x)
        for k, stations in enumerate(plan.stations):
            x = self._segment(k, trunk[k], x)
            beside = None  # what the blocks were given that widenings of this slot run beside
            for work in stations:
                x, beside = self._read(work, x, beside)
                x = self._meet(work, next(met), x, beside)
        return self._segment(-1, head, self._pooled(x))

    def _read(self, work: Station, x: Tensor, beside: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The rows as they were, and with what a block here is given for those who read it.  # [W, B, ...]"""
        if not work.beside.shape[0]:
            return x, beside
        stored = self._as_stored(x)
        before = stored.new_zeros(work.beside.shape[0], *stored.shape[1:]) if beside is None else beside
        kept, read = ReadRows.apply(stored, before, work.beside, work.read_by)  # type: ignore[no-untyped-call]
        return self._as_seen(kept), read

    def _meet(self, work: Station, rows: Tensor, x: Tensor, beside: Tensor | None) -> Tensor:
        """The rows behind a station.  # rows [E, P], beside [W, B, ...] as stored"""
        forms = self.slots[work.slot]
        if work.whole:
            (group,) = work.groups
            return x + forms.body(group.form)(rows, x)
        x, taken = self._take(x, work)
        wider = work.span(min(HALVES), max(HALVES) + 1)
        if work.place == 0 and beside is not None and wider.stop > wider.start:
            sizes = [wider.start, beside.shape[0], taken.shape[0] - wider.stop]
            first, _, last = self._as_stored(taken).split(sizes)
            taken = self._as_seen(torch.cat([first, beside, last]))
        return self._blend(x, self._delta(forms, work, rows, taken), work)

    def lowered(self, x: Tensor) -> Tensor:
        """In the precision of activations and products; indices stay what they are."""
        return x.bfloat16() if self.halved and x.is_floating_point() else x

    def _pooled(self, x: Tensor) -> Tensor:
        """The mean over space ahead of a head that begins with it, so that little is cast and turned."""
        if not (self.channels_last and self.pools):
            return x
        last = self._as_stored(x)
        return self._as_seen(last.mean(dim=tuple(range(2, last.ndim - 1)), keepdim=True))

    def _segment(self, k: int, rows: Tensor, x: Tensor) -> Tensor:
        """One segment but for its block, or the head, for the rows that have come so far.

        The head runs in the precision of its weights.
        """
        module = self.trunk[k]
        if module is None:
            return x
        there, is_head = x.shape[0], k == -1
        rows = rows if is_head else self.lowered(rows)
        x = x.to(rows.dtype) if is_head and x.is_floating_point() else x
        out = module(rows[:there], x)
        return out if is_head else self.lowered(out)

    def _delta(self, forms: SlotForms, work: Station, rows: Tensor, h: Tensor) -> Tensor:
        """What the parts of a station say to the activations h that they meet, at full strength.

        Forms run group by group, blends for all entries at once.  # rows [E, P], h → [E, B, ...]
        """
        sizes = [group.size for group in work.groups]
        groups = zip(work.groups, rows.split(sizes), self._as_stored(h).split(sizes), strict=True)
        said = [forms.body(group.form)(own, self._as_seen(met)) for group, own, met in groups]
        s = self._as_seen(torch.cat([self._as_stored(part) for part in said]))
        if work.blends <= {Blend.ADD}:
            return s
        gated = Blend.GATE in work.blends
        gate = forms.gate(rows[:, forms.gate_start :], h) if gated else None
        if self.fused:
            from esper.population.kernels import JoinParts

            joined: Tensor = JoinParts.apply(self._as_stored(s), self._as_stored(h), gate, work)  # type: ignore[no-untyped-call]
            return self._as_seen(joined)
        delta, per_row = s, (-1, *[1] * (h.ndim - 1))
        if gate is not None:
            delta = torch.where((work.blend == Blend.GATE).view(per_row), gate * s, delta)
        if Blend.MULTIPLY in work.blends:
            delta = torch.where((work.blend == Blend.MULTIPLY).view(per_row), h * torch.tanh(s), delta)
        return delta

    def _joined(self, x: Tensor, work: Station) -> Tensor:
        """The rows that go on; one that forks here takes its member's activation as a constant."""
        if work.after == work.before:
            return x
        return torch.cat([x, x.detach().index_select(0, work.base[work.before :])])

    def _take(self, x: Tensor, work: Station) -> tuple[Tensor, Tensor]:
        """The rows that go on, and the activations that meet a seed.

        A row that forks here takes its member's activation as a constant: what it trains lies behind it.
        """
        if not self.fused:
            kept, met = TakeWholeRows.apply(self._joined(x, work), work.rows)  # type: ignore[no-untyped-call]
            return kept, met
        from esper.population.kernels import TakeRows

        stored, taken = TakeRows.apply(self._as_stored(x), work.source, work.entry[: work.before])  # type: ignore[no-untyped-call]
        return self._as_seen(stored), self._as_seen(taken)

    def _blend(self, x: Tensor, delta: Tensor, work: Station) -> Tensor:
        """The rows with what the seeds said, each at its alpha.  # [after, B, ...]"""
        if not self.fused:
            strength = work.alpha.to(x.dtype).view(-1, *[1] * (x.ndim - 1))
            return x.index_add(0, work.rows, strength * delta)
        from esper.population.kernels import BlendRows

        blended: Tensor = BlendRows.apply(self._as_stored(x), self._as_stored(delta), work)  # type: ignore[no-untyped-call]
        return self._as_seen(blended)

    # On a GPU the channels of images and signals lie last in memory.

    def _as_stored(self, x: Tensor) -> Tensor:
        return x.movedim(2, -1) if self.channels_last else x

    def _as_seen(self, x: Tensor) -> Tensor:
        return x.movedim(-1, 2) if self.channels_last else x


def trunk_of(host: Host) -> list[nn.Module | None]:
    """The segments of a host without their residual blocks, None where nothing is left, and the head."""
    left = [
        segment if block_of(segment) is None else segment[0] if isinstance(segment, Entered) else None
        for segment in host.segments
    ]
    return [*left, host.head]
