"""How far a command is, and how long it will still take: a bar, or a line now and then."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from esper.commands.options import console
from esper.runs.numbers import duration
from esper.utils.launch import interruptible

FIRST_LINE, LINE_EVERY = 1.0, 5.0  # seconds to the first line and between lines where there is no terminal


@contextmanager
def step_progress(total: int, what: str, quiet: bool = False) -> Iterator[Callable[[], None]]:
    """While inside, counts equal steps of one piece of work towards a total, on stderr.

    What comes back is to be called after every step.
    """
    screen, begun, done = console("stderr"), time.monotonic(), 0
    next_line = begun + FIRST_LINE
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    hidden = quiet or not screen.is_terminal
    with interruptible(), Progress(*columns, console=screen, transient=True, disable=hidden) as bar:
        task = bar.add_task(what, total=total)

        def advance() -> None:
            nonlocal done, next_line
            done += 1
            bar.update(task, advance=1)
            now = time.monotonic()
            if now >= next_line and not quiet and not screen.is_terminal:
                next_line = now + LINE_EVERY
                left = (now - begun) / done * (total - done)
                screen.print(f"{what}  {done / total:.0%}  about {duration(left)} left")

        yield advance
