"""The health of each seed's gradients, from the flat gradient rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from esper.population.bodies import Bodies
from esper.population.plan import Plan, ship

VANISHING_NORM = 1e-7
EXPLODING_NORM = 10.0
VANISHING_WEIGHT = 0.5
EXPLODING_WEIGHT = 0.8
_HUGE = 1e30  # stands for a square that is not finite, so that one tensor does not spoil its neighbours


@dataclass(frozen=True)
class SeedGradients:
    """Of the last minibatch of an epoch, each [N, S], NaN where no seed was trained."""

    norm: Tensor
    health: Tensor
    vanishing: Tensor  # share of the seed's tensors
    exploding: Tensor
    ratio: Tensor  # (|g_seed| / |g_host|) · sqrt(P_host / P_seed)

    @staticmethod
    def cat(parts: Sequence[SeedGradients]) -> SeedGradients:
        return SeedGradients(
            **{f.name: torch.cat([getattr(p, f.name) for p in parts]) for f in fields(SeedGradients)}
        )


def gradient_health(vanishing: Tensor, exploding: Tensor) -> Tensor:
    return (1.0 - VANISHING_WEIGHT * vanishing - EXPLODING_WEIGHT * exploding).clamp(0.0, 1.0)


def measure_seeds(
    bodies: Bodies, plan: Plan, gradient: Tensor, host_norm: Tensor, shape: tuple[int, int]
) -> SeedGradients:
    """Gradient statistics of every live seed.  # gradient [L, P], host_norm [n]"""
    table = torch.full((4, shape[0] * shape[1]), math.nan, device=gradient.device)
    if plan.live_seeds.shape[0]:
        host = host_norm.index_select(0, plan.live_seeds // shape[1])
        table[:, plan.live_seeds] = _statistics(bodies, plan, gradient, host)
    norm, vanishing, exploding, ratio = table.view(4, *shape)
    return SeedGradients(norm, gradient_health(vanishing, exploding), vanishing, exploding, ratio)


def _statistics(bodies: Bodies, plan: Plan, gradient: Tensor, host_norm: Tensor) -> Tensor:
    """Norm, vanishing, exploding and ratio of each live seed.  # gradient [L, P], host_norm [L] → [4, L]"""
    groups = [group for group in plan.groups if group.live]
    live = [group.live for group in groups]
    layouts = [bodies.slots[group.slot].seeds[group.blueprint].layout for group in groups]
    tensors, parameters = (
        ship(np.repeat(numbers, live), gradient.device)  # [L]
        for numbers in ([len(own.names) or 1 for own in layouts], [own.total or 1 for own in layouts])
    )
    squares = gradient.square().nan_to_num(nan=_HUGE, posinf=_HUGE).clamp(max=_HUGE)
    parts = zip(groups, squares.split(live), strict=True)
    sums = [rows @ bodies.membership(group.slot, group.blueprint) for group, rows in parts]
    norms = torch.cat(sums).sqrt()  # [L, most tensors], 0 where a seed has fewer
    vanishing = ((norms < VANISHING_NORM).sum(1) - (norms.shape[1] - tensors)) / tensors
    exploding = (norms > EXPLODING_NORM).sum(1) / tensors
    total = norms.square().sum(1).sqrt()
    ratio = total / (host_norm + 1e-12) * (bodies.host_width / parameters).sqrt()
    return torch.stack([total, vanishing, exploding, ratio])
