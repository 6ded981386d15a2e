"""A network of residual blocks whose hidden units can be switched off, and what it costs then.

A unit that is off neither says nor learns anything, so that a masked network is the smaller network; its
price is that of the smaller one, by torch's own counter.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.utils.flop_counter import FlopCounterMode

from esper.population.blocks import Branch
from esper.population.hosts import Host, build_host
from esper.tasks.task import HostSpec, Split, Task

MEASURED_AT_ONCE = 128  # samples

Floats = NDArray[np.float64]


class Masked(nn.Module):
    """The middle of a block, with a 0 or 1 for each of its units."""

    mask: Tensor  # [units]

    def __init__(self, middle: nn.Module, units: int, outputs: int, channels_first: bool) -> None:
        super().__init__()
        self.middle = middle
        self.each = outputs // units  # outputs of a unit: several, if it is a head
        self.channels_first = channels_first
        self.register_buffer("mask", torch.ones(units))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.middle(x)
        heard = self.mask.unsqueeze(1).expand(-1, self.each).flatten()  # [outputs]
        return out * (heard.view(-1, *[1] * (out.ndim - 2)) if self.channels_first else heard)


class Network:
    """A host's structure without its weights: those are rows [N, P], and rows [N, U] of masks over all units.

    A mask holds the units of all B blocks one after another. Raises ValueError for a host without blocks.
    """

    def __init__(self, task: Task, host: HostSpec) -> None:
        self.task, self.host = task, host
        self.module = self._fresh()
        branches = branches_of(self.module)
        if not branches:
            raise ValueError(f"the {host.preset} host has no residual blocks; give resnet, resmlp or gpt")
        self.units = [branch.units for branch in branches]
        self.copies = [branch.copies for branch in branches]
        self.block_of_unit = np.repeat(np.arange(len(branches)), self.units)  # [U]
        self.flops = Price.counted(self.module, task.train.inputs[:1])
        self.parameters = Price.of_parameters(self.module)
        self.shapes = {name: value.shape for name, value in self.module.named_parameters()}
        for branch, units in zip(branches, self.units, strict=True):
            outputs = branch.second.weight.shape[1]
            branch.middle = Masked(branch.middle, units, outputs, not isinstance(branch.first, nn.Linear))
        self.masks = [name for name, _ in self.module.named_buffers() if name.endswith(".middle.mask")]
        self.places = [name.removesuffix(".middle.mask") for name in self.masks]  # of the branches

    def _fresh(self) -> Host:
        task, host = self.task, self.host
        return build_host(host.preset, task.input_shape, task.num_classes, **host.options)

    def first_weights(self, members: Tensor, device: str) -> Tensor:
        """What the members begin with; each follows from its id alone.  # ids [N] → [N, P]"""
        rows = []
        with torch.random.fork_rng(devices=[]):
            for member in members.tolist():
                torch.manual_seed(member)
                rows.append(nn.utils.parameters_to_vector(self._fresh().parameters()).detach())
        return torch.stack(rows).to(device)

    def named(self, row: Tensor) -> dict[str, Tensor]:
        """A row of weights by the names of the parameters.  # [P]"""
        parts = row.split([shape.numel() for shape in self.shapes.values()])
        return {
            name: part.view(shape) for (name, shape), part in zip(self.shapes.items(), parts, strict=True)
        }

    def outputs(self, row: Tensor, mask: Tensor, inputs: Tensor) -> Tensor:
        """What one member says.  # [P], [U], [B, *input_shape] → [B, ..., classes]"""
        masks = dict(zip(self.masks, mask.split(self.units), strict=True))
        result: Tensor = functional_call(self.module, {**self.named(row), **masks}, (inputs,))
        return result

    def loss(self, row: Tensor, mask: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
        """The mean cross-entropy of one member's minibatch."""
        return F.cross_entropy(self.outputs(row, mask, inputs).flatten(0, -2), targets.flatten())

    @torch.no_grad()
    def accuracy(self, rows: Tensor, masks: Tensor, split: Split) -> Tensor:
        """Of every member on a whole split.  # [N, P], [N, U] → [N]"""
        answers = vmap(self.outputs, in_dims=(0, 0, None))
        right = torch.zeros(len(rows), device=rows.device)
        for start in range(0, len(split), MEASURED_AT_ONCE):
            stop = start + MEASURED_AT_ONCE
            said = answers(rows, masks, split.inputs[start:stop].to(rows.device)).argmax(-1)
            right += (said == split.targets[start:stop].to(rows.device)).flatten(1).sum(1)
        return right / split.targets.numel()

    def units_on(self, masks: Tensor) -> Floats:
        """How many units of each block are on.  # [N, U] → [N, B]"""
        return np.stack(
            [part.sum(1).double().cpu().numpy() for part in masks.split(self.units, dim=1)], axis=1
        )

    def importance(self, row: Tensor) -> Tensor:
        """The norm of each unit's incoming weights times that of its outgoing ones.  # [P] → [U]"""
        weights, found = self.named(row), []
        for place, units, copies in zip(self.places, self.units, self.copies, strict=True):
            coming = weights[f"{place}.first.weight"].unflatten(0, (copies, units, -1)).movedim(1, 0)
            going = weights[f"{place}.second.weight"].unflatten(1, (units, -1)).movedim(1, 0)
            found.append(coming.flatten(1).norm(dim=1) * going.flatten(1).norm(dim=1))
        return torch.cat(found)


@dataclass(frozen=True)
class Price:
    """What a network costs: a part that is always there, and so much for each unit of every block."""

    always: float
    unit: Floats  # [B]

    def of(self, kept: Floats) -> Floats:
        """Of networks with so many units in each block.  # [..., B] → [...]"""
        price: Floats = self.always + kept @ self.unit
        return price

    @staticmethod
    def counted(module: nn.Module, sample: Tensor) -> Price:
        """In operations of a forward pass of one sample; a block of twice the units tells what they cost."""
        whole, unit, units = count_flops(module, sample), [], []
        for index, branch in enumerate(branches_of(module)):
            wider = copy.deepcopy(module)
            block = branches_of(wider)[index]
            twice = block.with_units(2 * branch.units)
            block.first, block.middle, block.second = twice.first, twice.middle, twice.second
            units.append(branch.units)
            unit.append((count_flops(wider, sample) - whole) / branch.units)
        return Price(whole - float(np.dot(units, unit)), np.array(unit))

    @staticmethod
    def of_parameters(module: nn.Module) -> Price:
        """In parameters."""
        branches = branches_of(module)
        counts = np.array([sum(p.numel() for p in branch.parameters()) for branch in branches])
        always = sum(p.numel() for p in module.parameters()) - counts.sum()
        return Price(float(always), counts / np.array([branch.units for branch in branches]))


@torch.no_grad()
def count_flops(module: nn.Module, sample: Tensor) -> float:
    """Operations of a forward pass, two for each multiply-add; element-wise work is not counted."""
    with FlopCounterMode(display=False) as counter:
        module(sample)
    return float(counter.get_total_flops())


def branches_of(module: nn.Module) -> list[Branch]:
    """The branches of all residual blocks, in the order of the forward pass."""
    return [part for part in module.modules() if isinstance(part, Branch)]
