"""`esper train`: Tamiyo learns, round after round, and nothing of it is lost."""

from __future__ import annotations

from typing import Annotated

import typer

from esper.commands.options import ConfigFile, Device, JsonLines, Out, Overrides, Preset, Quiet, TaskName
from esper.commands.running import carry_through, new_folder, resolve_settings
from esper.utils.errors import UserError
from esper.utils.launch import Launch


def train(
    config: ConfigFile = None,
    preset: Preset = None,
    overrides: Overrides = None,
    task: TaskName = None,
    out: Out = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="go on with the run in --out if there is one, for what starts commands again; settings that "
            "differ from those of the run are refused, but for rounds, device, patience and telemetry",
        ),
    ] = False,
    device: Device = None,
    quiet: Quiet = False,
    json_lines: JsonLines = False,
) -> None:
    """Train a controller that decides when and where networks grow.

    A member is one small network that trains and grows. A round is one training of all members, from first
    weights to last, after which the controller learns from what came of it. Ctrl-C ends the run after the
    round in flight, a second one at once; either way, and after a crash too, 'esper resume' goes on where
    it stopped.

    On several GPUs or machines: torchrun --nproc-per-node=4 -m esper train ... (docs/scaling.md).
    """
    settings = resolve_settings(config, preset, overrides, task, device)
    launch = Launch.of()
    if (launch.may_restart or resume) and out is None:
        raise UserError(
            "a run that may be started again has to be found again; give --out FOLDER, or leave out --resume "
            "and torchrun --max-restarts"
        )
    from esper.training import TrainingRun
    from esper.utils.gather import from_first, processes

    with processes(launch) as gather:
        folder, again = out or new_folder("train", settings.task), resume or launch.restarts > 0
        if from_first(gather, again and (folder / "config.yaml").is_file()):
            run = TrainingRun.resume(
                folder,
                device,
                change=lambda begun: resolve_settings(config, preset, overrides, task, base=begun),
                gather=gather,
            )
        else:
            run = TrainingRun.start(settings, folder, gather=gather)
        code = carry_through(run, quiet, json_lines)
    raise typer.Exit(code)
