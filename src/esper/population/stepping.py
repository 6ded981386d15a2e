"""One minibatch of training for many members, as a function that a GPU can replay."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from esper.foundation.streams import Stream, stream_keys
from esper.population.bodies import Bodies, part_rows
from esper.population.config import PopulationConfig
from esper.population.objectives import Objective
from esper.population.optimiser import RowWeights, learn_rows
from esper.population.plan import Kind, Plan
from esper.population.row_module import Buffers

REPLAY_FROM = 4  # a graph pays for its capture from this many minibatches on


@dataclass(frozen=True)
class Learners:
    """What a step of training moves: n members, their live parts and their running statistics."""

    hosts: RowWeights  # n rows, views
    parts: RowWeights  # L rows, copies in the order of the plan
    buffers: list[Buffers]  # views
    learning: Tensor  # [L] bool: a seed that is fading out keeps its weights
    members: Tensor  # [n] global ids
    seed: int  # of the run: with the ids, what dropout draws from


class TrainStep:
    """Forward, backward and update of one minibatch, under a plan that holds for the epoch."""

    def __init__(
        self, bodies: Bodies, objective: Objective, config: PopulationConfig, plan: Plan, learners: Learners
    ):
        self.bodies, self.objective, self.config = bodies, objective, config
        self.plan, self.learners = plan, learners
        members, device = learners.hosts.steps.shape[0], bodies.device
        self.everyone = torch.ones(members, dtype=torch.bool, device=device)
        self.total_loss = torch.zeros(plan.num_rows, device=device)  # [R]
        self.host_norm = torch.zeros(members, device=device)  # [n] of the latest minibatch
        self.part_gradient = torch.zeros_like(learners.parts.weights)  # [L, P] of the latest minibatch

    def __call__(self, inputs: Tensor, targets: Tensor, rate: Tensor, count: Tensor) -> None:
        """inputs, targets [n, B, ...]; rate [n] the share of the peak learning rates; count [] int64, which
        minibatch of the run this is"""
        losses, host_gradient, part_gradient = self._gradients(inputs, targets, count)
        hosts, parts, config, plan = self.learners.hosts, self.learners.parts, self.config, self.plan
        self.total_loss.add_(losses)
        part_rate = self._part_rate(rate)
        norms = learn_rows(hosts, host_gradient, rate * config.host_lr, self.everyone, config).square()
        if part_gradient is not None:
            self.part_gradient.copy_(part_gradient)
            moved = learn_rows(parts, part_gradient, part_rate, self.learners.learning, config)
            folded = moved.square().masked_fill(plan.live_slot >= 0, 0.0)  # these belong to the host
            norms = norms.index_add(0, plan.live_member, folded)
        self.host_norm.copy_(norms.sqrt())

    def _part_rate(self, rate: Tensor) -> Tensor:
        """The learning rate of each live part: less while it is newer than its host.  # [n] → [L]"""
        plan, warmup = self.plan, self.config.new_part_warmup
        own = rate.index_select(0, plan.live_member)
        full = own * torch.where(plan.live_slot >= 0, self.config.seed_lr, self.config.host_lr)
        if warmup == 0:
            return full
        steps, age = self.learners.parts.steps, self.learners.hosts.steps.index_select(0, plan.live_member)
        return torch.where(steps < age, full * ((steps + 1) / warmup).clamp(max=1.0), full)

    def _gradients(
        self, inputs: Tensor, targets: Tensor, count: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Losses of all rows, and the gradients of every host and every live part.  # [R], [n, P], [L, P]"""
        plan, hosts, parts = self.plan, self.learners.hosts, self.learners.parts
        shadow = plan.members[plan.own :]
        host = hosts.weights.detach().requires_grad_()
        live = parts.weights.detach().requires_grad_()
        host_rows, buffers = host, self.learners.buffers
        if shadow.shape[0]:
            host_rows = torch.cat([host, hosts.weights.index_select(0, shadow)])
            targets = torch.cat([targets, targets.index_select(0, shadow)])
            buffers = [{n: v.index_select(0, plan.members) for n, v in part.items()} for part in buffers]
        weights = part_rows(plan, live)
        keys = None
        if self.bodies.draws:
            ids = self.learners.members.index_select(0, plan.members)
            keys = stream_keys(self.learners.seed, ids, Stream.DROPOUT, count)
        outputs = self.bodies.forward(plan, host_rows, weights, inputs, buffers, True, keys)
        losses = self.objective.loss(outputs, targets)
        if shadow.shape[0]:
            self._keep_own(buffers)
        if not plan.live.shape[0]:
            return losses.detach(), torch.autograd.grad(losses.sum(), host)[0], None
        host_gradient, part_gradient = torch.autograd.grad(losses.sum(), [host, live])
        return losses.detach(), host_gradient, part_gradient

    def _keep_own(self, used: list[Buffers]) -> None:
        """Running statistics of the members' own rows come back; those of shadows are dropped."""
        for part, latest in zip(self.learners.buffers, used, strict=True):
            for name, value in part.items():
                value.copy_(latest[name][: self.plan.own])


class Studio:
    """Where steps are captured: one pool of memory, one stream, so that a capture reuses the last one's."""

    def __init__(self) -> None:
        self.pool = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream()


class ReplayedStep:
    """A training step that is captured as a CUDA graph and replayed.

    A step of a new kind runs once as it is, since nothing may be compiled or loaded while it is captured.
    """

    def __init__(self, step: TrainStep, studio: Studio, known: bool):
        self.step, self.studio, self.known = step, studio, known
        self.graph: torch.cuda.CUDAGraph | None = None
        self._static: tuple[Tensor, Tensor, Tensor, Tensor] | None = None

    def __call__(self, inputs: Tensor, targets: Tensor, rate: Tensor, count: Tensor) -> None:
        if self._static is None:
            self._static = (inputs.clone(), targets.clone(), rate.clone(), count.clone())
            if not self.known:
                self.step(*self._static)
                return
        for place, value in zip(self._static, (inputs, targets, rate, count), strict=True):
            place.copy_(value)
        if self.graph is None:
            self.graph = self._capture()
        self.graph.replay()

    def _capture(self) -> torch.cuda.CUDAGraph:
        assert self._static is not None
        graph, stream, current = torch.cuda.CUDAGraph(), self.studio.stream, torch.cuda.current_stream()
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            graph.capture_begin(pool=self.studio.pool, capture_error_mode="relaxed")
            self.step(*self._static)
            graph.capture_end()
        current.wait_stream(stream)
        return graph


class Replays:
    """The captured steps of one population, where its device and its bodies allow any."""

    def __init__(self, bodies: Bodies, config: PopulationConfig) -> None:
        on_gpu = config.graphs and bodies.device.type == "cuda"
        self.possible = on_gpu and config.batches_per_epoch >= REPLAY_FROM and bodies.in_row_form
        self.device = bodies.device
        self._studio: Studio | None = None
        self._latest: list[ReplayedStep] = []
        self._known: frozenset[Kind] = frozenset()

    def runner(self, step: TrainStep) -> TrainStep | ReplayedStep:
        """What runs the minibatches of an epoch: the step itself, or its replay as one graph."""
        if not self.possible:
            return step
        if self._studio is None:
            self._studio = Studio()
        replayed = ReplayedStep(step, self._studio, known=step.plan.kinds <= self._known)
        self._known |= step.plan.kinds
        self._latest = [*self._latest[-1:], replayed]  # the pool lives as long as one of its graphs does
        return replayed

    def release(self) -> None:
        """Give back what replays hold once this process has half of the device's memory: it may be needed."""
        if self._studio is None:
            return
        total = torch.cuda.get_device_properties(self.device).total_memory
        if 2 * torch.cuda.memory_reserved(self.device) > total:
            self._latest, self._studio = [], None
            torch.cuda.empty_cache()
