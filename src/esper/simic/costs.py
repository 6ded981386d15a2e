"""FLOPs of an episode, counted for every member by the seeds that it held.

One forward pass of the host, of every form at every slot and of every gate is counted once, on the CPU,
by torch's own counter (products and convolutions; two operations per multiply-add; element-wise work is not
counted). From there an epoch is arithmetic on the slot states. A training sample costs three forward passes.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from esper.lifecycle.legality import in_forward_pass
from esper.lifecycle.slot_states import SlotStates
from esper.lifecycle.stages import Stage
from esper.population.forms import NO_FORM
from esper.population.network import RowNetwork
from esper.utils.flops import flop_counter

TRAINING_PASSES = 3  # forward, and twice as much backward


@dataclass(frozen=True)
class Work:
    """What every member does in one epoch, in samples."""

    training: int
    validation: int
    ablate: bool = True  # each seed's worth is measured
    best_epoch: bool = False  # validation chooses the final weights: everyone pays for it


class HasForms(Protocol):
    """Which parts stand in the slots of N networks."""

    @property
    def forms(self) -> Tensor: ...  # [N, S, positions] int64, the seed's first; -1 = none
    @property
    def folding(self) -> Tensor: ...  # [N, S] bool: a fossil waits to become part of its host
    def gated(self, states: SlotStates) -> Tensor: ...  # [N, S, positions] bool: it blends through a gate


@dataclass(frozen=True)
class ForwardCosts:
    """Operations of one sample's forward pass."""

    trunk: Tensor  # [S + 1] float64: the segments without their blocks, the head last
    parts: Tensor  # [S, forms] float64
    gates: Tensor  # [S] float64
    host: float  # the whole of a bare host

    @staticmethod
    def of(network: RowNetwork, sample: Tensor, device: torch.device) -> ForwardCosts:
        """Count by running each part once on the CPU.  # sample [1, *input_shape]"""
        parts = torch.zeros(len(network.slots), network.codes.total, dtype=torch.float64)
        gates = torch.zeros(len(network.slots), dtype=torch.float64)
        trunk = torch.zeros(len(network.trunk), dtype=torch.float64)
        x = sample
        for s, slot in enumerate(network.slots):
            module = network.trunk[s]
            if module is not None:
                x, trunk[s] = _count(module.module, x)
            gates[s] = _count_once(slot.gate.module, x)
            for form in slot.forms:
                parts[s, form] = sum(_count_once(part.module, x) for part in slot.body(form).modules)
        head = network.trunk[-1]
        assert head is not None
        trunk[-1] = _count(head.module, x)[1]
        grows = [s for s, slot in enumerate(network.slots) if slot.branch is not None]
        host = float(trunk.sum() + parts[grows, network.codes.block].sum())
        return ForwardCosts(trunk.to(device), parts.to(device), gates.to(device), host)

    def relative(self, slots: SlotStates, population: HasForms) -> Tensor:
        """Return the cost of a training sample, its shadows included, over a bare host's.  # [N]"""
        sample = Work(training=1, validation=0, ablate=False)
        return self.epoch(slots, population, sample) / (TRAINING_PASSES * self.host)

    def epoch(
        self, slots: SlotStates, population: HasForms, work: Work, uses_metrics: Tensor | None = None
    ) -> Tensor:
        """Return the FLOPs of one epoch of training and one validation.  # [N] float64

        A row that differs from its member's own from slot s on is charged from there.
        uses_metrics [N] bool: who is charged for the validation and for what it measures of seeds, everyone
        by default; the others pay for the plain validation where it chooses their weights.
        """
        folded, seed = self._by_slot(slots, population)  # [N, S] each
        active = in_forward_pass(slots)
        isolated = slots.stage == Stage.TRAINING
        grown = seed * active
        # One forward pass of the member as it is, [N].
        own = self.trunk.sum() + (folded + grown).sum(1)
        # What follows slot s: the trunk behind it, parts folded in behind it, and active seeds behind it.
        ahead = self.trunk[1:] + torch.cat([folded[:, 1:], torch.zeros_like(folded[:, :1])], dim=1)
        rest = _suffix_sums(ahead) + (_suffix_sums(grown) - grown)  # [N, S]
        # A shadow row forks at its slot: it pays for its seed and for what follows it.
        shadows = (isolated * (rest + seed)).sum(1)
        # A backward pass costs two forward passes: one for activations, one for weights.
        trained = TRAINING_PASSES * work.training * (own + shadows)
        validated = own
        if work.ablate:
            validated = validated + shadows + (active * rest).sum(1)
        validated = work.validation * validated
        if uses_metrics is None:
            return trained + validated
        plain = work.validation * own if work.best_epoch else torch.zeros_like(own)
        return trained + torch.where(uses_metrics, validated, plain)

    def _by_slot(self, slots: SlotStates, population: HasForms) -> tuple[Tensor, Tensor]:
        """Return the FLOPs of what was folded in at each slot, and of its seed, with their gates.  # [N, S]

        A fossil that waits to become part of its host counts as folded in.
        """
        forms, where = population.forms, torch.arange(slots.num_slots, device=slots.device).unsqueeze(1)
        bodies = self.parts[where, forms.clamp(min=0)]  # [N, S, positions]
        bodies = bodies + population.gated(slots) * self.gates.unsqueeze(1)
        bodies = bodies * (forms != NO_FORM)
        seeds = bodies[:, :, 0] * ~population.folding
        return bodies.sum(2) - seeds, seeds


def _suffix_sums(costs: Tensor) -> Tensor:
    """Sum what lies at each slot and behind it.  # [N, S] → [N, S]"""
    return costs.flip(1).cumsum(1).flip(1)


_counted: dict[str, float] = {}


def _count_once(module: nn.Module, x: Tensor) -> float:
    """Count the FLOPs of a module, once for equal modules and inputs of equal shape."""
    # The text names all layers and sizes. Classes of other people may keep some of them to themselves.
    ours = all(type(child).__module__.startswith(("torch.", "esper.")) for child in module.modules())
    text = f"{module} {[tuple(p.shape) for p in module.parameters()]} {tuple(x.shape)}"
    if not ours or text not in _counted:
        _counted[text] = _count(module, x)[1]
    return _counted[text]


@torch.no_grad()
def _count(module: nn.Module, x: Tensor) -> tuple[Tensor, float]:
    """Run a module and count its FLOPs; its running statistics stay as they are."""
    # A copy in eval mode: counting must not move running statistics.
    body = copy.deepcopy(module).eval()
    with flop_counter() as counter:
        out: Tensor = body(x)
    return out, float(counter.get_total_flops())
