"""What rows are trained for and judged by. Each function goes from rows of outputs to one number a row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

RowFunction = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Objective:
    """A loss to train by and a score in 0..1 to judge by, both means over the samples of a row."""

    loss: RowFunction  # outputs [R, B, ...], targets [R, B, ...] → [R]
    score: RowFunction


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """outputs [R, B, ..., classes], targets [R, B, ...] → [R]"""
    log_probs = F.log_softmax(outputs.float(), dim=-1)
    picked = log_probs.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    return -picked.flatten(1).mean(1)


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.argmax(-1) == targets).flatten(1).float().mean(1)


CLASSIFICATION = Objective(cross_entropy, accuracy)
