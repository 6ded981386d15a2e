"""The architecture of a population: what runs at each segment and at each slot, for any rows of weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from esper.foundation.streams import rekeyed
from esper.lifecycle.actions import NUM_BLUEPRINTS, Blend, Blueprint, selectable_blueprints
from esper.population.blueprints import Gate, build_blueprint
from esper.population.config import PopulationConfig
from esper.population.hosts import GlobalMean, Host
from esper.population.layout import flatten
from esper.population.plan import Plan, SlotView, SlotWork
from esper.population.row_module import Buffers, RowModule


@dataclass(frozen=True)
class SlotBodies:
    """What can live in one slot: every blueprint at the joint's width, and the gate of GATE."""

    seeds: dict[int, RowModule]  # by blueprint
    gate: RowModule

    @cached_property
    def gate_start(self) -> int:
        """A seed's row holds the blueprint's parameters from 0 and the gate's from here."""
        return max(seed.layout.total for seed in self.seeds.values())

    @property
    def width(self) -> int:
        return self.gate_start + self.gate.layout.total


def convolution_way(chosen: str, device: torch.device, compiled: bool = False) -> str:
    """How convolutions run over rows: as chosen, or the fastest that the device has.

    The number of groups is a constant of a compiled graph, so grouped ones would be traced anew for every
    number of rows: what is compiled for a CPU runs as products.
    """
    if chosen == "auto":
        on_gpu = "fused" if find_spec("triton") else "product"
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
        way = convolution_way(config.convolution, device, config.compile)

        def rows(module: nn.Module) -> RowModule:
            return RowModule(module, device, way, config.compile)

        host = make_host()
        self.host = host
        self.make_host = make_host
        self.device = device
        self.fused = way == "fused"
        self.halved = config.precision == "bfloat16"
        self.channels_last = host.topology == "cnn" and self.fused
        self.pools = isinstance(host.head, nn.Sequential) and isinstance(host.head[0], GlobalMean)
        self.membership = cache(self._membership)
        self.segments = [rows(module) for module in (*host.segments, host.head)]
        shared: dict[int, SlotBodies] = {}
        for width in host.widths:
            if width not in shared:
                names = sorted(selectable_blueprints(host.topology))
                shared[width] = SlotBodies(
                    seeds={
                        int(b): rows(build_blueprint(b, host.topology, width, host.spatial_dims))
                        for b in names
                    },
                    gate=rows(Gate(width, host.topology)),
                )
        self.slots = [shared[width] for width in host.widths]
        self.host_sizes = [segment.layout.total for segment in self.segments]
        self.seed_width = max(slot.width for slot in self.slots)

    @property
    def in_row_form(self) -> bool:
        """Whether every module takes rows itself, with nothing left to vmap."""
        seeds = [body for slot in self.slots for body in (*slot.seeds.values(), slot.gate)]
        return all(body.in_row_form for body in (*self.segments, *seeds))

    @property
    def draws(self) -> bool:
        """Whether the host has dropout."""
        return any(segment.draws for segment in self.segments)

    @property
    def host_width(self) -> int:
        return sum(self.host_sizes)

    def parameter_table(self) -> Tensor:
        """Parameters of a seed by slot and blueprint.  # [S, blueprints]"""
        table = torch.zeros(len(self.slots), NUM_BLUEPRINTS, dtype=torch.long)
        for s, slot in enumerate(self.slots):
            for b, seed in slot.seeds.items():
                table[s, b] = seed.layout.total
        return table

    def gate_parameters(self) -> Tensor:
        """Parameters of a gate by slot.  # [S]"""
        return torch.tensor([slot.gate.layout.total for slot in self.slots])

    def check_blueprints(self, view: SlotView) -> None:
        """Refuse a seed that trains or is heard and has no body at its slot."""
        met = view.training | (view.alpha > 0)
        for s, slot in enumerate(self.slots):
            unknown = met[:, s] & ~np.isin(view.blueprint[:, s], list(slot.seeds))
            if unknown.any():
                member = int(unknown.argmax())
                allowed = ", ".join(Blueprint(b).name for b in slot.seeds)
                raise ValueError(
                    f"member {member} has blueprint {int(view.blueprint[member, s])} in slot {s}; "
                    f"allowed in a {self.host.topology} host are {allowed}"
                )

    def _membership(self, slot: int, blueprint: int) -> Tensor:
        """Which of its tensors each element of a seed's row belongs to.  # [seed_width, most tensors]"""
        own = self.slots[slot].seeds[blueprint].layout.membership()
        most = max(len(seed.layout.names) or 1 for slot in self.slots for seed in slot.seeds.values())
        padded = torch.zeros(self.seed_width, most)
        padded[: own.shape[0], : own.shape[1]] = own
        return padded.to(self.device)

    def initial_host(self, seed: int) -> Tensor:
        """The flat weights of a newly made host.  # [P]"""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            fresh = self.make_host()
        return torch.cat([flatten(module) for module in (*fresh.segments, fresh.head)])

    def initial_seed(self, slot: int, blueprint: Blueprint, seed: int) -> Tensor:
        """The flat row of a newly made seed with its gate.  # [seed_width]"""
        width = self.host.widths[slot]
        row = torch.zeros(self.seed_width)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            body = flatten(build_blueprint(blueprint, self.host.topology, width, self.host.spatial_dims))
            gate = flatten(Gate(width, self.host.topology))
        row[: body.numel()] = body
        start = self.slots[slot].gate_start
        row[start : start + gate.numel()] = gate
        return row

    def initial_buffers(self, rows: int) -> list[Buffers]:
        return [segment.initial_buffers(rows, self.device) for segment in self.segments]

    def forward(
        self,
        plan: Plan,
        host: Tensor,
        seeds: Tensor,
        x: Tensor,
        buffers: list[Buffers],
        training: bool,
        keys: Tensor | None = None,
    ) -> Tensor:
        """The one forward pass: training, validation, ablation and shadow rows alike.

        host [R, P], seeds: the seed of each entry of the plan, slot by slot [entries, seed_width], x: the
        members' own inputs [own, B, ...]; other rows join where they fork; keys [R] what dropout draws from.
        → [R, B, ...]
        """
        *parts, head = host.split(self.host_sizes, dim=1)
        met = self._lowered(seeds).split([work.rows.shape[0] for work in plan.slots])
        x = self._lowered(x)
        for k, work in enumerate(plan.slots):
            x = self._segment(k, parts[k], x, buffers[k], training, keys)
            if work.groups:
                x, taken = self._take(x, work)
                x = self._blend(x, self._delta(k, work, met[k], taken, training), work)
        return self._segment(-1, head, self._pooled(x), buffers[-1], training, keys)

    def _lowered(self, x: Tensor) -> Tensor:
        """In the precision of activations and products; indices stay what they are."""
        return x.bfloat16() if self.halved and x.is_floating_point() else x

    def _pooled(self, x: Tensor) -> Tensor:
        """The mean over space ahead of a head that begins with it, so that little is cast and turned."""
        if not (self.channels_last and self.pools):
            return x
        last = self._as_stored(x)
        return self._as_seen(last.mean(dim=tuple(range(2, last.ndim - 1)), keepdim=True))

    def _segment(
        self, k: int, rows: Tensor, x: Tensor, buffers: Buffers, training: bool, keys: Tensor | None
    ) -> Tensor:
        """One segment, or the head, for the rows that have come so far.

        The head, and a segment with running statistics, runs in the precision of its weights.
        """
        there = x.shape[0]
        exact = k == -1 or any(value.is_floating_point() for value in buffers.values())
        rows = rows if exact else self._lowered(rows)
        x = x.to(rows.dtype) if exact and x.is_floating_point() else x
        held = {name: value[:there] for name, value in buffers.items()}
        drawn = rekeyed(keys[:there], k % len(self.segments)) if keys is not None else None
        out = self.segments[k](rows[:there], x, held, training, drawn)
        return out if k == -1 else self._lowered(out)

    def _delta(self, k: int, work: SlotWork, rows: Tensor, h: Tensor, training: bool) -> Tensor:
        """What the seeds of a slot say to the activations h that they meet, at full strength.

        Blueprints run group by group, blends for all entries at once.  # rows [E, P], h → [E, B, ...]
        """
        slot, sizes = self.slots[k], [group.size for group in work.groups]
        groups = zip(work.groups, rows.split(sizes), h.split(sizes), strict=True)
        said = [slot.seeds[group.blueprint](own, met, {}, training) for group, own, met in groups]
        delta = s = self._as_seen(torch.cat([self._as_stored(part) for part in said]))
        per_row = (-1, *[1] * (h.ndim - 1))
        if Blend.GATE in work.blends:
            gate = slot.gate(rows[:, slot.gate_start :], h, {}, training)
            delta = torch.where((work.blend == Blend.GATE).view(per_row), gate * s, delta)
        if Blend.MULTIPLY in work.blends:
            delta = torch.where((work.blend == Blend.MULTIPLY).view(per_row), h * torch.tanh(s), delta)
        return delta

    def _take(self, x: Tensor, work: SlotWork) -> tuple[Tensor, Tensor]:
        """The rows that go on, and the activations that meet a seed.

        A row that forks here takes its member's activation as a constant: what it trains lies behind it.
        """
        if not self.fused:
            if work.after > work.before:
                x = torch.cat([x, x.detach().index_select(0, work.base[work.before :])])
            kept, met = _TakeRows.apply(x, work.rows)  # type: ignore[no-untyped-call]
            return kept, met
        from esper.population.kernels import TakeRows

        stored, taken = TakeRows.apply(self._as_stored(x), work.source, work.entry[: work.before])  # type: ignore[no-untyped-call]
        return self._as_seen(stored), self._as_seen(taken)

    def _blend(self, x: Tensor, delta: Tensor, work: SlotWork) -> Tensor:
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


class _TakeRows(torch.autograd.Function):
    """x and x[rows], no row twice. Going back adds whole rows, where a plain index scatters elements."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(rows)
        return x, x.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, taken: Tensor) -> tuple[Tensor, None]:
        return grad.index_add(0, ctx.saved_tensors[0], taken), None


class _SeedRows(torch.autograd.Function):
    """live[seed]; what comes back to a live seed is that of the entry where it learns alone."""

    @staticmethod
    def forward(ctx: Any, live: Tensor, seed: Tensor, learns: Tensor) -> Tensor:
        ctx.save_for_backward(learns)
        return live.index_select(0, seed)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad.index_select(0, ctx.saved_tensors[0]), None, None


def seed_rows(plan: Plan, live: Tensor) -> Tensor:
    """The weights that each entry of the plan meets, constants where they are only heard.

    live [L, P] → [entries, P]
    """
    rows: Tensor = _SeedRows.apply(live, plan.seed, plan.learns)  # type: ignore[no-untyped-call]
    return rows
