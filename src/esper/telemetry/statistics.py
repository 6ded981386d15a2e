"""Means with 95 % intervals, and paired differences between controllers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from esper.errors import UserError
from esper.telemetry.schema import NAN, ControllerResult, PairedDifference

# Student's t at 97.5 %, for 1 to 10 degrees of freedom.
_T_TABLE = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
COMPARED = ("test_accuracy", "parameters", "potential", "flops")


def t_quantile(degrees: int) -> float:
    """Student's t at 97.5 %; beyond the table its expansion about the normal, good to .002."""
    if degrees < 1:
        return NAN
    return (
        _T_TABLE[degrees - 1]
        if degrees <= len(_T_TABLE)
        else 1.95996 + 2.3723 / degrees + 2.8225 / degrees**2
    )


def mean_interval(values: Sequence[float]) -> tuple[float, float]:
    """The mean of the finite values and the half-width of its 95 % interval (NaN for fewer than two)."""
    finite = np.asarray(values, dtype=np.float64).ravel()
    finite = finite[np.isfinite(finite)]
    if finite.size == 0:
        return NAN, NAN
    if finite.size == 1:
        return float(finite[0]), NAN
    half = t_quantile(finite.size - 1) * float(finite.std(ddof=1)) / math.sqrt(finite.size)
    return float(finite.mean()), half


def paired_differences(controllers: Sequence[ControllerResult]) -> list[PairedDifference]:
    """Every controller against the first one, member by member, in every quantity that both have."""
    if not controllers:
        return []
    baseline = controllers[0]
    differences = []
    for other in controllers[1:]:
        if list(other.members) != list(baseline.members):
            raise UserError(
                f"{other.name} and {baseline.name} ran different members, so no differences can be paired; "
                "compare controllers on the same member ids"
            )
        for quantity in COMPARED:
            if not (getattr(other, quantity) and getattr(baseline, quantity)):
                continue
            gaps = np.subtract(getattr(other, quantity), getattr(baseline, quantity))
            mean, half = mean_interval(gaps.tolist())
            differences.append(
                PairedDifference(other.name, baseline.name, quantity, mean, half, len(baseline.members))
            )
    return differences


@dataclass(frozen=True)
class Verdict:
    """Whether the return rose over a run: by the linear trend over all of its rounds."""

    rose: bool
    sentence: str


def learning_verdict(returns: Sequence[float], what: str = "The return") -> Verdict:
    """An honest sentence about the course of the mean return, or of `what`, round by round."""
    finite = [value for value in returns if math.isfinite(value)]
    quarter = len(finite) // 4
    if quarter < 2:
        return Verdict(
            False, f"{len(finite)} rounds are too few to say whether the return rose; run at least 8."
        )
    change, half = trend(finite)
    first, last = float(np.mean(finite[:quarter])), float(np.mean(finite[-quarter:]))
    course = (
        f"from {first:+.3f} in the first quarter of the rounds to {last:+.3f} in the last, "
        f"by a trend of {change:+.3f} ± {half:.3f} over all of them"
    )
    if change > half:
        return Verdict(True, f"{what} rose {course}.")
    if change < -half:
        return Verdict(False, f"{what} fell {course}.")
    return Verdict(False, f"{what} did not clearly rise: it went {course}.")


def trend(values: Sequence[float]) -> tuple[float, float]:
    """By how much a straight line through the values changes from the first to the last, ± 95 %."""
    y = np.asarray(values, dtype=np.float64)
    x = np.linspace(-0.5, 0.5, y.size)  # the slope is the change from end to end
    slope = float(x @ y / (x @ x))
    rest = y - y.mean() - slope * x
    deviation = math.sqrt(float(rest @ rest) / max(y.size - 2, 1) / float(x @ x))
    return slope, t_quantile(y.size - 2) * deviation
