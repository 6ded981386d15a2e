"""What an estimator learns: classes, labels or numbers, each with a loss and a score for every sample."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

BySample = Callable[[Tensor, Tensor], Tensor]  # outputs [n, k], targets [n, ...] → [n]


@dataclass(frozen=True)
class Kind:
    """A kind of target.

    The score of classes and labels is the probability that the truth is given. Its mean rises with the share
    of hits and is much less a matter of luck where few samples are held out.
    """

    loss: BySample
    score: BySample  # how right each sample is; its mean is to rise
    encoded: torch.dtype  # of the targets
    columns: int  # axes of the targets behind the samples


def _class_losses(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.float(), targets, reduction="none")


def _class_chances(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs.float().softmax(-1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)


def _label_losses(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(outputs.float(), targets, reduction="none").mean(-1)


def _label_chances(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.float() * (2.0 * targets - 1.0)).sigmoid().mean(-1)


def _squared_errors(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.float() - targets).square().mean(-1)


def _explained(outputs: Tensor, targets: Tensor) -> Tensor:
    """The mean of these is R² of standardised targets."""
    return 1.0 - _squared_errors(outputs, targets)


CLASSES = Kind(_class_losses, _class_chances, torch.int64, 0)
LABELS = Kind(_label_losses, _label_chances, torch.float32, 1)
NUMBERS = Kind(_squared_errors, _explained, torch.float32, 1)


@dataclass(frozen=True)
class TargetScoring:
    """Loss and score of a batch for one kind of target, with or without a weight for each sample.

    A weight travels as a last column of the targets, so that it goes wherever its sample goes.
    """

    kind: Kind
    loss_by_sample: BySample | None  # instead of the kind's own
    weighed: bool

    def pack(self, targets: Tensor, weights: Tensor) -> Tensor:
        """Targets as the two functions take them; weights [n] are left out where nothing is weighed."""
        encoded = targets.to(self.kind.encoded)
        if not self.weighed:
            return encoded
        flat = encoded.float().view(len(encoded), -1)
        return torch.cat((flat, weights.float().unsqueeze(1)), dim=1)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The weighted mean over a batch.  # → []; raises ValueError where weights meet a single number"""
        return self._mean(self.loss_by_sample or self.kind.loss, outputs, targets)

    def score(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The weighted mean of how right the samples are, at least 0.  # → []"""
        return self._mean(self.kind.score, outputs, targets).clamp(min=0.0)

    def functions(self) -> dict[str, Any]:
        """What `esper.grow` has to be told; nothing where it knows better."""
        known = self.kind == CLASSES and not self.weighed and self.loss_by_sample is None
        return {"metric": self.score} if known else {"metric": self.score, "loss": self.loss}

    def _mean(self, function: BySample, outputs: Tensor, packed: Tensor) -> Tensor:
        if not self.weighed:
            return function(outputs, packed).mean()
        targets, weights = packed[..., :-1].to(self.kind.encoded), packed[..., -1]
        each = function(outputs, targets if self.kind.columns else targets.squeeze(-1))
        if each.shape != weights.shape:
            raise ValueError(
                f"the loss gives shape {list(each.shape)} for {len(weights)} samples that have weights; it "
                "must return one number for each sample"
            )
        return (each * weights).sum() / weights.sum().clamp(min=1e-12)
