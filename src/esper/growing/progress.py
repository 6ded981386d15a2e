"""A progress bar for people: shown in a terminal, silent anywhere else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from esper.lifecycle.legality import holds_seed
from esper.tamiyo.policy.observation import Observation


@contextmanager
def growth_bar(
    epochs: int, score_name: str, show: bool, doing: str
) -> Iterator[Callable[[Observation], None]]:
    """While inside, a bar of the epochs done; it is told of each with what is seen after it.

    It says the score of the best member and how many seeds live in it.
    """
    console = Console(stderr=True)
    shown = show and console.is_terminal
    told = TextColumn("{task.fields[status]}")
    columns = (TextColumn(doing), BarColumn(), MofNCompleteColumn(), told, TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not shown) as progress:
        task = progress.add_task(doing, total=epochs, status="")

        def update(observation: Observation) -> None:
            if shown:
                best = int(observation.val_accuracy.argmax())
                score, seeds = (
                    float(observation.val_accuracy[best]),
                    int(holds_seed(observation.slots)[best].sum()),
                )
                progress.update(task, advance=1, status=f"{score_name} {score:.3f}, {seeds} seeds")

        yield update
