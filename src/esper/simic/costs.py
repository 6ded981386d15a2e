"""The price of an episode in floating-point operations, counted for every member by what lived in it.

One forward pass of the host, of every blueprint at every slot and of every gate is counted once, on the CPU,
by torch's own counter (products and convolutions; two operations per multiply-add; element-wise work is not
counted). From there an epoch is arithmetic on the slot states. A training sample costs three forward passes.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from esper.lifecycle.actions import NUM_BLUEPRINTS, has_gate
from esper.lifecycle.legality import is_heard
from esper.lifecycle.slot_states import SlotStates
from esper.lifecycle.stages import Stage
from esper.population.bodies import Bodies

TRAINING_PASSES = 3  # forward, and twice as much backward


@dataclass(frozen=True)
class Work:
    """What every member does in one epoch, in samples."""

    training: int
    validation: int
    ablate: bool = True  # each seed's worth is measured
    pairs: bool = False  # and that of every pair


@dataclass(frozen=True)
class Prices:
    """FLOPs of networks that never change, member by member."""

    batch: NDArray[np.float64]  # [N] one minibatch of training
    validation: NDArray[np.float64]  # [N] one validation


@dataclass(frozen=True)
class ForwardCosts:
    """Operations of one sample's forward pass."""

    segments: Tensor  # [S + 1] float64, the head last
    seeds: Tensor  # [S, blueprints] float64
    gates: Tensor  # [S] float64

    @staticmethod
    def of(bodies: Bodies, sample: Tensor, device: torch.device) -> ForwardCosts:
        """Count by running each part once on the CPU.  # sample [1, *input_shape]"""
        seeds = torch.zeros(len(bodies.slots), NUM_BLUEPRINTS, dtype=torch.float64)
        gates = torch.zeros(len(bodies.slots), dtype=torch.float64)
        segments = torch.zeros(len(bodies.segments), dtype=torch.float64)
        x = sample
        for s, slot in enumerate(bodies.slots):
            x, segments[s] = _count(bodies.segments[s].module, x)
            gates[s] = _count(slot.gate.module, x)[1]
            for b, seed in slot.seeds.items():
                seeds[s, b] = _count(seed.module, x)[1]
        segments[-1] = _count(bodies.segments[-1].module, x)[1]
        return ForwardCosts(segments.to(device), seeds.to(device), gates.to(device))

    @property
    def host(self) -> Tensor:
        """One forward pass of a bare host.  # []"""
        return self.segments.sum()

    def epoch(self, slots: SlotStates, work: Work) -> Tensor:
        """Operations of one epoch of training and one validation.  # [N] float64

        A row that differs from its member's own from slot s on is charged from there.
        """
        seed = self._by_slot(slots)  # [N, S]
        heard = is_heard(slots)
        alone = slots.stage == Stage.TRAINING
        grown = seed * heard
        own = self.host + grown.sum(1)  # [N] one forward pass as the member is
        rest = _behind(self.segments[1:].expand(len(own), -1), here=True) + _behind(grown)  # [N, S]
        shadows = (alone * (rest + seed)).sum(1)
        trained = TRAINING_PASSES * work.training * (own + shadows)
        validated = own
        if work.ablate:
            validated = validated + shadows + (heard * rest).sum(1)
            if work.pairs:
                partners = _behind(heard.double())
                validated = validated + (heard * (partners * rest - _behind(grown))).sum(1)
        return trained + work.validation * validated

    def prices(self, slots: SlotStates, batch_size: int, validation_samples: int) -> Prices:
        """What networks that keep these seeds cost; nothing is measured of single seeds."""
        trained = self.epoch(slots, Work(training=batch_size, validation=0, ablate=False))
        measured = self.epoch(slots, Work(training=0, validation=validation_samples, ablate=False))
        return Prices(trained.cpu().numpy(), measured.cpu().numpy())

    def _by_slot(self, slots: SlotStates) -> Tensor:
        """One forward pass of the seed in each slot, with its gate if it has one.  # [N, S]"""
        where = torch.arange(slots.num_slots, device=slots.device)
        bodies = self.seeds[where, slots.blueprint.clamp(min=0)]
        return bodies + has_gate(slots.style) * self.gates


def _behind(costs: Tensor, here: bool = False) -> Tensor:
    """What lies behind each slot, the slot itself included where asked.  # [N, S] → [N, S]"""
    suffix = costs.flip(1).cumsum(1).flip(1)
    return suffix if here else suffix - costs


@torch.no_grad()
def _count(module: nn.Module, x: Tensor) -> tuple[Tensor, float]:
    """A module's output and the operations of getting it; its running statistics stay as they are."""
    body = copy.deepcopy(module).eval()
    with FlopCounterMode(display=False) as counter:
        out: Tensor = body(x)
    return out, float(counter.get_total_flops())
