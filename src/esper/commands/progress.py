"""How far a command is, and how long it will still take: a bar, or a line now and then."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from esper.commands.options import console
from esper.telemetry.live import duration

LINE_EVERY = 5.0  # seconds between lines where there is no terminal


class StepProgress:
    """Counts equal steps towards a total, on stderr."""

    def __init__(self, total: int, quiet: bool = False) -> None:
        self._total = total
        self._done = 0
        self._console = console("stderr")
        self._begun = self._spoken = time.monotonic()
        self._quiet = quiet
        self._bar: Progress | None = None
        if self._console.is_terminal and not quiet:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                TaskProgressColumn(),
                TimeRemainingColumn(),
            )
            self._bar = Progress(*columns, console=self._console, transient=True)
            self._task = self._bar.add_task("", total=total)

    def advance(self, what: str) -> None:
        """One more step is done, of the part that `what` names."""
        self._done += 1
        if self._bar is not None:
            self._bar.update(self._task, advance=1, description=what)
            return
        now = time.monotonic()
        if not self._quiet and now - self._spoken >= LINE_EVERY:
            self._spoken = now
            left = (now - self._begun) / self._done * (self._total - self._done)
            self._console.print(f"{what}  {self._done / self._total:.0%}  about {duration(left)} left")

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
