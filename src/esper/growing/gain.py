"""Did growing help? The same model with and without growth, on data that neither has seen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from esper.utils.statistics import mean_interval


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """The share of samples whose class has the largest output.  # [n, ..., classes], [n, ...] → []"""
    return (outputs.argmax(-1) == targets).float().mean()


@dataclass(frozen=True)
class Gain:
    """Test scores of pairs of runs, and their difference with a 95 % interval."""

    grown: tuple[float, ...]
    ungrown: tuple[float, ...]
    mean: float
    half_width: float

    @property
    def helped(self) -> bool:
        """Whether the whole interval lies above 0."""
        return self.mean - self.half_width > 0

    def __str__(self) -> str:
        pairs = len(self.grown)
        without, with_ = sum(self.ungrown) / pairs, sum(self.grown) / pairs
        difference = (
            f"test score without growth {without:.3f}, with growth {with_:.3f}: a difference of "
            f"{100 * self.mean:+.2f} ± {100 * self.half_width:.2f} points over {pairs} pairs"
        )
        if self.helped:
            return f"{difference}. Growth helped."
        lost = self.mean + self.half_width < 0
        return f"{difference}. Growth {'hurt' if lost else 'did not help: the interval holds 0'}."


def gain_of(grown: Sequence[float], ungrown: Sequence[float]) -> Gain:
    """The gain of paired test scores, at least two of each."""
    mean, half = mean_interval([a - b for a, b in zip(grown, ungrown, strict=True)])
    return Gain(tuple(grown), tuple(ungrown), mean, half)
