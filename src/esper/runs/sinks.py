"""Sinks for metrics beside the run folder: TensorBoard and Weights & Biases."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from esper.runs.files import write_atomically
from esper.runs.run_folder import RunFolder
from esper.runs.schema import RoundSummary
from esper.utils.errors import UserError, require


class Sink(Protocol):
    """Takes one summary per round."""

    def write(self, summary: RoundSummary) -> None:
        """Take the summary of a round."""

    def close(self) -> None:
        """Finish: nothing more will come."""


class TensorBoardSink:
    """Event files under `path`, one curve per number; rounds after `rounds_done` are drawn anew."""

    def __init__(self, path: Path, rounds_done: int) -> None:
        require("tensorboard", "sinks", "the sink 'tensorboard'")
        self._writer: Any = import_module("torch.utils.tensorboard").SummaryWriter(
            log_dir=str(path), purge_step=rounds_done + 1
        )

    def write(self, summary: RoundSummary) -> None:
        """Add a point to every curve."""
        for name, value in summary.scalars().items():
            self._writer.add_scalar(name, value, global_step=summary.round)

    def close(self) -> None:
        """Flush the files."""
        self._writer.close()


class WandbSink:
    """A Weights & Biases run that keeps its files under `path`, the same one whenever the run is resumed.

    A resumed run does some rounds again, to the same numbers; those are not logged twice.
    """

    def __init__(self, path: Path, config: Mapping[str, Any]) -> None:
        wandb = require("wandb", "sinks", "the sink 'wandb'")
        self._known = path / "wandb-id.txt"  # the run's id there, and the last round that it was sent
        if not self._known.exists():
            write_atomically(self._known, f"{uuid.uuid4().hex[:12]} 0".encode())
        self._id, _, last = self._known.read_text().partition(" ")
        self._last_round = int(last or 0)
        self._run: Any = wandb.init(
            project="esper", dir=str(path), config=dict(config), id=self._id, resume="allow"
        )

    def write(self, summary: RoundSummary) -> None:
        """Log a step of every curve."""
        if summary.round > self._last_round:
            self._run.log(summary.scalars(), step=summary.round)
            self._last_round = summary.round
            write_atomically(self._known, f"{self._id} {self._last_round}".encode())

    def close(self) -> None:
        """End the run there."""
        self._run.finish()


_SINKS: dict[str, Callable[[RunFolder, Mapping[str, Any], int], Sink]] = {
    "tensorboard": lambda folder, config, done: TensorBoardSink(folder.path / "tensorboard", done),
    "wandb": lambda folder, config, done: WandbSink(folder.path, config),
}
SINK_NAMES = tuple(_SINKS)


def open_sinks(
    names: Sequence[str], folder: RunFolder, config: Mapping[str, Any], rounds_done: int = 0
) -> list[Sink]:
    """Open the named sinks, for a run that continues after `rounds_done` rounds.

    `config` is the resolved configuration, for sinks that show it. Raises UserError for an unknown name and
    for a package that is not installed.
    """
    unknown = [name for name in names if name not in _SINKS]
    if unknown:
        raise UserError(f"sink is {unknown[0]!r}; allowed are {', '.join(SINK_NAMES)}")
    return [_SINKS[name](folder, config, rounds_done) for name in names]
