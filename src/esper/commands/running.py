"""What the commands that run something share: options, settings, folder, last words."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from esper.commands.options import console

if TYPE_CHECKING:
    from esper.config import RunConfig
    from esper.training import TrainingRun

Out = Annotated[
    Path | None, typer.Option("--out", "-o", help="the folder to write; by default a new one in runs/")
]
TaskName = Annotated[
    str | None, typer.Option("--task", "-t", help="the data set, with the preset of its name if there is one")
]
Device = Annotated[str | None, typer.Option("--device", help="auto, cpu, cuda, cuda:1, ...")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="show nothing until the end")]
JsonLines = Annotated[bool, typer.Option("--json", help="one JSON object per round on stdout, for machines")]


def settle(
    config: Path | None,
    preset: str | None,
    overrides: Sequence[str] | None,
    task: str | None = None,
    device: str | None = None,
    controllers: Iterable[str] = (),
    members: int | None = None,
) -> RunConfig:
    """The settings of a run: defaults, preset, file, options, --set, in that order.

    Where nothing else is named, those of the first run folder among the controllers stand for the defaults.
    """
    from esper.config import load_config, preset_names

    if task is not None and preset is None and config is None and task in preset_names():
        preset = task
    named = {"task": task, "device": device, "members": members}
    options = [f"{key}={value}" for key, value in named.items() if value is not None]
    base = _trained_with(controllers) if preset is None and config is None else None
    return load_config(config, preset, [*options, *(overrides or [])], base)


def _trained_with(controllers: Iterable[str]) -> RunConfig | None:
    from esper.controllers import GREEDY

    folders = (name.removesuffix(GREEDY) for name in controllers)
    folder = next((name for name in folders if Path(name, "config.yaml").is_file()), None)
    if folder is None:
        return None
    from esper.telemetry.run_folder import RunFolder
    from esper.training import read_config

    return read_config(RunFolder.read(folder))


def new_folder(kind: str, task: str) -> Path:
    """A folder under runs/ that no other run has."""
    base = Path("runs") / f"{kind}-{task}-{time.strftime('%Y%m%d-%H%M%S')}"
    names = [base, *(base.with_name(f"{base.name}-{i}") for i in range(2, 1000))]
    return next((path for path in names if not path.exists()), base)


def carry_through(
    run: TrainingRun, quiet: bool = False, json_lines: bool = False, report: bool = True
) -> int:
    """Play a training run to its end, or to the end of the round in which a stop is asked for.

    Returns the exit code: 0, or that of the signal.
    """
    from esper.foundation.interrupts import StopRequest
    from esper.telemetry.live import open_view
    from esper.telemetry.report import course, write_report

    config, trainer = run.config, run.trainer
    screen = console()
    title = (
        f"{config.task}: {config.members} members, {config.episode.steps} steps, {trainer.environment.device}"
    )
    if not (quiet or json_lines or screen.is_terminal):
        say(f"training on {title}, {config.rounds} rounds, in {run.folder.path}")
    with run.folder, StopRequest() as stop:
        with open_view(screen, title, config.rounds, quiet=quiet, json_lines=json_lines) as view:
            run.run(view, stop)
        page = write_report(run.folder) if report or stop.requested else None
    stream = sys.stderr if json_lines else sys.stdout
    if not run.finished:
        say(
            f"stopped after round {trainer.rounds_done} of {trainer.rounds}; "
            f"go on with: esper resume {run.folder.path}",
            stream,
        )
    if not quiet:
        say(course(run.folder.metrics()), stream)
    if page is not None:
        say(f"wrote {page}", stream)
    return stop.exit_code


def say(text: str, stream: object = None) -> None:
    """A line of plain text, at once."""
    print(text, file=stream or sys.stdout, flush=True)  # type: ignore[arg-type]
