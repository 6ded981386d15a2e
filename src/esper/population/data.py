"""The data of the members: shared by all, or each member's own."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from esper.utils.graphs import Graphed, GraphPool
from esper.utils.streams import Stream, random_order


@dataclass(frozen=True)
class MemberData:
    """One split of K tasks of the same shape, and which task each member works on."""

    inputs: Tensor  # [K, n, ...]
    targets: Tensor  # [K, n, ...]
    task_of: Tensor  # [N] int64, which of the K

    @property
    def num_samples(self) -> int:
        return self.inputs.shape[1]

    @property
    def addresses(self) -> tuple[object, ...]:
        """Where the data lie in memory: a CUDA graph that was captured with them is good for these alone."""
        tensors = (self.inputs, self.targets, self.task_of)
        return tuple((t.data_ptr(), t.shape, t.stride(), t.dtype) for t in tensors)

    def to(self, device: torch.device | str) -> MemberData:
        return MemberData(self.inputs.to(device), self.targets.to(device), self.task_of.to(device))

    def take(self, members: Tensor, samples: Tensor) -> tuple[Tensor, Tensor]:
        """Return chosen samples of the given members.  # [n], [n, B] → [n, B, ...], [n, B, ...]"""
        task = self.task_of.index_select(0, members).unsqueeze(1)
        return self.inputs[task, samples], self.targets[task, samples]

    def span(self, members: Tensor, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return samples start..stop for rows of the given members.  # [R] → [R, B, ...], [R, B, ...]"""
        if self.inputs.shape[0] == 1:
            rows = members.shape[0]
            inputs, targets = self.inputs[:, start:stop], self.targets[:, start:stop]
            return inputs.expand(rows, *inputs.shape[1:]), targets.expand(rows, *targets.shape[1:])
        task = self.task_of.index_select(0, members)
        return self.inputs[task, start:stop], self.targets[task, start:stop]


@dataclass(frozen=True)
class Clock:
    """The progress of a run: which episode, which epoch of how many.

    Where compute is the budget, `spent` says how much of it each member has spent before this epoch and
    `share` how much the epoch takes; the learning rate follows these instead of the epochs.
    """

    episode: int
    epoch: int
    epochs: int
    spent: Tensor | None = None  # [N] 0..1
    share: Tensor | None = None  # [N]

    def done(self, batches: int, members: Tensor) -> Tensor:
        """Return how far every member has come before each minibatch, 0..1.  # [N] → [batches, N]"""
        batch = torch.arange(batches, dtype=torch.float64, device=members.device).unsqueeze(1) / batches
        if self.spent is not None and self.share is not None:
            # With a compute budget, the schedule follows the FLOPs spent instead of the epochs.
            done = (self.spent + self.share * batch).clamp(max=1.0)
        else:
            done = ((self.epoch + batch) / self.epochs).expand(batches, len(members))
        return done.to(torch.get_default_dtype())


class DataOrder:
    """The order in which each member sees its samples: its own stream, whoever else is there."""

    def __init__(
        self, seed: int, members: Tensor, num_samples: int, batch_size: int, pool: GraphPool | None = None
    ):
        """num_samples: at least one minibatch; pool: where drawing an order is captured, to be replayed"""
        self.seed, self.members, self.num_samples, self.batch_size = seed, members, num_samples, batch_size
        self._drawn = Graphed(self._draw, pool)
        self._pass: tuple[int, int] | None = None
        self._order = torch.empty(0)

    def batch(self, episode: int, index: int) -> Tensor:
        """Return the samples of minibatch `index` of an episode.  # [N, B]"""
        per_pass = self.num_samples // self.batch_size
        which = (episode, index // per_pass)
        if which != self._pass:
            # A counter of its own for every pass of every episode, up to 2^20 passes.
            counter = (episode << 20) + which[1]
            self._order = self._drawn(torch.full((), counter, device=self.members.device))
            self._pass = which
        start = (index % per_pass) * self.batch_size
        return self._order[:, start : start + self.batch_size]

    def _draw(self, counter: Tensor) -> Tensor:
        """counter [] int64: which pass of which episode.  # → [N, samples]"""
        return random_order(self.seed, self.members, Stream.DATA_ORDER, counter, self.num_samples)
