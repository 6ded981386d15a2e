"""What is paid. Everything derives from one potential, so that no loop of actions can farm it.

    Φ = accuracy_weight · accuracy − rent_weight · ln(parameters / host parameters)

`shaped` pays γΦ(s') − Φ(s) at every step; with the γ of the returns it telescopes to γ^T Φ(end) − Φ(start).
`sparse` pays Φ(end) − Φ(start) at the last step. A mode is one function and a line in `REWARDS`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from esper.simic.config import RewardConfig


@dataclass(frozen=True)
class Potentials:
    """Φ of every member where a step stands."""

    start: Tensor  # [N] when the episode began
    before: Tensor  # [N] at the decision
    after: Tensor  # [N] when the epoch was through
    last: Tensor  # [N] bool: the episode ends here
    gamma: float


def potential(accuracy: Tensor, parameter_ratio: Tensor, config: RewardConfig) -> Tensor:
    """Φ from accuracy 0..1 and parameters over the host's own.  # [N], [N] → [N]"""
    return config.accuracy_weight * accuracy - config.rent_weight * torch.log(parameter_ratio)


def shaped(at: Potentials) -> Tensor:
    """γΦ(s') − Φ(s).  # [N]"""
    return at.gamma * at.after - at.before


def sparse(at: Potentials) -> Tensor:
    """Φ(end) − Φ(start) at the last step, 0 before it.  # [N]"""
    return torch.where(at.last, at.after - at.start, 0.0)


REWARDS: dict[str, Callable[[Potentials], Tensor]] = {"shaped": shaped, "sparse": sparse}
