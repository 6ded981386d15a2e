"""What a person sees while a run goes on: a live view, plain lines, JSON lines for machines, or nothing."""

from __future__ import annotations

import math
import os
import sys
import time
from collections import deque
from collections.abc import Sequence
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from esper.telemetry.numbers import duration, interval, number
from esper.telemetry.palette import MUTED, OP_COLOURS, STAGE_COLOURS
from esper.telemetry.schema import FilmReel, RoundSummary, to_json
from esper.telemetry.strips import FilmStrip

_SPARKS = "▁▂▃▄▅▆▇█"
_BAR = 24  # columns of a full bar of op shares
_HISTORY = 40  # rounds in the sparkline
_STRIPS = 2  # members whose slots are shown
_ANOMALIES = 3  # the latest ones
_ESTIMATE_AFTER = 2.0  # seconds of steps
_SHORTEST_SCREEN = 24  # lines; below that the strips are left out


class QuietView:
    """Shows nothing but notices; the other views are this one with something to say."""

    def __init__(self) -> None:
        self._first: tuple[float, float] | None = None  # (clock, rounds done) when progress was first told
        self._latest = (math.nan, math.nan)

    def progress(self, rounds_done: float) -> None:
        """How far the run is, in rounds: 3.5 is half-way through the fourth."""
        self._latest = (time.monotonic(), rounds_done)
        self._first = self._first or self._latest

    @property
    def seconds_per_round(self) -> float:
        """The pace since progress was first told; NaN until it was told twice."""
        if self._first is None or self._latest[1] <= self._first[1]:
            return math.nan
        return (self._latest[0] - self._first[0]) / (self._latest[1] - self._first[1])

    @property
    def round_ends_in(self) -> float:
        """Seconds until the round in flight is over; NaN while nobody can know."""
        rest = 1 - self._latest[1] % 1
        return rest * self.seconds_per_round - (time.monotonic() - self._latest[0])

    def notice(self, text: str) -> None:
        """Tell the person something now. Safe inside a signal handler: no buffered stream is touched."""
        os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, f"{text}\n".encode())

    def update(self, summary: RoundSummary, reel: FilmReel | None = None) -> None:
        """A round is over; `reel` shows what happened in some members' slots."""

    def close(self) -> None:
        """Leave the screen in order."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class JsonView(QuietView):
    """One JSON object per round, the line that metrics.jsonl gets."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def update(self, summary: RoundSummary, reel: FilmReel | None = None) -> None:
        self._console.file.write(to_json(summary) + "\n")
        self._console.file.flush()


class PlainView(QuietView):
    """One line per round, for logs and pipes, and an estimate of the whole as soon as there is one."""

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

    def update(self, summary: RoundSummary, reel: FilmReel | None = None) -> None:
        lines = [plain_line(summary), *(f"  ! {anomaly}" for anomaly in summary.anomalies)]
        self._print("\n".join(lines))


class LiveView(QuietView):
    """The whole picture, redrawn in place."""

    def __init__(self, console: Console, title: str, rounds: int) -> None:
        super().__init__()
        self._console = console
        self._title = title
        self._rounds = rounds
        self._notices: list[RenderableType] = []
        self._returns: deque[float] = deque(maxlen=_HISTORY)
        self._anomalies: deque[str] = deque(maxlen=_ANOMALIES)
        self._bar = ProgressBar(total=rounds, completed=0, complete_style=STAGE_COLOURS["HOLDING"])
        self._body: list[RenderableType] = [Text("the first round is under way", MUTED)]
        self._live = Live(console=console, refresh_per_second=4, get_renderable=self._draw)
        self._live.start()

    def progress(self, rounds_done: float) -> None:
        super().progress(rounds_done)
        self._bar.completed = rounds_done
        left = self.seconds_per_round * (self._rounds - rounds_done)
        if not self._returns and math.isfinite(left):
            self._body = [Text(f"the first round is under way, about {duration(left)} left in all", MUTED)]

    def update(self, summary: RoundSummary, reel: FilmReel | None = None) -> None:
        self._returns.append(summary.return_mean)
        self._anomalies.extend(f"round {summary.round}: {anomaly}" for anomaly in summary.anomalies)
        self._bar.completed = summary.round
        self._body = [self._figures(summary), Text(), _op_bars(summary)]
        if reel is not None and self._console.height >= _SHORTEST_SCREEN:
            self._body += [part for film in reel.films[:_STRIPS] for part in (Text(), FilmStrip(film, reel))]
        if self._anomalies:
            self._body += [Text(), *(Text(f"! {anomaly}", "bold red") for anomaly in self._anomalies)]
        self._live.refresh()

    def notice(self, text: str) -> None:
        self._notices = [Text(), Text(text, "bold")]  # the next redraw, in a quarter of a second, shows it

    def close(self) -> None:
        self._live.stop()

    def _draw(self) -> RenderableType:
        return Panel(
            Group(self._bar, Text(), *self._body, *self._notices), title=self._title, title_align="left"
        )

    def _figures(self, summary: RoundSummary) -> Table:
        table = Table.grid(padding=(0, 3))
        entropy = number(summary.entropy, ".2f")
        table.add_row(
            _figure("round", f"{summary.round} of {summary.rounds}"),
            _figure("time left", duration(summary.seconds_left)),
            _figure("member-epochs/s", number(summary.member_epochs_per_second, ",.0f")),
            _figure("parameters", f"× {number(summary.parameter_ratio_mean, '.2f')}"),
        )
        table.add_row(
            _figure("return", interval(summary.return_mean, summary.return_ci, "+.3f")),
            Text(sparkline(self._returns), STAGE_COLOURS["BLENDING"]),
            _figure(
                "accuracy", interval(100 * summary.accuracy_mean, 100 * summary.accuracy_ci, ".1f") + " %"
            ),
            _figure("above twin", above) if (above := above_twin(summary)) else _figure("entropy", entropy),
        )
        return table


def open_view(
    console: Console, title: str, rounds: int, *, quiet: bool = False, json_lines: bool = False
) -> QuietView:
    """The view that was asked for, or the one that this terminal can show."""
    if json_lines:
        return JsonView(console)
    if quiet:
        return QuietView()
    return LiveView(console, title, rounds) if console.is_terminal else PlainView(console, rounds)


def plain_line(summary: RoundSummary) -> str:
    """A round in one line."""
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
    """How far the return lies above that of ungrown twins, where they were played."""
    if "above_twin" not in summary.extra:
        return ""
    return interval(summary.extra["above_twin"], summary.extra.get("above_twin_ci", math.nan), "+.3f")


def stopping(seconds: float) -> str:
    """What is said to somebody who asked for a stop; `seconds` to the end of the round, NaN if unknown."""
    about = f", about {max(round(seconds), 1)} s" if math.isfinite(seconds) else ""
    return f"finishing the round{about}; again to stop now"


def sparkline(values: Sequence[float] | deque[float]) -> str:
    """The course of a value in one line of blocks; what is not finite leaves a gap."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return ""
    low, span = min(finite), (max(finite) - min(finite)) or 1.0
    top = len(_SPARKS) - 1
    return "".join(_SPARKS[round((v - low) / span * top)] if math.isfinite(v) else " " for v in values)


def _figure(name: str, value: str) -> Text:
    return Text.assemble((f"{name} ", MUTED), (value, "bold"))


def _op_bars(summary: RoundSummary) -> Table:
    table = Table.grid(padding=(0, 1))
    for op, share in summary.op_shares.items():
        colour = OP_COLOURS.get(op, MUTED)
        bar = "█" * round(share * _BAR) or ("▏" if share > 0 else "")
        table.add_row(
            Text(op.lower().replace("_", " "), MUTED), Text(bar.ljust(_BAR), colour), f"{share:.1%}"
        )
    return table
