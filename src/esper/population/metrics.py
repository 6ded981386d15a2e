"""What epochs of training and validations showed."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from esper.population.gradients import SeedGradients


def _nan(
    num_members: int, num_slots: int, device: torch.device, rows: int, tables: int
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """As many tensors [N] and [N, S] of NaN, made at once."""
    sizes = [num_members] * rows + [num_members * num_slots] * tables
    parts = torch.full((sum(sizes),), math.nan, device=device).split(sizes)
    return parts[:rows], tuple(part.view(num_members, num_slots) for part in parts[rows:])


@dataclass(frozen=True)
class TrainMetrics:
    """What an epoch of training showed."""

    loss: Tensor  # [N] mean over the epoch
    shadow_loss: Tensor  # [N, S] of seeds that train in isolation, NaN elsewhere
    seeds: SeedGradients  # each [N, S], NaN where nothing was trained

    @staticmethod
    def unmeasured(num_members: int, num_slots: int, device: torch.device) -> TrainMetrics:
        """NaN everywhere."""
        rows, tables = _nan(num_members, num_slots, device, 1, 1 + len(fields(SeedGradients)))
        return TrainMetrics(rows[0], tables[0], SeedGradients(*tables[1:]))


@dataclass(frozen=True)
class ValidationMetrics:
    """What a validation showed. Points are percentage points of accuracy; NaN is unmeasured."""

    loss: Tensor  # [N]
    accuracy: Tensor  # [N] 0..1
    contribution: Tensor  # [N, S] points lost without the seed
    shadow_gain: Tensor  # [N, S] points gained if the isolated seed were adopted

    @staticmethod
    def unmeasured(num_members: int, num_slots: int, device: torch.device) -> ValidationMetrics:
        """NaN everywhere."""
        rows, tables = _nan(num_members, num_slots, device, 2, 2)
        return ValidationMetrics(*rows, *tables)


def worth_of_seeds(accuracy: Tensor, own: int, without: Tensor, shadow: Tensor) -> dict[str, Tensor]:
    """Compute contribution and shadow gain in points, from the accuracies of the rows.

    Of each seed, the row without it and the row with it if it were adopted [N, S], -1 where none was asked
    for; accuracy [R], the members' own rows first
    """

    def answer(rows: Tensor) -> Tensor:
        """The accuracy of each asked row, NaN where none was asked for."""
        return accuracy[rows.clamp(min=0)].masked_fill(rows < 0, math.nan)

    alone = accuracy[:own].unsqueeze(1)  # [N, 1]
    return {
        "contribution": 100.0 * (alone - answer(without)),
        "shadow_gain": 100.0 * (answer(shadow) - alone),
    }
