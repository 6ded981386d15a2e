"""The parameters of a module as one flat row, and back."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Layout:
    """Where each parameter of a module lies in its flat row."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    @staticmethod
    def of(module: nn.Module) -> Layout:
        named = list(module.named_parameters())
        return Layout(tuple(n for n, _ in named), tuple(tuple(p.shape) for _, p in named))

    @cached_property
    def sizes(self) -> list[int]:
        return [prod(shape) for shape in self.shapes]

    @cached_property
    def total(self) -> int:
        return sum(self.sizes)

    def unflatten(self, rows: Tensor) -> dict[str, Tensor]:
        """Views of flat rows by parameter name; what lies behind the last one is no one's.

        [R, P or more] → {name: [R, *shape]}
        """
        parts = rows.split([*self.sizes, rows.shape[1] - self.total], dim=1)
        return {
            name: part.view(rows.shape[0], *shape)
            for name, shape, part in zip(self.names, self.shapes, parts[:-1], strict=True)
        }

    def membership(self) -> Tensor:
        """Which tensor each element belongs to, one-hot.  # [P, tensors, at least 1]"""
        owner = torch.repeat_interleave(
            torch.arange(len(self.sizes)), torch.tensor(self.sizes, dtype=torch.long)
        )
        return torch.nn.functional.one_hot(owner, max(len(self.sizes), 1)).float()


def flatten(module: nn.Module) -> Tensor:
    """The parameters of one module as a flat row.  # [P]"""
    parts = [p.detach().reshape(-1) for p in module.parameters()]
    return torch.cat(parts) if parts else torch.zeros(0)


def load_flat(module: nn.Module, row: Tensor) -> nn.Module:
    """Write a flat row into a module's own parameters.  # row [P]"""
    with torch.no_grad():
        for name, value in Layout.of(module).unflatten(row.unsqueeze(0)).items():
            module.get_parameter(name).copy_(value[0])
    return module
