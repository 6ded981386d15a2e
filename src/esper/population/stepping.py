"""One minibatch of training for many members, as a function that a GPU can replay."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from esper.population.bodies import Bodies, seed_rows
from esper.population.config import PopulationConfig
from esper.population.objectives import Objective
from esper.population.optimiser import RowWeights, clip_rows, step_rows
from esper.population.plan import Plan
from esper.population.row_module import Buffers

REPLAY_FROM = 4  # a graph pays for its capture from this many minibatches on


@dataclass(frozen=True)
class Learners:
    """What a step of training moves: n members, their seeds and their running statistics, as views."""

    hosts: RowWeights  # n rows
    seeds: RowWeights  # n · S rows
    buffers: list[Buffers]
    learning: Tensor  # [n · S] bool: seeds that this epoch moves


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
        self.seed_gradient = torch.zeros_like(learners.seeds.weights)  # [n · S, P] of the latest minibatch

    def __call__(self, inputs: Tensor, targets: Tensor, rate: Tensor) -> None:
        """inputs, targets [n, B, ...]; rate [] the schedule's share of the peak learning rates"""
        losses, host_gradient, seed_gradient = self._gradients(inputs, targets)
        self.total_loss.add_(losses)
        clipped, host_norm = clip_rows(host_gradient, self.config.clip_norm)
        self.host_norm.copy_(host_norm)
        step_rows(self.learners.hosts, clipped, rate * self.config.host_lr, self.everyone, self.config)
        if seed_gradient is not None:
            self.seed_gradient.copy_(seed_gradient)
            clipped, _ = clip_rows(seed_gradient, self.config.clip_norm)
            seed_rate = rate * self.config.seed_lr
            step_rows(self.learners.seeds, clipped, seed_rate, self.learners.learning, self.config)

    def _gradients(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Losses of all rows, and the gradients of every host and every seed.  # [R], [n, P], [n · S, P]"""
        plan, hosts, seeds = self.plan, self.learners.hosts, self.learners.seeds
        shadow = plan.members[plan.own :]
        host_leaf = hosts.weights.detach().requires_grad_()
        seed_leaf = seeds.weights.detach().requires_grad_()
        host_rows, buffers = host_leaf, self.learners.buffers
        if shadow.shape[0]:
            host_rows = torch.cat([host_leaf, hosts.weights.index_select(0, shadow)])
            inputs = torch.cat([inputs, inputs.index_select(0, shadow)])
            targets = torch.cat([targets, targets.index_select(0, shadow)])
            buffers = [{n: v.index_select(0, plan.members) for n, v in part.items()} for part in buffers]
        live = seed_leaf.index_select(0, plan.live_seeds)
        held = seeds.weights.index_select(0, plan.held_seeds)
        weights = seed_rows(plan, live, held)
        outputs = self.bodies.forward(plan, host_rows, weights, inputs, buffers, training=True)
        losses = self.objective.loss(outputs, targets)
        if shadow.shape[0]:
            self._keep_own(buffers)
        if not plan.live_seeds.shape[0]:
            return losses.detach(), torch.autograd.grad(losses.sum(), host_leaf)[0], None
        host_gradient, seed_gradient = torch.autograd.grad(losses.sum(), [host_leaf, seed_leaf])
        return losses.detach(), host_gradient, seed_gradient

    def _keep_own(self, used: list[Buffers]) -> None:
        """Running statistics of the members' own rows come back; those of shadows are dropped."""
        for part, latest in zip(self.learners.buffers, used, strict=True):
            for name, value in part.items():
                value.copy_(latest[name][: self.plan.own])


class ReplayedStep:
    """A training step that runs once, is captured as a CUDA graph, and is replayed from then on."""

    def __init__(self, step: TrainStep, pool: torch.cuda._POOL_HANDLE):
        self.step, self.pool = step, pool
        self.graph: torch.cuda.CUDAGraph | None = None
        self._static: tuple[Tensor, Tensor, Tensor] | None = None

    def __call__(self, inputs: Tensor, targets: Tensor, rate: Tensor) -> None:
        if self._static is None:
            self._static = (inputs.clone(), targets.clone(), rate.clone())
            self.step(*self._static)
            return
        for place, value in zip(self._static, (inputs, targets, rate), strict=True):
            place.copy_(value)
        if self.graph is None:
            self.graph = self._capture()
        self.graph.replay()

    def _capture(self) -> torch.cuda.CUDAGraph:
        assert self._static is not None
        graph, stream, current = torch.cuda.CUDAGraph(), torch.cuda.Stream(), torch.cuda.current_stream()
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            graph.capture_begin(pool=self.pool, capture_error_mode="relaxed")
            self.step(*self._static)
            graph.capture_end()
        current.wait_stream(stream)
        return graph
