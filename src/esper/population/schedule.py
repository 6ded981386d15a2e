"""Learning rate schedules: a share of the peak rate, by how far a member has come."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from esper.population.config import PopulationConfig

LEAST = 1e-3  # a schedule that falls ends here
FIRST = 0.04  # one_cycle begins here


def rate_share(done: Tensor, config: PopulationConfig) -> Tensor:
    """Return the share of the peak learning rate of members that have come so far.  # done [n] → [n], 0..1"""
    return SCHEDULES[config.schedule](done, config)


def _constant(done: Tensor, config: PopulationConfig) -> Tensor:
    return torch.ones_like(done)


def _cosine(done: Tensor, config: PopulationConfig, start: float = 0.0) -> Tensor:
    return (0.5 * (1.0 + torch.cos(math.pi * (done - start) / (1.0 - start)))).clamp(min=LEAST)


def _one_cycle(done: Tensor, config: PopulationConfig) -> Tensor:
    if config.warmup == 0:
        return _cosine(done, config)
    # Half a cosine up from FIRST over the warm-up, then half a cosine down.
    rise = FIRST + (1.0 - FIRST) * 0.5 * (1.0 - torch.cos(math.pi * done / config.warmup))
    return torch.where(done < config.warmup, rise, _cosine(done, config, config.warmup))


def _flat(done: Tensor, config: PopulationConfig) -> Tensor:
    """Up over `warmup`, flat, then linearly down to 0 over the last `decay`."""
    fall = ((1.0 - done) / max(config.decay, 1e-6)).clamp(0.0, 1.0)
    if config.warmup == 0:
        return fall
    return torch.minimum((FIRST + done / config.warmup).clamp(max=1.0), fall)


SCHEDULES: dict[str, Callable[[Tensor, PopulationConfig], Tensor]] = {
    "constant": _constant,
    "cosine": _cosine,
    "one_cycle": _one_cycle,
    "flat": _flat,
}
