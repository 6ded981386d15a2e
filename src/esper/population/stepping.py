"""An epoch of training and a validation of many members, each as functions that a GPU can replay.

What these work on lies in tensors of their own, whose places never change: rows are fetched at the beginning
of an epoch and brought back at its end. So a captured step serves every later plan of its shape.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from esper.population.bodies import Bodies
from esper.population.config import PopulationConfig
from esper.population.data import MemberData
from esper.population.gradients import measure_seeds
from esper.population.metrics import TrainMetrics, ValidationMetrics, worth_of_seeds
from esper.population.objectives import Objective
from esper.population.optimizer import RowWeights, learn_rows
from esper.population.plan import Plan


@dataclass(frozen=True)
class Crew:
    """The rows of all members of a population, where they are kept; written in place by those who train."""

    bodies: Bodies
    objective: Objective
    config: PopulationConfig
    hosts: RowWeights  # N rows
    parts: RowWeights  # all parts, and one row at the end that is nobody's


class Scratch:
    """Room for rows that are fetched and brought back: programs that never run at once share it."""

    def __init__(self) -> None:
        self._held: dict[str, Tensor] = {}

    def rows(
        self, name: str, count: int, width: int, device: torch.device, dtype: torch.dtype | None = None
    ) -> Tensor:
        """A tensor of that name; others of the same name lie in the same place.  # → [count, width]"""
        size = count * width
        if name not in self._held or self._held[name].numel() < size:
            self._held[name] = torch.zeros(size, dtype=dtype, device=device)
        return self._held[name][:size].view(count, width)

    def weights(self, name: str, count: int, width: int, device: torch.device) -> RowWeights:
        """Rows with their optimizer state."""
        weights, first, second = (self.rows(f"{name}.{k}", count, width, device) for k in range(3))
        return RowWeights(weights, first, second, self.rows(f"{name}.steps", count, 1, device).view(-1))


class TrainEpoch:
    """An epoch of n members under one plan: `load`, `begin`, a call for each minibatch, `finish`."""

    def __init__(self, crew: Crew, plan: Plan, data: MemberData, scratch: Scratch) -> None:
        """data: of all members."""
        self.crew, self.plan, self.data = crew, plan, data
        device, lives, width = crew.bodies.device, plan.live.shape[0], crew.bodies.part_width
        self.hosts = scratch.weights("hosts", plan.own, crew.bodies.host_width, device)
        self.parts = scratch.weights("parts", lives, width, device)
        self.part_gradient = scratch.rows("gradient", lives, width, device)  # of the latest minibatch
        batches, batch = crew.config.batches_per_epoch, crew.config.batch_size
        samples = scratch.rows("samples", batches, plan.own * batch, device, torch.long)
        self.samples = samples.view(batches, plan.own, batch)
        self.rates = scratch.rows("rates", batches, plan.own, device)
        self.turn = torch.zeros(1, dtype=torch.long, device=device)  # which minibatch of the epoch is next
        self.total_loss = torch.zeros(plan.num_rows, device=device)  # [R]
        self.host_norm = torch.zeros(plan.own, device=device)  # [n] of the latest minibatch

    def load(self, samples: Tensor, rates: Tensor) -> None:
        """What the members are to see, and how fast they learn from it.

        samples [batches, N, B]: which ones; rates [batches, N]: the share of the peak learning rates
        """
        torch.index_select(samples, 1, self.plan.ids, out=self.samples)
        torch.index_select(rates, 1, self.plan.ids, out=self.rates)

    def begin(self) -> None:
        """Fetch the rows."""
        self.hosts.fetch(self.crew.hosts, self.plan.ids)
        self.parts.fetch(self.crew.parts, self.plan.live)
        self.total_loss.zero_()
        self.turn.zero_()

    def finish(self) -> TrainMetrics:
        """Bring the rows back; what the epoch showed of these members."""
        self.crew.hosts.put(self.plan.ids, self.hosts)
        self.crew.parts.put(self.plan.live, self.parts)
        (shadow,) = self.plan.tables  # [n, S]
        mean = self.total_loss / self.crew.config.batches_per_epoch
        alone = mean[shadow.clamp(min=0)].masked_fill(shadow < 0, math.nan)
        measured = measure_seeds(self.crew.bodies, self.plan, self.part_gradient, self.host_norm)
        return TrainMetrics(mean[: self.plan.own], alone, measured)

    def __call__(self) -> None:
        """The next minibatch."""
        config, plan = self.crew.config, self.plan
        samples, rate = (held.index_select(0, self.turn)[0] for held in (self.samples, self.rates))
        inputs, targets = self.data.members(plan.ids).take(samples)
        losses, host_gradient = self._gradients(inputs, targets)
        self.total_loss.add_(losses)
        part_rate = self._part_rate(rate)
        active = plan.active.bool()
        norms = torch.linalg.vector_norm(host_gradient, dim=1)
        if plan.live.shape[0]:
            norms, part_norms = self._norms(norms, torch.linalg.vector_norm(self.part_gradient, dim=1))
            learn_rows(self.parts, self.part_gradient, part_norms, part_rate, plan.learning.bool(), config)
        learn_rows(self.hosts, host_gradient, norms, rate * config.host_lr, active, config)
        self.host_norm.copy_(norms)
        self.turn.add_(1)

    def _norms(self, trunk: Tensor, part: Tensor) -> tuple[Tensor, Tensor]:
        """The gradient norms that clipping goes by: of each host with all that was folded into it, and for
        each live part its own if it is a seed, that of its host if it was folded in.  # both [n], [L]"""
        plan, slots = self.plan, self.plan.seat.shape[1]
        is_seed = plan.live_slot >= 0
        folded = part.square().masked_fill(is_seed, 0.0)
        # Each has a place of its own in a table, so that the order of the sum is always the same.
        each = self.crew.hosts.steps.shape[0] * slots
        width = (self.crew.parts.steps.shape[0] // each + 1) * slots
        place = plan.live // each * slots + plan.live % slots
        table = folded.new_zeros(plan.own * width).scatter(0, plan.live_member * width + place, folded)
        host = (trunk.square() + table.view(plan.own, width).sum(dim=1)).sqrt()
        return host, torch.where(is_seed, part, host.index_select(0, plan.live_member))

    def _part_rate(self, rate: Tensor) -> Tensor:
        """The learning rate of each live part: less while it is newer than its host.  # [n] → [L]"""
        plan, config = self.plan, self.crew.config
        own = rate.index_select(0, plan.live_member)
        full = own * torch.where(plan.live_slot >= 0, config.seed_lr, config.host_lr)
        if config.new_part_warmup == 0:
            return full
        steps, age = self.parts.steps, self.hosts.steps.index_select(0, plan.live_member)
        return torch.where(steps < age, full * ((steps + 1) / config.new_part_warmup).clamp(max=1.0), full)

    def _gradients(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Losses of all rows and the gradients of every host; those of live parts are written where they lie.

        # [R], [n, P]
        """
        plan, bodies = self.plan, self.crew.bodies
        shadow = plan.members[plan.own :]
        host = self.hosts.weights.detach().requires_grad_()
        met = bodies.lowered(self.parts.weights).index_select(0, plan.seed).requires_grad_()  # by each entry
        host_rows = host
        if shadow.shape[0]:
            host_rows = torch.cat([host, self.hosts.weights.index_select(0, shadow)])
            targets = torch.cat([targets, targets.index_select(0, shadow)])
        losses = self.crew.objective.loss(bodies.forward(plan, host_rows, met, inputs), targets)
        if not plan.live.shape[0]:
            return losses.detach(), torch.autograd.grad(losses.sum(), host)[0]
        host_gradient, met_gradient = torch.autograd.grad(losses.sum(), [host, met])
        # A part learns in one of the entries that meet it; in the others it is only heard.
        self.part_gradient.copy_(met_gradient.index_select(0, plan.learns))
        return losses.detach(), host_gradient


class Validation:
    """What n members reach under a plan, each seed's worth included."""

    def __init__(self, crew: Crew, plan: Plan, data: MemberData) -> None:
        """data: of all members."""
        self.crew, self.plan, self.data = crew, plan, data

    @torch.no_grad()
    def __call__(self) -> ValidationMetrics:
        """Loss, accuracy and worth, of these members alone."""
        loss, accuracy = self._evaluate()
        own = self.plan.own
        worth = worth_of_seeds(accuracy, own, *self.plan.tables)
        return ValidationMetrics(loss=loss[:own], accuracy=accuracy[:own], **worth)

    def _evaluate(self) -> tuple[Tensor, Tensor]:
        """Mean loss and score of each row over the validation samples.  # [R], [R]"""
        plan, crew, objective = self.plan, self.crew, self.crew.objective
        members = plan.ids.index_select(0, plan.members)
        rows = crew.hosts.weights.index_select(0, members)
        parts = crew.parts.weights.index_select(0, plan.live.index_select(0, plan.seed))
        samples = min(self.data.num_samples, crew.config.validation_samples)
        loss = torch.zeros(plan.num_rows, device=rows.device)
        score = torch.zeros_like(loss)
        for first in range(0, samples, crew.config.validation_batch):
            last = min(first + crew.config.validation_batch, samples)
            inputs, _ = self.data.span(plan.ids, first, last)
            _, targets = self.data.span(members, first, last)
            outputs = crew.bodies.forward(plan, rows, parts, inputs)
            loss += objective.loss(outputs, targets) * (last - first)
            score += objective.score(outputs, targets) * (last - first)
        return loss / samples, score / samples
