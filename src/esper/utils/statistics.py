"""Means with 95 % intervals, and whether a series rose."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from scipy.special import stdtrit

NAN = float("nan")


def t_quantile(degrees: int, intervals: int = 1) -> float:
    """Return the half-width of a 95 % interval in standard errors, by Student's t.

    With several intervals, of those that hold all at once with 95 % (after Bonferroni). NaN below one degree
    of freedom.
    """
    return float(stdtrit(degrees, 1 - 0.025 / intervals)) if degrees >= 1 else NAN


def mean_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean of the finite values and the half-width of its 95 % interval (NaN below two)."""
    finite = np.asarray(values, dtype=np.float64).ravel()
    finite = finite[np.isfinite(finite)]
    if finite.size == 0:
        return NAN, NAN
    if finite.size == 1:
        return float(finite[0]), NAN
    # t · s / √n
    half = t_quantile(finite.size - 1) * float(finite.std(ddof=1)) / math.sqrt(finite.size)
    return float(finite.mean()), half


def paired_interval(values: Sequence[float], baseline: Sequence[float]) -> tuple[float, float]:
    """Return the mean of `values - baseline`, pair by pair, and the half-width of its 95 % interval."""
    return mean_interval(np.subtract(values, baseline).ravel().tolist())


def clear_of_zero(mean: float, half: float, count: int, comparisons: int = 1) -> bool:
    """Return whether the 95 % interval excludes 0, also if `comparisons` of them are to hold at once."""
    wider = half * t_quantile(count - 1, comparisons) / t_quantile(count - 1)
    return abs(mean) > wider


def learning_verdict(returns: Sequence[float], what: str = "The return") -> str:
    """Say in a sentence whether the mean return, or `what`, rose, by the linear trend over all rounds."""
    finite = [value for value in returns if math.isfinite(value)]
    quarter = len(finite) // 4
    if quarter < 2:
        few = f"{len(finite)} round is" if len(finite) == 1 else f"{len(finite)} rounds are"
        return f"{few} too few to say whether {what[0].lower()}{what[1:]} rose; run at least 8."
    change, half = trend(finite)
    first, last = float(np.mean(finite[:quarter])), float(np.mean(finite[-quarter:]))
    change_text = (
        f"from {first:+.3f} in the first quarter of the rounds to {last:+.3f} in the last, "
        f"by a trend of {change:+.3f} ± {half:.3f} over all of them"
    )
    if change > half:
        return f"{what} rose {change_text}."
    if change < -half:
        return f"{what} fell {change_text}."
    return f"{what} did not clearly rise: it went {change_text}."


def trend(values: Sequence[float]) -> tuple[float, float]:
    """Fit a line; return its change from the first to the last value, and the half-width at 95 %."""
    x = np.linspace(-0.5, 0.5, len(values))  # the slope is the change from end to end
    (slope, _), covariance = np.polyfit(x, values, 1, cov=True)
    return float(slope), t_quantile(len(values) - 2) * math.sqrt(covariance[0, 0])
