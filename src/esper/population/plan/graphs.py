"""An epoch of training and a validation of many members, captured as CUDA graphs for a few buckets.

They work on tensors of their own whose addresses never change: weights are fetched at the beginning of an
epoch and written back at its end. A graph that was captured for a bucket serves every plan that fits it.

A new plan is padded to the bucket of a graph that exists, where one holds it and wastes little. Else a graph
is captured for a bucket with a margin, merged with that of the nearest graph, which it replaces: so buckets
converge to what a run needs. All graphs share one memory pool and one workspace, which are as large as the
largest of them needs. They are dropped when this process holds more than half of the device's memory.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from esper.population.config import PopulationConfig
from esper.population.data import MemberData
from esper.population.metrics import (
    TrainMetrics,
    ValidationMetrics,
    accuracy,
    cross_entropy,
    measure_seeds,
    worth_of_seeds,
)
from esper.population.network import RowNetwork, StationWeights
from esper.population.optimizer import RowWeights, learn_rows
from esper.population.plan.packing import LAUNCH_COST, Bucket, PackedPlan, Plan, PlanSpec
from esper.population.plan.rows import copy_to, to_device
from esper.utils.graphs import GraphPool, TensorGraph

MAX_GRAPHS = 24
MAX_MEMORY = 0.5  # graphs are dropped when this process holds more of the GPU's memory than this share
# Elements of a group's weights from which its parts are updated by themselves on a GPU, so that no kernel
# puts the gradients of all groups together: at four blocks of 64 perceptrons of 384 it took 0.3 of 8.8 ms.
LARGE_GROUP = 2**24
LONG_ROWS = 2**24  # elements of rows from which their norms are summed in two steps
WASTE = 1.25  # a bucket may cost this many times what one with a margin would,
SPARE_GROUPS = 20  # and so many launches more: with 10, every third epoch of 12 members needed a new graph

Run = TypeVar("Run")
Capture = Callable[[Callable[..., Any]], Callable[..., Any]]
Task = tuple[str, Hashable]  # what a graph computes, and over which data


@dataclass(frozen=True)
class PopulationState:
    """The network and the weights of all members; the weights are written in place by those who train."""

    network: RowNetwork
    config: PopulationConfig
    hosts: RowWeights  # N rows
    parts: RowWeights  # all parts, and one row at the end that belongs to no member


class Workspace:
    """Tensors by name. Graphs that never run at once share them."""

    def __init__(self) -> None:
        self._held: dict[str, Tensor] = {}

    def rows(
        self, name: str, count: int, width: int, device: torch.device, dtype: torch.dtype | None = None
    ) -> Tensor:
        """Return a tensor [count, width]; all of one name start at the same address."""
        size = count * width
        if name not in self._held or self._held[name].numel() < size:
            self._held[name] = torch.zeros(size, dtype=dtype, device=device)
        return self._held[name][:size].view(count, width)

    def weights(self, name: str, count: int, width: int, device: torch.device) -> RowWeights:
        """Return rows with their optimizer state."""
        weights, first, second = (self.rows(f"{name}.{k}", count, width, device) for k in range(3))
        return RowWeights(weights, first, second, self.rows(f"{name}.steps", count, 1, device).view(-1))


def _eager(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


@dataclass
class PartBlock:
    """Live parts that are stored and updated together."""

    lives: slice  # which of the live parts
    columns: list[tuple[slice, slice]]  # the columns here, and those of all parts that they stand for
    rows: RowWeights
    entries: Tensor  # the weights of its entries: those of the rows, and behind them the ones that run again
    held: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.long))  # which these are
    gaps: Tensor | None = None  # [lives, 2] the columns from and to which a part uses none
    half: Tensor | None = None  # the weights in bfloat16, where products are in it
    gradient: Tensor = field(default_factory=lambda: torch.zeros(0))  # of the latest minibatch


class TrainEpoch:
    """An epoch of n members under one plan: `load`, `begin`, `step` for each minibatch, `finish`.

    `capture` turns the functions of an epoch into ones that replay a CUDA graph.
    """

    def __init__(
        self,
        state: PopulationState,
        plan: Plan,
        data: MemberData,
        workspace: Workspace,
        capture: Capture = _eager,
    ) -> None:
        """data: of all members"""
        self.state, self.plan, self.data = state, plan, data
        network, config = state.network, state.config
        device = network.device
        # The weights of all rows: those of the members, which learn, and behind them copies for the shadows.
        self.host_rows = workspace.rows("hosts.0", len(plan.members), network.host_width, device)
        self.hosts = workspace.weights("hosts", plan.own, network.host_width, device)
        # Where no part runs again, held fixed, entries are the live parts in their order: nothing to gather.
        self.in_order = all(group.live == group.size for group in plan.groups)
        eager_on_cpu = device.type == "cpu" and capture is _eager
        self.by_group = eager_on_cpu or self._has_large_groups()
        halved = network.bfloat16 and not eager_on_cpu  # whether weights are kept in bfloat16 as well
        make_blocks = self._group_blocks if self.by_group else self._whole_block
        self.blocks = make_blocks(workspace, halved)
        batches, batch = config.batches_per_epoch, config.batch_size
        samples = workspace.rows("samples", batches, plan.own * batch, device, torch.long)
        self.samples = samples.view(batches, plan.own, batch)
        self.rates = workspace.rows("rates", batches, plan.own, device)
        self.batch = torch.zeros(1, dtype=torch.long, device=device)  # which minibatch of the epoch is next
        self.total_loss = torch.zeros(plan.num_rows, device=device)  # [R]
        # What follows from the plan alone, see `_begin`.
        self.is_seed, self.learning = torch.zeros(2, len(plan.live), dtype=torch.bool, device=device)
        self.place, self.peak = torch.zeros_like(plan.live), torch.zeros(len(plan.live), device=device)
        self.active = torch.zeros(plan.own, dtype=torch.bool, device=device)
        slots = plan.seed_of_slot.shape[1]
        positions = len(state.parts.steps) // (len(state.hosts.steps) * slots)
        self.table = torch.zeros(plan.own, (positions + 1) * slots, device=device)
        # Functions without arguments over fixed tensors: what a CUDA graph can hold.
        self.begin, self.step, self.finish = map(capture, (self._begin, self._step, self._finish))

    def _whole_block(self, workspace: Workspace, halved: bool) -> list[PartBlock]:
        """Return all live parts as one block, which one kernel updates."""
        plan, network, device = self.plan, self.state.network, self.plan.live.device
        lives, width = plan.live.shape[0], network.used_width(plan)
        rows, used = workspace.weights("parts", lives, width, device), slice(0, width)
        columns = [network.columns(group) for group in plan.groups for _ in range(group.live)]
        gaps = [(body.stop, gate.start if gate.stop > gate.start else width) for body, gate in columns]
        gaps += [(0, width)] * (lives - len(gaps))  # of padding
        found = torch.tensor(gaps, dtype=torch.long).view(lives, 2).to(device)
        half = workspace.rows("half", lives, width, device, torch.bfloat16) if halved else None
        return [PartBlock(slice(0, lives), [(used, used)], rows, rows.weights, gaps=found, half=half)]

    def _has_large_groups(self) -> bool:
        """Whether every group is large, and holds live parts alone whose rows begin at 16 bytes."""
        widths = [sum(c.stop - c.start for c in self.state.network.columns(g)) for g in self.plan.groups]
        sizes = [group.live * width for group, width in zip(self.plan.groups, widths, strict=True)]
        return self.in_order and min(sizes, default=0) >= LARGE_GROUP and all(w % 8 == 0 for w in widths)

    def _group_blocks(self, workspace: Workspace, halved: bool) -> list[PartBlock]:
        """Return a block for each group, as wide as its form: the widest form would mostly move zeros."""
        plan, network, blocks, entry, first = self.plan, self.state.network, [], 0, 0
        device = network.device
        for number, group in enumerate(plan.groups):
            body, gate = network.columns(group)
            width, name = body.stop + gate.stop - gate.start, f"group {number}"
            entries = workspace.weights(name, group.size, width, device)
            half = None
            if halved:
                half = workspace.rows(f"{name}.half", group.size, width, device, torch.bfloat16)
            # The parts that a group holds fixed are among those that learn in it.
            held = plan.live_index[entry + group.live : entry + group.size] - first
            pairs = [(body, body), (slice(body.stop, width), gate)]
            lives = slice(first, first + group.live)
            rows = entries.span(0, group.live)
            blocks.append(PartBlock(lives, pairs, rows, entries.weights, held, half=half))
            entry, first = entry + group.size, first + group.live
        return blocks

    def load(self, samples: Tensor, rates: Tensor) -> None:
        """Set what the members see, and how fast they learn from it.

        samples [batches, N, B]: indices; rates [batches, N]: shares of the peak learning rates
        """
        torch.index_select(samples, 1, self.plan.ids, out=self.samples)
        torch.index_select(rates, 1, self.plan.ids, out=self.rates)

    def _begin(self) -> None:
        """Fetch the weights, and read from the plan what stays the same for all minibatches."""
        plan, config, slots = self.plan, self.state.config, self.plan.seed_of_slot.shape[1]
        torch.ge(plan.live_slot, 0, out=self.is_seed)
        torch.ne(plan.learning, 0, out=self.learning)
        torch.ne(plan.active, 0, out=self.active)
        self.peak.fill_(config.host_lr).masked_fill_(self.is_seed, config.seed_lr)
        # Each part has a column of its own in a table, so that the order of the sum is always the same.
        column = plan.live // (len(self.state.hosts.steps) * slots) * slots + plan.live % slots
        torch.add(column, plan.live_member, alpha=self.table.shape[1], out=self.place)
        self.hosts.fetch(self.state.hosts, self.plan.ids)
        for block in self.blocks:
            for own, columns in block.columns:
                block.rows.columns(own).fetch(self.state.parts.columns(columns), self.plan.live[block.lives])
            if block.half is not None:
                block.half.copy_(block.rows.weights)
        self.total_loss.zero_()
        self.batch.zero_()

    def _finish(self) -> TrainMetrics:
        """Write the weights back and return the metrics of these members."""
        self.state.hosts.put(self.plan.ids, self.hosts)
        for block in self.blocks:
            for own, columns in block.columns:
                self.state.parts.columns(columns).put(self.plan.live[block.lives], block.rows.columns(own))
        mean = self.total_loss / self.state.config.batches_per_epoch
        gradients = [block.gradient for block in self.blocks]
        if not self.by_group:
            sizes = [group.live for group in self.plan.groups]
            gradients = [*gradients[0][: sum(sizes)].split(sizes)]
        seeds = measure_seeds(self.state.network, self.plan, gradients)
        return TrainMetrics(mean[: self.plan.own], seeds)

    def _step(self) -> None:
        """Train on the next minibatch."""
        config, plan = self.state.config, self.plan
        samples, rate = (held.index_select(0, self.batch)[0] for held in (self.samples, self.rates))
        inputs, targets = self.data.take(plan.ids, samples)
        losses, host_gradient = self._gradients(inputs, targets)
        host_gradient = host_gradient[: plan.own]
        self.total_loss.add_(losses)
        norms = torch.linalg.vector_norm(host_gradient, dim=1)
        if plan.live.shape[0]:
            each = [_row_norms(block.gradient, block.rows.weights.dtype) for block in self.blocks]
            own = each[0]
            if self.by_group:
                own = torch.cat(each)
                own = F.pad(own, (0, len(plan.live) - len(own)))
            norms, part_norms = self._norms(norms, own)
            part_rate = rate.index_select(0, plan.live_member) * self.peak
            for block in self.blocks:
                given = (part_norms[block.lives], part_rate[block.lives], self.learning[block.lives])
                learn_rows(block.rows, block.gradient, *given, config, block.gaps, block.half)
        learn_rows(self.hosts, host_gradient, norms, rate * config.host_lr, self.active, config)
        self.batch.add_(1)

    def _norms(self, trunk: Tensor, part: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradient norms to clip by.  # [n], [L] → [n], [L]

        That of a host is over all that was folded into it. That of a live part is its own if it is a seed,
        that of its host if it was folded in.
        """
        folded = part.square().masked_fill_(self.is_seed, 0.0)
        self.table.view(-1).zero_().scatter_(0, self.place, folded)
        host = (trunk.square() + self.table.sum(dim=1)).sqrt()
        return host, torch.where(self.is_seed, part, host.index_select(0, self.plan.live_member))

    def _gradients(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the losses of all rows and the gradients of their hosts.  # [R], [R, P]

        Those of the live parts are written to the blocks.
        """
        plan, network = self.plan, self.state.network
        shadow = plan.members[plan.own :]
        used, parts = self._used_parts()
        if shadow.shape[0]:
            torch.index_select(self.hosts.weights, 0, shadow, out=self.host_rows[plan.own :])
            targets = torch.cat([targets, targets.index_select(0, shadow)])
        host = self.host_rows.detach().requires_grad_()
        # The losses of rows do not depend on each other: the gradient of their sum is that of each.
        losses = cross_entropy(network.forward(plan, host, parts, inputs), targets)
        if not plan.live.shape[0]:
            return losses.detach(), torch.autograd.grad(losses.sum(), host)[0]
        host_gradient, *gradients = torch.autograd.grad(losses.sum(), [host, *used])
        if not self.by_group and not self.in_order:
            # A part learns in one of the entries that run it; the others use it as a constant.
            gradients = [gradients[0].index_select(0, plan.learning_entry)]
        for block, gradient in zip(self.blocks, gradients, strict=True):
            block.gradient = gradient[: len(block.rows.steps)]
        return losses.detach(), host_gradient

    def _used_parts(self) -> tuple[list[Tensor], list[StationWeights]]:
        """Return the leaves of the parts, and the weights of each station as functions of them."""
        plan, network = self.plan, self.state.network
        if not self.by_group:
            (block,) = self.blocks
            rows = block.rows.weights if block.half is None else block.half
            used = rows.detach() if self.in_order else rows.index_select(0, plan.live_index)
            return [used.requires_grad_()], network.split_parts(plan, used)
        for block in (block for block in self.blocks if len(block.held)):
            live = len(block.rows.steps)
            torch.index_select(block.rows.weights, 0, block.held, out=block.entries[live:])
        each = [block.entries if block.half is None else block.half for block in self.blocks]
        leaves = [entries.detach().requires_grad_() for entries in each]
        return leaves, network.join_groups(plan, leaves)


def _row_norms(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the norm of every row.  # [L, P] → [L]"""
    if rows.is_cuda and rows.shape[1] % 8 == 0 and rows.numel() >= LONG_ROWS:
        # Few long rows leave a part of a GPU idle: 64 of 1.2 million elements are read at 2.4 of 4.2 TB/s.
        rows = torch.linalg.vector_norm(rows.reshape(len(rows), 8, -1), dim=2, dtype=dtype)
    return torch.linalg.vector_norm(rows, dim=1, dtype=dtype)


class Validation:
    """Loss, accuracy and the worth of each seed of n members under one plan; calling it measures them."""

    def __init__(
        self, state: PopulationState, plan: Plan, data: MemberData, capture: Capture = _eager
    ) -> None:
        """data: of all members"""
        self.state, self.plan, self.data = state, plan, data
        self.run = capture(self._run)

    @torch.no_grad()
    def _run(self) -> ValidationMetrics:
        plan, state, config = self.plan, self.state, self.state.config
        members = plan.ids.index_select(0, plan.members)
        rows = state.hosts.weights.index_select(0, members)
        parts = state.network.gather_parts(plan, state.parts.weights)
        samples = min(self.data.num_samples, config.validation_samples)
        loss = torch.zeros(plan.num_rows, device=rows.device)
        score = torch.zeros_like(loss)
        for first in range(0, samples, config.validation_batch):
            last = min(first + config.validation_batch, samples)
            inputs, _ = self.data.span(plan.ids, first, last)
            _, targets = self.data.span(members, first, last)
            outputs = state.network.forward(plan, rows, parts, inputs)
            loss += cross_entropy(outputs, targets) * (last - first)
            score += accuracy(outputs, targets) * (last - first)
        loss, score, own = loss / samples, score / samples, plan.own
        return ValidationMetrics(loss[:own], score[:own], **worth_of_seeds(score, own, *plan.tables))


@dataclass(eq=False)
class _Captured(Generic[Run]):
    """Something captured for a bucket, whose plan can be exchanged for another that fits."""

    task: Task
    bucket: Bucket
    ints: Tensor
    alphas: Tensor
    run: Run


class GraphCache:
    """Makes what trains and validates plans, and keeps it for later plans where CUDA graphs are possible."""

    def __init__(self, state: PopulationState) -> None:
        network = state.network
        self.state, self.device = state, network.device
        self.possible = self.device.type == "cuda" and network.in_row_form
        self._graphs: list[_Captured[Any]] = []  # the latest used comes last
        self._known: frozenset[tuple[object, ...]] = frozenset()  # kernels that have run before
        self._seen: dict[Task, Bucket] = {}  # all that was ever needed
        self._validated: Hashable = None  # the data of the latest validation
        self._pool: GraphPool | None = None
        self._workspace = Workspace()

    def training(self, spec: PlanSpec, data: MemberData) -> TrainEpoch:
        """Return what trains the members of a spec for one epoch."""
        if not self.possible:
            return TrainEpoch(self.state, spec.pack().to(self.device), data, self._workspace)

        def make(plan: Plan, capture: Capture) -> TrainEpoch:
            return TrainEpoch(self.state, plan, data, self._workspace, capture)

        return self._fitting(("train", data.addresses), spec, make)

    def validation(self, spec: PlanSpec, data: MemberData) -> Validation:
        """Return what measures the members of a spec; captured from the second call with the same data on."""
        before, self._validated = self._validated, data.addresses
        if not self.possible or before != data.addresses:
            return Validation(self.state, spec.pack().to(self.device), data)

        def make(plan: Plan, capture: Capture) -> Validation:
            return Validation(self.state, plan, data, capture)

        return self._fitting(("validate", data.addresses), spec, make)

    def _fitting(self, task: Task, spec: PlanSpec, make: Callable[[Plan, Capture], Run]) -> Run:
        """Return something captured that holds the spec, with the spec loaded."""
        # The largest need so far: later buckets are made for it, so that they converge.
        seen = self._seen.get(task, spec.need)
        self._seen[task] = seen if seen.holds(spec.need) else spec.need.merge(seen) or spec.need
        padded = spec.need.with_margin()
        limit = _limit(padded)
        same = [graph for graph in self._graphs if graph.task == task]
        fitting = [g for g in same if g.bucket.cost <= limit and g.bucket.holds(spec.need)]
        graph: _Captured[Run]
        if fitting:
            graph = min(fitting, key=lambda g: g.bucket.cost)
            packed = spec.pack(graph.bucket)
            copy_to(graph.ints, packed.ints)
            copy_to(graph.alphas, packed.alphas)
            self._graphs.remove(graph)
        else:
            bucket = self._new_bucket(padded, same, self._seen[task].with_margin())
            graph = self._capture(task, bucket, spec.pack(bucket), make)
        self._graphs = [*self._graphs[1 - MAX_GRAPHS :], graph]
        return graph.run

    def _new_bucket(self, padded: Bucket, same: list[_Captured[Any]], all_seen: Bucket) -> Bucket:
        """Return a bucket for all that was ever needed, or one merged with that of the nearest graph.

        The graphs whose buckets it replaces are dropped. Neither is done where it would waste much.
        """
        limit = _limit(padded)
        if all_seen.cost <= limit:
            near = [g for g in same if all_seen.holds(g.bucket) and all_seen.cost <= _limit(g.bucket)]
            self._graphs = [g for g in self._graphs if g not in near]
            return all_seen
        merged = [(bucket, g) for g in same if (bucket := g.bucket.merge(padded)) and bucket.cost <= limit]
        merged = [(bucket, g) for bucket, g in merged if bucket.cost <= _limit(g.bucket)]
        if not merged:
            return padded
        bucket, nearest = min(merged, key=lambda pair: pair[0].cost - pair[1].bucket.cost)
        self._graphs.remove(nearest)
        return bucket

    def _capture(
        self, task: Task, bucket: Bucket, packed: PackedPlan, make: Callable[[Plan, Capture], Run]
    ) -> _Captured[Run]:
        if self._pool is None:
            self._pool = GraphPool()
        ints = to_device(packed.ints, self.device)
        alphas = to_device(packed.alphas, self.device, torch.float32)
        plan = packed.cut(ints, alphas)
        # Nothing may be compiled during a capture: kernels that were never launched run eagerly once.
        needed = {(task[0], *one) for one in plan.signature}
        run = make(plan, partial(TensorGraph, pool=self._pool, warm=needed <= self._known))
        self._known |= needed
        return _Captured(task, bucket, ints, alphas, run)

    def release(self) -> None:
        """Drop all graphs once this process holds more of the device's memory than it may."""
        if self._pool is None:
            return
        total = torch.cuda.get_device_properties(self.device).total_memory
        if torch.cuda.memory_reserved(self.device) > MAX_MEMORY * total:
            self._graphs, self._pool, self._workspace = [], None, Workspace()
            torch.cuda.empty_cache()


def _limit(bucket: Bucket) -> float:
    """Return what a bucket may cost that is used instead of this one."""
    return WASTE * bucket.cost + SPARE_GROUPS * LAUNCH_COST
