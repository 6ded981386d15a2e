"""The health of each seed's gradients, from the flat gradient rows."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from esper.population.bodies import Bodies
from esper.population.plan import Plan

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


def gradient_health(vanishing: Tensor, exploding: Tensor) -> Tensor:
    return (1.0 - VANISHING_WEIGHT * vanishing - EXPLODING_WEIGHT * exploding).clamp(0.0, 1.0)


def measure_seeds(bodies: Bodies, plan: Plan, gradient: Tensor, host_norm: Tensor) -> SeedGradients:
    """Gradient statistics of every live seed.  # gradient [L, P], host_norm [n] → each [n, S]"""
    if not any(group.live and group.place == 0 for group in plan.groups):
        return SeedGradients(*torch.full((5, *plan.seat.shape), math.nan, device=gradient.device))
    table = _statistics(bodies, plan, gradient, host_norm.index_select(0, plan.live_member))
    norm, vanishing, exploding, ratio = table[:, plan.seat.clamp(min=0)].masked_fill(plan.seat < 0, math.nan)
    return SeedGradients(norm, gradient_health(vanishing, exploding), vanishing, exploding, ratio)


def _statistics(bodies: Bodies, plan: Plan, gradient: Tensor, host_norm: Tensor) -> Tensor:
    """Norm, vanishing, exploding and ratio of each live part that is a seed; of others, anything.

    gradient [L, P], host_norm [L] → [4, L]
    """
    sums, facts, first = [], [], 0
    for group in plan.groups:
        rows, first = gradient[first : first + group.live], first + group.live
        membership, numbers = bodies.membership(group.slot, group.form)
        if group.place == 0:
            rows = rows.square().nan_to_num(nan=_HUGE, posinf=_HUGE).clamp(max=_HUGE)
            sums.append(rows @ membership)
        else:
            sums.append(rows.new_zeros(group.live, membership.shape[1]))
        facts.append(numbers.expand(group.live, -1))
    rest = gradient.shape[0] - first  # spare room
    norms = pad(torch.cat(sums).sqrt(), (0, 0, 0, rest))  # [L, most tensors], 0 where a seed has fewer
    tensors, parameters = pad(torch.cat(facts), (0, 0, 0, rest), value=1.0).unbind(1)
    vanishing = ((norms < VANISHING_NORM).sum(1) - (norms.shape[1] - tensors)) / tensors
    exploding = (norms > EXPLODING_NORM).sum(1) / tensors
    total = norms.square().sum(1).sqrt()
    ratio = total / (host_norm + 1e-12) * (bodies.host_parameters / parameters).sqrt()
    return torch.stack([total, vanishing, exploding, ratio])
