"""What a run prints: a line for each round, JSON lines for machines, or nothing; and numbers as text."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Sequence

from rich.console import Console

from esper.runs.schema import RoundSummary, to_json
from esper.utils.statistics import learning_verdict

_ESTIMATE_AFTER = 2.0  # seconds of steps


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


def learning_in_words(rounds: Sequence[RoundSummary]) -> str:
    """Say whether a run learned: by the return above ungrown twins where every round has it."""
    gains = [r.extra["above_twin"] for r in rounds if "above_twin" in r.extra]
    if len(gains) == len(rounds):
        return learning_verdict(gains, "The return above that of ungrown twins")
    return learning_verdict([r.return_mean for r in rounds])


class QuietView:
    """Shows notices only; the other views derive from it."""

    def __init__(self) -> None:
        self._first: tuple[float, float] | None = None  # (clock, rounds done) at the first call of `progress`
        self._latest = (math.nan, math.nan)

    def progress(self, rounds_done: float) -> None:
        """Note how far the run is, in rounds: 3.5 is half-way through the fourth."""
        self._latest = (time.monotonic(), rounds_done)
        self._first = self._first or self._latest

    @property
    def seconds_per_round(self) -> float:
        """Mean wall time of a round since the first call of `progress`; NaN before the second."""
        if self._first is None or self._latest[1] <= self._first[1]:
            return math.nan
        return (self._latest[0] - self._first[0]) / (self._latest[1] - self._first[1])

    @property
    def round_ends_in(self) -> float:
        """Seconds until the current round is over; NaN while that is unknown."""
        rest = 1 - self._latest[1] % 1
        return rest * self.seconds_per_round - (time.monotonic() - self._latest[0])

    def notice(self, text: str) -> None:
        """Print a text at once. Safe inside a signal handler: no buffered stream is touched."""
        os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, f"{text}\n".encode())

    def update(self, summary: RoundSummary) -> None:
        """Show a finished round."""


class JsonView(QuietView):
    """One JSON object per round, the line that metrics.jsonl gets."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def update(self, summary: RoundSummary) -> None:
        self._console.file.write(to_json(summary) + "\n")
        self._console.file.flush()


class PlainView(QuietView):
    """One line per round, and an estimate of the whole as soon as there is one."""

    def __init__(self, console: Console, rounds: int) -> None:
        super().__init__()
        self._console = console
        self._rounds: int | None = rounds

    def progress(self, rounds_done: float) -> None:
        super().progress(rounds_done)
        if self._rounds is not None and self._first and time.monotonic() - self._first[0] >= _ESTIMATE_AFTER:
            left = self.seconds_per_round * (self._rounds - rounds_done)
            self._rounds = None  # once is enough: every round tells what is left
            self._print(f"about {duration(left)} left in all, if the first steps are typical")

    def _print(self, text: str) -> None:
        self._console.file.write(f"{text}\n")
        self._console.file.flush()

    def update(self, summary: RoundSummary) -> None:
        lines = [plain_line(summary), *(f"  ! {anomaly}" for anomaly in summary.anomalies)]
        self._print("\n".join(lines))


def open_view(console: Console, rounds: int, *, quiet: bool = False, json_lines: bool = False) -> QuietView:
    """Return the view that was asked for: JSON lines, nothing, or one line for each round."""
    if json_lines:
        return JsonView(console)
    if quiet:
        return QuietView()
    return PlainView(console, rounds)


def plain_line(summary: RoundSummary) -> str:
    """Return a round in one line."""
    shares = sorted(summary.op_shares.items(), key=lambda item: -item[1])
    parts = [
        f"round {summary.round}/{summary.rounds}",
        f"return {interval(summary.return_mean, summary.return_ci, '+.3f')}",
        f"above twin {above}" if (above := above_twin(summary)) else "",
        f"accuracy {interval(100 * summary.accuracy_mean, 100 * summary.accuracy_ci, '.1f')} %",
        f"parameters x {number(summary.parameter_ratio_mean, '.2f')}",
        f"{number(summary.member_epochs_per_second, ',.0f')} member-epochs/s",
        f"{duration(summary.seconds_left)} left",
        " ".join(f"{op} {share:.0%}" for op, share in shares if share >= 0.005),
    ]
    return "  ".join(part for part in parts if part)


def above_twin(summary: RoundSummary) -> str:
    """Return how far the return lies above that of ungrown twins; empty where there were none."""
    if "above_twin" not in summary.extra:
        return ""
    return interval(summary.extra["above_twin"], summary.extra.get("above_twin_ci", math.nan), "+.3f")


def stopping(seconds: float) -> str:
    """Return the notice after Ctrl-C; `seconds` to the end of the round, NaN if unknown."""
    about = f", about {max(round(seconds), 1)} s" if math.isfinite(seconds) else ""
    return f"finishing the round{about}; again to stop now"
