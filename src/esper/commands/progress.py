"""How far a command is, and how long it will still take: a bar, or a line now and then."""

from __future__ import annotations

import time
from contextlib import ExitStack
from types import TracebackType
from typing import Self

from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from esper.commands.options import console
from esper.foundation.interrupts import interruptible
from esper.telemetry.numbers import duration

FIRST_LINE, LINE_EVERY = 1.0, 5.0  # seconds to the first line and between lines where there is no terminal


class StepProgress:
    """Counts equal steps of one piece of work towards a total, on stderr."""

    def __init__(self, total: int, what: str, quiet: bool = False) -> None:
        self._total, self._what = total, what
        self._done = 0
        self._open = ExitStack()
        self._console = console("stderr")
        self._begun = time.monotonic()
        self._next_line = self._begun + FIRST_LINE
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
            self._task = self._bar.add_task(what, total=total)

    def advance(self) -> None:
        """One more step is done."""
        self._done += 1
        if self._bar is not None:
            self._bar.update(self._task, advance=1)
            return
        now = time.monotonic()
        if not self._quiet and now >= self._next_line:
            self._next_line = now + LINE_EVERY
            left = (now - self._begun) / self._done * (self._total - self._done)
            self._console.print(f"{self._what}  {self._done / self._total:.0%}  about {duration(left)} left")

    def __enter__(self) -> Self:
        self._open.enter_context(interruptible())
        if self._bar is not None:
            self._open.enter_context(self._bar)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()
