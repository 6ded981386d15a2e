"""The loss and the accuracy of rows, and the metrics of an epoch and of a validation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor

from esper.population.network import RowNetwork
from esper.population.plan.packing import Plan

VANISHING_NORM = 1e-7
EXPLODING_NORM = 10.0
VANISHING_WEIGHT = 0.5
EXPLODING_WEIGHT = 0.8
_HUGE = 1e30  # stands for a square that is not finite, so that one tensor does not spoil its neighbours


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean loss of each row, at least in float32.

    outputs [R, B, ..., classes], targets [R, B, ...] → [R]
    """
    exact = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
    picked = F.log_softmax(exact, dim=-1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    return -picked.flatten(1).mean(1)


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the share of right answers of each row.  # shapes as in `cross_entropy`"""
    return (outputs.argmax(-1) == targets).flatten(1).float().mean(1)


@dataclass(frozen=True)
class SeedGradients:
    """Gradients of seeds in the last minibatch of an epoch, each [N, S], NaN where no seed was trained."""

    norm: Tensor
    health: Tensor
    vanishing: Tensor  # share of the seed's tensors
    exploding: Tensor


@dataclass(frozen=True)
class TrainMetrics:
    """The metrics of an epoch of training."""

    loss: Tensor  # [N] mean over the epoch
    seeds: SeedGradients  # each [N, S], NaN where nothing was trained

    @staticmethod
    def unmeasured(num_members: int, num_slots: int, device: torch.device) -> TrainMetrics:
        """Return NaN everywhere."""
        loss = torch.full((num_members,), math.nan, device=device)
        shape = (len(fields(SeedGradients)), num_members, num_slots)
        return TrainMetrics(loss, SeedGradients(*torch.full(shape, math.nan, device=device)))


@dataclass(frozen=True)
class ValidationMetrics:
    """The metrics of a validation. Points are percentage points of accuracy; NaN is unmeasured."""

    loss: Tensor  # [N]
    accuracy: Tensor  # [N] 0..1
    contribution: Tensor  # [N, S] points lost without the seed
    shadow_gain: Tensor  # [N, S] points gained if the isolated seed were adopted

    @staticmethod
    def unmeasured(num_members: int, num_slots: int, device: torch.device) -> ValidationMetrics:
        """Return NaN everywhere."""
        rows = torch.full((2, num_members), math.nan, device=device)
        return ValidationMetrics(*rows, *torch.full((2, num_members, num_slots), math.nan, device=device))


def worth_of_seeds(accuracy: Tensor, own: int, without: Tensor, shadow: Tensor) -> dict[str, Tensor]:
    """Compute contribution and shadow gain in points.

    accuracy [R], the members' own rows first; without, shadow [N, S]: the row without each seed and the row
    with it, -1 where there is none
    """

    def accuracy_of(rows: Tensor) -> Tensor:
        return accuracy[rows.clamp(min=0)].masked_fill(rows < 0, math.nan)

    alone = accuracy[:own].unsqueeze(1)  # [N, 1]
    return {
        "contribution": 100.0 * (alone - accuracy_of(without)),
        "shadow_gain": 100.0 * (accuracy_of(shadow) - alone),
    }


def gradient_health(vanishing: Tensor, exploding: Tensor) -> Tensor:
    """Return 1 for healthy gradients, less by the shares of tensors whose gradients vanish or explode."""
    return (1.0 - VANISHING_WEIGHT * vanishing - EXPLODING_WEIGHT * exploding).clamp(0.0, 1.0)


def measure_seeds(network: RowNetwork, plan: Plan, gradients: Sequence[Tensor]) -> SeedGradients:
    """Return the gradient statistics of every live seed.

    gradients: of the live parts of each group, [live, P] each → each [n, S]
    """
    unmeasured = plan.seed_of_slot < 0
    if not any(group.live and group.position == 0 for group in plan.groups):
        shape = (len(fields(SeedGradients)), *unmeasured.shape)
        return SeedGradients(*torch.full(shape, math.nan, device=unmeasured.device))
    table = _statistics(network, plan, gradients)
    norm, vanishing, exploding = table[:, plan.seed_of_slot.clamp(min=0)].masked_fill(unmeasured, math.nan)
    return SeedGradients(norm, gradient_health(vanishing, exploding), vanishing, exploding)


def _statistics(network: RowNetwork, plan: Plan, gradients: Sequence[Tensor]) -> Tensor:
    """Return norm, vanishing and exploding of each live seed, and anything for other live parts.

    gradients: [live, P] of each group → [3, L]
    """
    sums, counts = [], []
    for group, rows in zip(plan.groups, gradients, strict=True):
        membership, tensors = network.membership(group.slot, group.form)
        if group.position == 0:
            # The norm of every tensor of a seed at once: squares times the one-hot membership.
            rows = rows.to(membership.dtype).square().nan_to_num(nan=_HUGE, posinf=_HUGE).clamp(max=_HUGE)
            sums.append(rows @ membership[: rows.shape[1]])
        else:
            sums.append(rows.new_zeros(group.live, membership.shape[1]))
        counts.append(tensors.expand(group.live))
    padding = plan.live.shape[0] - sum(group.live for group in plan.groups)
    norms = F.pad(torch.cat(sums).sqrt(), (0, 0, 0, padding))  # [L, most tensors], 0 where a seed has fewer
    tensors = F.pad(torch.cat(counts), (0, padding), value=1.0)
    # Columns that a seed does not have are 0 and would count as vanishing: they are subtracted.
    vanishing = ((norms < VANISHING_NORM).sum(1) - (norms.shape[1] - tensors)) / tensors
    exploding = (norms > EXPLODING_NORM).sum(1) / tensors
    return torch.stack([norms.square().sum(1).sqrt(), vanishing, exploding])
