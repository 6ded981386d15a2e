"""A progress bar for people: shown in a terminal, silent anywhere else."""

from __future__ import annotations

from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from esper.lifecycle.legality import holds_seed
from esper.tamiyo.policy.observation import Observation


class GrowthBar:
    """Epochs done, the score of the best member and how many seeds live in it."""

    def __init__(
        self,
        epochs: int,
        score_name: str,
        show: bool,
        console: Console | None = None,
        doing: str = "growing",
    ):
        console = console or Console(stderr=True)
        self._score_name = score_name
        self._shown = show and console.is_terminal
        self._progress = Progress(
            TextColumn(doing),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[status]}"),
            TimeRemainingColumn(),
            console=console,
            disable=not self._shown,
        )
        self._task = self._progress.add_task("growing", total=epochs, status="")

    def update(self, observation: Observation) -> None:
        """Another epoch is over."""
        if not self._shown:
            return
        best = int(observation.val_accuracy.argmax())
        seeds = int(holds_seed(observation.slots)[best].sum())
        status = f"{self._score_name} {float(observation.val_accuracy[best]):.3f}, {seeds} seeds"
        self._progress.update(self._task, advance=1, status=status)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *why: object) -> None:
        self._progress.stop()
