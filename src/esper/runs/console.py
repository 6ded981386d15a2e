"""What a run prints: a line for each round; and numbers as text."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from esper.runs.schema import NAN, RoundSummary
from esper.utils.statistics import learning_verdict


def number(value: float, form: str) -> str:
    """Format a value; a dash stands for what is not finite."""
    return format(value, form) if math.isfinite(value) else "–"


def interval(mean: float, half: float, form: str) -> str:
    """Return '0.13 ± 0.02', or the mean alone where there is no interval."""
    if not math.isfinite(half):
        return number(mean, form)
    return f"{number(mean, form)} ± {number(half, form.lstrip('+'))}"


def three_digits(*values: float) -> str:
    """Return the format that shows the largest of the values with about three digits and no exponent."""
    size = max((abs(value) for value in values if math.isfinite(value)), default=0.0)
    return ",.0f" if size >= 100 else ",.1f" if size >= 10 else ".2f" if size >= 1 else ".3f"


def duration(seconds: float) -> str:
    """Format seconds as 1:02:03 or 2:03."""
    if not math.isfinite(seconds):
        return "–"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def learning_in_words(rounds: Iterable[Mapping[str, Any]]) -> str:
    """Say whether a run learned: by the return above ungrown twins where every round has it.

    rounds: the lines of metrics.jsonl, which are not made records: that would take most of a report's time.
    """
    lines = [(line.get("return_mean"), line.get("extra", {}).get("above_twin")) for line in rounds]
    if all(gain is not None for _, gain in lines):
        what = "The controller's return above that of the same networks without growth"
        return learning_verdict([gain for _, gain in lines], what)
    return learning_verdict([NAN if mean is None else mean for mean, _ in lines])


def notice_stop(path: Path, seconds: float) -> None:
    """Say inside a signal handler that a round is finished first, in some seconds; NaN: not known."""
    left = "how long the first takes is not known" if math.isnan(seconds) else f"about {duration(seconds)}"
    said = f"finishing the round in flight ({left}) to save it in {path}; again to stop now, without it\n"
    # A buffered stream may be in the middle of a write when the signal comes.
    os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, said.encode())


def round_lines(summary: RoundSummary) -> str:
    """Return a round in one line, with a further line for each anomaly."""
    shares = sorted(summary.op_shares.items(), key=lambda item: -item[1])
    above = interval(summary.extra.get("above_twin", NAN), summary.extra.get("above_twin_ci", NAN), "+.3f")
    parts = [
        f"round {summary.round}/{summary.rounds}",
        f"return {interval(summary.return_mean, summary.return_ci, '+.3f')}",
        f"above twin {above}" if "above_twin" in summary.extra else "",
        f"accuracy {interval(100 * summary.accuracy_mean, 100 * summary.accuracy_ci, '.1f')} %",
        f"parameters x {number(summary.parameter_ratio_mean, '.2f')}",
        f"{number(summary.member_epochs_per_second, ',.0f')} member-epochs/s",
        f"{duration(summary.seconds_left)} left",
        " ".join(f"{op} {share:.0%}" for op, share in shares if share >= 0.005),  # less is shown as 0 %
    ]
    line = "  ".join(part for part in parts if part)
    return "\n".join([line, *(f"  ! {text}" for text in summary.anomalies)])
