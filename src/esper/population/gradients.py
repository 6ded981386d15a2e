"""The health of each seed's gradients, from the flat gradient rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from esper.population.bodies import Bodies
from esper.population.plan import Group, Plan, ship

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


def measure_seeds(
    bodies: Bodies, plan: Plan, gradient: Tensor, host_norm: Tensor, shape: tuple[int, int]
) -> SeedGradients:
    """Gradient statistics of every live seed.  # gradient [L, P], host_norm [n]"""
    table = torch.full((4, *shape), math.nan, device=gradient.device)
    groups = [group for group in plan.groups if group.live]
    if any(group.place == 0 for group in groups):
        parts = zip(groups, gradient.split([group.live for group in groups]), strict=True)
        seeds = [(group, rows) for group, rows in parts if group.place == 0]
        members, slots = (
            torch.cat(
                [
                    index
                    for g, index in zip(groups, field.split([g.live for g in groups]), strict=True)
                    if g.place == 0
                ]
            )
            for field in (plan.live_member, plan.live_slot)
        )
        table[:, members, slots] = _statistics(bodies, seeds, host_norm.index_select(0, members))
    norm, vanishing, exploding, ratio = table
    return SeedGradients(norm, gradient_health(vanishing, exploding), vanishing, exploding, ratio)


def _statistics(bodies: Bodies, seeds: Sequence[tuple[Group, Tensor]], host_norm: Tensor) -> Tensor:
    """Norm, vanishing, exploding and ratio of each live seed, group by group.  # host_norm [L] → [4, L]"""
    live = [group.live for group, _ in seeds]
    spans = [bodies.slots[group.slot].body(group.form) for group, _ in seeds]
    tensors, parameters = (
        ship(np.repeat(numbers, live), host_norm.device)  # [L]
        for numbers in ([len(body.spans()) or 1 for body in spans], [body.parameters or 1 for body in spans])
    )
    sums = [
        rows.square().nan_to_num(nan=_HUGE, posinf=_HUGE).clamp(max=_HUGE)
        @ bodies.membership(group.slot, group.form)
        for group, rows in seeds
    ]
    norms = torch.cat(sums).sqrt()  # [L, most tensors], 0 where a seed has fewer
    vanishing = ((norms < VANISHING_NORM).sum(1) - (norms.shape[1] - tensors)) / tensors
    exploding = (norms > EXPLODING_NORM).sum(1) / tensors
    total = norms.square().sum(1).sqrt()
    ratio = total / (host_norm + 1e-12) * (bodies.host_parameters / parameters).sqrt()
    return torch.stack([total, vanishing, exploding, ratio])
