"""Sinks for metrics beside the run folder: TensorBoard and Weights & Biases."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from importlib import import_module
from typing import Any

from esper.runs.files import write_atomically
from esper.runs.run_folder import RunFolder
from esper.runs.schema import RoundSummary
from esper.utils.errors import require

Sink = Callable[[RoundSummary], None]  # takes the summary of a round


@contextmanager
def tensorboard_sink(folder: RunFolder, config: Mapping[str, Any], rounds_done: int) -> Iterator[Sink]:
    """Write event files, one curve per number; rounds after `rounds_done` are drawn anew."""
    require("tensorboard", "sinks", "the sink 'tensorboard'")
    make_writer = import_module("torch.utils.tensorboard").SummaryWriter
    with make_writer(log_dir=str(folder.path / "tensorboard"), purge_step=rounds_done + 1) as writer:

        def write(summary: RoundSummary) -> None:
            for name, value in summary.scalars().items():
                writer.add_scalar(name, value, global_step=summary.round)

        yield write


@contextmanager
def wandb_sink(folder: RunFolder, config: Mapping[str, Any], rounds_done: int) -> Iterator[Sink]:
    """Log to a Weights & Biases run, the same one whenever the run is resumed.

    A resumed run does some rounds again, to the same numbers; those are not logged twice.
    """
    wandb = require("wandb", "sinks", "the sink 'wandb'")
    known = folder.path / "wandb-id.txt"  # the run's id there, and the last round that it was sent
    if not known.exists():
        write_atomically(known, f"{uuid.uuid4().hex[:12]} 0".encode())
    name, _, last = known.read_text().partition(" ")
    last_round = int(last or 0)
    run = wandb.init(project="esper", dir=str(folder.path), config=dict(config), id=name, resume="allow")

    def write(summary: RoundSummary) -> None:
        nonlocal last_round
        if summary.round > last_round:
            run.log(summary.scalars(), step=summary.round)
            last_round = summary.round
            write_atomically(known, f"{name} {last_round}".encode())

    try:
        yield write
    finally:
        run.finish()


SINKS = {"tensorboard": tensorboard_sink, "wandb": wandb_sink}  # the settings allow no other names


def make_sinks(
    names: Sequence[str], folder: RunFolder, config: Mapping[str, Any], rounds_done: int
) -> list[AbstractContextManager[Sink]]:
    """Return the named sinks, to be entered by a run that continues after `rounds_done` rounds.

    `config` is the resolved one. Entering a sink raises UserError where its package is not installed.
    """
    return [SINKS[name](folder, config, rounds_done) for name in names]
