"""Optimizers over rows and learning rate schedules.

Every row has its own step count, its own learning rate and its own freeze.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cache
from importlib.util import find_spec
from typing import TypeVar

import torch
from torch import Tensor

from esper.population.config import PopulationConfig

# Elements of a row from which on a CPU uses torch's fused kernel. By thread time that takes 0.8 of
# `step_rows` with 16 rows of 512 elements, and a tenth of it with 32 rows of 38,554.
LARGE_ROW = 512


@cache
def has_triton() -> bool:
    """Return whether Triton kernels can be built here."""
    return find_spec("triton") is not None


@dataclass
class RowWeights:
    """Flat weights with their optimizer state. M rows of P elements."""

    weights: Tensor  # [M, P]
    first: Tensor  # [M, P] momentum
    second: Tensor  # [M, P] mean square of the gradient
    steps: Tensor  # [M] updates that the row has had

    @staticmethod
    def zeros(rows: int, width: int, device: torch.device) -> RowWeights:
        first, second, weights = (torch.zeros(rows, width, device=device) for _ in range(3))
        return RowWeights(weights, first, second, torch.zeros(rows, device=device))

    def restart(self, weights: Tensor) -> None:
        """Give new weights and a clean optimizer to all rows.  # weights [M, P]"""
        self.weights.copy_(weights)
        for clean in (self.first, self.second, self.steps):
            clean.zero_()

    def rewrite_rows(self, index: Tensor, weights: Tensor) -> None:
        """Give new weights and a clean optimizer to some rows.  # index [k], weights [k, P]"""
        self.weights.index_copy_(0, index, weights)
        for clean in (self.first, self.second, self.steps):
            clean.index_fill_(0, index, 0.0)

    def move_rows(self, source: Tensor, target: Tensor, start: int = 0) -> None:
        """Copy rows from column `start` on, with their optimizers, to other rows.  # source, target [k]"""
        for field in (self.weights, self.first, self.second):
            rows = field.index_select(0, source)
            field.index_copy_(
                0, target, torch.cat([rows[:, start:], torch.zeros_like(rows[:, :start])], dim=1)
            )
        self.steps.index_copy_(0, target, self.steps.index_select(0, source))

    def span(self, start: int, stop: int) -> RowWeights:
        """Return rows start..stop as views."""
        return RowWeights(**{name: value[start:stop] for name, value in self.tensors().items()})

    def columns(self, which: slice) -> RowWeights:
        """Return some columns of all rows as views."""
        weights, first, second = (field[:, which] for field in (self.weights, self.first, self.second))
        return RowWeights(weights, first, second, self.steps)

    def fetch(self, source: RowWeights, index: Tensor) -> None:
        """Copy the chosen rows of `source` here.  # index [M]"""
        for name, value in self.tensors().items():
            torch.index_select(getattr(source, name), 0, index, out=value)

    def put(self, index: Tensor, rows: RowWeights) -> None:
        """Write rows that were fetched back to where they came from.  # index [n]"""
        for name, value in self.tensors().items():
            value.index_copy_(0, index, getattr(rows, name))

    def tensors(self) -> dict[str, Tensor]:
        return {f.name: getattr(self, f.name) for f in fields(self)}


def learn_rows(
    rows: RowWeights,
    gradient: Tensor,
    norms: Tensor,
    lr: Tensor,
    active: Tensor,
    config: PopulationConfig,
    gaps: Tensor | None = None,
    copy: Tensor | None = None,
) -> None:
    """Clip each row's gradient by the norm given for it and update the active rows, each at its own rate.

    gradient [M, P]; norms, lr [M]; active [M] bool; gaps [M, 2]: first and last columns that are 0 and stay
    so, which need not be read; copy [M, P]: the weights in another precision, which follow
    """
    if rows.weights.is_cuda and has_triton():
        from esper.population import kernels

        kernels.learn_rows(rows, gradient, norms, lr, active, config, gaps, copy)
        return
    if config.optimizer == "adamw" and gradient.device.type == "cpu" and gradient.shape[1] >= LARGE_ROW:
        _fused_adamw(rows, gradient.to(rows.weights.dtype), norms, lr, active, config)
    else:
        step_rows(rows, clip_rows(gradient, norms, config.clip_norm), lr, active, config)
    if copy is not None:
        copy.copy_(rows.weights)


def _fused_adamw(
    rows: RowWeights, gradient: Tensor, norms: Tensor, lr: Tensor, active: Tensor, config: PopulationConfig
) -> None:
    """Do the same by torch's fused kernel: one pass over a row, where `step_rows` makes twenty."""
    scale = (config.clip_norm / (norms + 1e-6)).clamp(max=1.0)  # as in `clip_rows`
    shares = scale.tolist()
    clipped = [row if k == 1.0 else row * k for row, k in zip(gradient.unbind(), shares, strict=True)]
    by_rate: dict[float, list[int]] = {}  # a call of the kernel has one rate
    for row, (rate, learns) in enumerate(zip(lr.tolist(), active.tolist(), strict=True)):
        if learns:
            by_rate.setdefault(rate, []).append(row)
    rows.steps.add_(active)
    fields = [field.unbind() for field in rows.tensors().values()]
    for rate, chosen in by_rate.items():
        weights, first, second, steps = ([field[row] for row in chosen] for field in fields)
        # What torch.optim.AdamW(fused=True) calls.
        torch._fused_adamw_(
            weights, [clipped[row] for row in chosen], first, second, [], steps, lr=rate, eps=1e-8,
            beta1=config.momentum, beta2=config.second_beta, weight_decay=config.weight_decay,
            amsgrad=False, maximize=False,
        )  # fmt: skip


def clip_rows(gradient: Tensor, norms: Tensor, limit: float) -> Tensor:
    """Scale down each row whose norm is above the limit.  # [M, P], [M] → [M, P]

    The norm given for a row may be that of several rows that are clipped together.
    """
    # As torch.nn.utils.clip_grad_norm_, which adds the same 1e-6.
    return gradient * (limit / (norms + 1e-6)).clamp(max=1.0).unsqueeze(1)


def step_rows(
    rows: RowWeights, gradient: Tensor, lr: Tensor, active: Tensor, config: PopulationConfig
) -> None:
    """Update the active rows; the others keep every bit.  # gradient [M, P], lr and active [M]"""
    update = _adamw if config.optimizer == "adamw" else _sgd
    update(rows, gradient, lr, active, config)


def _adamw(rows: RowWeights, gradient: Tensor, lr: Tensor, active: Tensor, config: PopulationConfig) -> None:
    beta1, beta2 = config.momentum, config.second_beta
    column = active.unsqueeze(1)
    rows.steps.add_(active)
    # m = beta1 · m + (1 - beta1) · g;  v = beta2 · v + (1 - beta2) · g²
    first = torch.lerp(gradient, rows.first, beta1)
    second = torch.lerp(gradient.square(), rows.second, beta2)
    count = rows.steps.clamp(min=1.0).unsqueeze(1)
    # w -= lr · (m / (1 - beta1^n) / (sqrt(v / (1 - beta2^n)) + eps) + decay · w)
    root = (second / (1.0 - beta2**count)).sqrt().add_(1e-8)
    move = first / (1.0 - beta1**count) / root + config.weight_decay * rows.weights
    rows.weights.copy_(torch.where(column, rows.weights - lr.unsqueeze(1) * move, rows.weights))
    rows.first.copy_(torch.where(column, first, rows.first))
    rows.second.copy_(torch.where(column, second, rows.second))


def _sgd(rows: RowWeights, gradient: Tensor, lr: Tensor, active: Tensor, config: PopulationConfig) -> None:
    column = active.unsqueeze(1)
    rows.steps.add_(active)
    # m = momentum · m + g;  w -= lr · (m + decay · w): decoupled decay, unlike torch.optim.SGD
    first = config.momentum * rows.first + gradient
    move = first + config.weight_decay * rows.weights
    rows.weights.copy_(torch.where(column, rows.weights - lr.unsqueeze(1) * move, rows.weights))
    rows.first.copy_(torch.where(column, first, rows.first))


def moment_decays(config: PopulationConfig) -> tuple[float, float]:
    """Return by how much the first and the second moment decay in a step, for moments that start at 0.

    The momentum of sgd is no mean, so that its decay counts as 0; see `moment_scale`.
    """
    return (config.momentum, config.second_beta) if config.optimizer == "adamw" else (0.0, 0.0)


Steps = TypeVar("Steps", float, Tensor)


def moment_scale(decay: float, old: Steps, new: Steps) -> Steps:
    """Return what to multiply a moment after `new` steps with, so that it means the same after `old` steps.

    A moment m after n steps stands for the mean m / (1 - decay^n), from which Adam's bias correction comes.
    """
    return (1.0 - decay**old) / (1.0 - decay**new)


# ---- schedules: a share of the peak rate, by how far a member has come ----

LAST_SHARE = 1e-3  # a schedule that falls ends here
FIRST_SHARE = 0.04  # one_cycle begins here


def rate_share(done: Tensor, config: PopulationConfig) -> Tensor:
    """Return the share of the peak learning rate of members that have come so far.  # done [n] → [n], 0..1"""
    return SCHEDULES[config.schedule](done, config)


def _cosine(done: Tensor, config: PopulationConfig, start: float = 0.0) -> Tensor:
    return (0.5 * (1.0 + torch.cos(math.pi * (done - start) / (1.0 - start)))).clamp(min=LAST_SHARE)


def _one_cycle(done: Tensor, config: PopulationConfig) -> Tensor:
    if config.warmup == 0:
        return _cosine(done, config)
    # Half a cosine up from FIRST_SHARE over the warm-up, then half a cosine down.
    rise = FIRST_SHARE + (1.0 - FIRST_SHARE) * 0.5 * (1.0 - torch.cos(math.pi * done / config.warmup))
    return torch.where(done < config.warmup, rise, _cosine(done, config, config.warmup))


def _flat(done: Tensor, config: PopulationConfig) -> Tensor:
    """Up over `warmup`, flat, then linearly down to 0 over the last `decay`."""
    fall = ((1.0 - done) / max(config.decay, 1e-6)).clamp(0.0, 1.0)
    if config.warmup == 0:
        return fall
    return torch.minimum((FIRST_SHARE + done / config.warmup).clamp(max=1.0), fall)


SCHEDULES: dict[str, Callable[[Tensor, PopulationConfig], Tensor]] = {
    "constant": lambda done, config: torch.ones_like(done),
    "cosine": _cosine,
    "one_cycle": _one_cycle,
    "flat": _flat,
}
