"""`esper resume`: a run that was stopped goes on, to the same bits as if it never had been."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from esper.commands.running import Device, JsonLines, Quiet, carry_through, say


def resume(
    run: Annotated[Path, typer.Argument(help="the folder of the run")],
    checkpoint: Annotated[
        Path | None, typer.Option("--checkpoint", help="an older checkpoint of the run; by default its last")
    ] = None,
    device: Device = None,
    quiet: Quiet = False,
    json_lines: JsonLines = False,
) -> None:
    """Continue a training run from its last checkpoint. What came after it is lived again."""
    from esper.training import TrainingRun

    continued = TrainingRun.resume(run, device, checkpoint)
    done, rounds = continued.trainer.rounds_done, continued.trainer.rounds
    if not (quiet or json_lines):
        told = "nothing is left to do" if continued.finished else f"{rounds - done} to go"
        say(f"{run}: {done} of {rounds} rounds are done, {told}")
    raise typer.Exit(carry_through(continued, quiet, json_lines))
