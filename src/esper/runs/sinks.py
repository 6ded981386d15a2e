"""The sink for metrics beside the run folder: event files of TensorBoard."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module

from esper.runs.run_folder import RunFolder
from esper.runs.schema import RoundSummary
from esper.utils.errors import require

Sink = Callable[[RoundSummary], None]  # takes the summary of a round


@contextmanager
def tensorboard_sink(folder: RunFolder, rounds_done: int) -> Iterator[Sink]:
    """Write event files, one curve per number; rounds after `rounds_done` are drawn anew.

    Raises UserError where the package is not installed.
    """
    require("tensorboard", "sinks", "telemetry.tensorboard")
    make_writer = import_module("torch.utils.tensorboard").SummaryWriter
    writer = make_writer(log_dir=str(folder.path / "tensorboard"), purge_step=rounds_done + 1)

    def write(summary: RoundSummary) -> None:
        for name, value in summary.scalars().items():
            writer.add_scalar(name, value, global_step=summary.round)

    try:
        yield write
    finally:
        writer.close()
