"""Optimisers over rows: every row has its own step count, its own learning rate and its own freeze."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from esper.population.config import PopulationConfig


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


@dataclass
class RowWeights:
    """Flat weights with their optimiser state. M rows of P elements."""

    weights: Tensor  # [M, P]
    first: Tensor  # [M, P] momentum
    second: Tensor  # [M, P] mean square of the gradient
    steps: Tensor  # [M] updates that the row has had

    @staticmethod
    def zeros(rows: int, width: int, device: torch.device) -> RowWeights:
        first, second, weights = (torch.zeros(rows, width, device=device) for _ in range(3))
        return RowWeights(weights, first, second, torch.zeros(rows, device=device))

    def rewrite(self, where: Tensor, weights: Tensor) -> None:
        """Give new weights and a clean optimiser to the rows where True.  # where [M], weights [M, P]"""
        column = where.unsqueeze(1)
        self.weights.copy_(torch.where(column, weights, self.weights))
        self.first.masked_fill_(column, 0.0)
        self.second.masked_fill_(column, 0.0)
        self.steps.masked_fill_(where, 0.0)

    def slice(self, start: int, stop: int) -> RowWeights:
        """Rows start..stop as views: what is written there is written here."""
        return RowWeights(**{name: value[start:stop] for name, value in self.tensors().items()})

    def take(self, index: Tensor) -> RowWeights:
        """Some rows as copies.  # index [n]"""
        return RowWeights(**{name: value.index_select(0, index) for name, value in self.tensors().items()})

    def put(self, index: Tensor, rows: RowWeights) -> None:
        """Write rows that were taken back to their places.  # index [n]"""
        for name, value in self.tensors().items():
            value.index_copy_(0, index, getattr(rows, name))

    def tensors(self) -> dict[str, Tensor]:
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def write(self, tensors: Mapping[str, Tensor], where: Tensor | None = None) -> None:
        """Copy saved tensors back, all rows or those where True.  # where [M]"""
        for name, value in self.tensors().items():
            saved = tensors[name]
            if where is not None:
                saved = torch.where(where.view(-1, *[1] * (value.ndim - 1)), saved, value)
            value.copy_(saved)


def learn_rows(
    rows: RowWeights, gradient: Tensor, lr: float | Tensor, active: Tensor, config: PopulationConfig
) -> Tensor:
    """Clip each row's gradient and move the active rows; the norms before clipping.  # → [M]"""
    if isinstance(lr, Tensor) and rows.weights.is_cuda and _has_triton():
        from esper.population import kernels

        return kernels.learn_rows(rows, gradient, lr, active, config)
    clipped, norms = clip_rows(gradient, config.clip_norm)
    step_rows(rows, clipped, lr, active, config)
    return norms


def clip_rows(gradient: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    """Scale each row down to a norm of at most `limit`; also the norms before.  # [M, P] → [M, P], [M]"""
    norms = gradient.norm(dim=1)
    scale = (limit / (norms + 1e-6)).clamp(max=1.0)
    return gradient * scale.unsqueeze(1), norms


def step_rows(
    rows: RowWeights, gradient: Tensor, lr: float | Tensor, active: Tensor, config: PopulationConfig
) -> None:
    """One update of the active rows; the others keep every bit.  # gradient [M, P], active [M]"""
    _STEPS[config.optimiser](rows, gradient, lr, active, config)


def _adamw(
    rows: RowWeights, gradient: Tensor, lr: float | Tensor, active: Tensor, config: PopulationConfig
) -> None:
    beta1, beta2 = config.momentum, config.second_beta
    column = active.unsqueeze(1)
    rows.steps.add_(active)
    first = torch.lerp(gradient, rows.first, beta1)
    second = torch.lerp(gradient.square(), rows.second, beta2)
    count = rows.steps.clamp(min=1.0).unsqueeze(1)
    root = (second / (1.0 - beta2**count)).sqrt().add_(1e-8)
    move = first / (1.0 - beta1**count) / root + config.weight_decay * rows.weights
    rows.weights.copy_(torch.where(column, rows.weights - lr * move, rows.weights))
    rows.first.copy_(torch.where(column, first, rows.first))
    rows.second.copy_(torch.where(column, second, rows.second))


def _sgd(
    rows: RowWeights, gradient: Tensor, lr: float | Tensor, active: Tensor, config: PopulationConfig
) -> None:
    column = active.unsqueeze(1)
    rows.steps.add_(active)
    first = config.momentum * rows.first + gradient
    move = first + config.weight_decay * rows.weights
    rows.weights.copy_(torch.where(column, rows.weights - lr * move, rows.weights))
    rows.first.copy_(torch.where(column, first, rows.first))


Step = Callable[[RowWeights, Tensor, float | Tensor, Tensor, PopulationConfig], None]
_STEPS: dict[str, Step] = {"adamw": _adamw, "sgd": _sgd}
