"""What the commands that run something share: settings, folder, the course of a training run."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from esper.commands.options import console, plural, print_line
from esper.utils.errors import UserError

if TYPE_CHECKING:
    from esper.config import RunConfig
    from esper.runs.run_folder import Kind, RunFolder
    from esper.training import TrainingRun

INTERRUPTED = 130  # the exit code of a command that was ended with Ctrl-C


def resolve_settings(
    config: Path | None,
    preset: str | None,
    overrides: Sequence[str] | None,
    task: str | None = None,
    device: str | None = None,
    controllers: Iterable[str] = (),
    members: int | None = None,
    usual_members: int | None = None,
    base: RunConfig | None = None,
) -> RunConfig:
    """The settings of a run: defaults (or `base`), preset, file, options, --set, in that order.

    Where nothing else is named, those of the first run folder among the controllers stand for the defaults.
    `usual_members` holds where neither a preset nor a file that was named, nor an option, says how many.
    """
    from esper.config import load_config, preset_names, read_preset
    from esper.utils.settings import read_yaml

    if members is None and usual_members is not None:
        written = (read_preset(preset) if preset else {}) | (read_yaml(config) if config else {})
        members = None if "members" in written else usual_members
    if task is not None and preset is None and config is None and task in preset_names():
        preset = task
    named = {"task": task, "device": device, "members": members}
    options = [f"{key}={value}" for key, value in named.items() if value is not None]
    if base is None and preset is None and config is None:
        base = _trained_with(controllers)
    return load_config(config, preset, [*options, *(overrides or [])], base)


def _trained_with(controllers: Iterable[str]) -> RunConfig | None:
    folders = (name.removesuffix(":greedy") for name in controllers)
    folder = next((name for name in folders if Path(name, "config.yaml").is_file()), None)
    if folder is None:
        return None
    from esper.runs.run_folder import RunFolder
    from esper.training import read_config

    return read_config(RunFolder.read(folder))


def new_folder(kind: str, task: str) -> Path:
    """A folder under runs/ that no other run has."""
    base = Path("runs") / f"{kind}-{task}-{time.strftime('%Y%m%d-%H%M%S')}"
    names = [base, *(base.with_name(f"{base.name}-{i}") for i in range(2, 1000))]
    return next((path for path in names if not path.exists()), base)


def begin_folder(settings: RunConfig, out: Path | None, kind: Kind, request: Mapping[str, Any]) -> RunFolder:
    """A new folder for a run of some kind: the one that was asked for, or one under runs/."""
    from esper.runs.run_folder import RunFolder
    from esper.utils.settings import dump

    path = out or new_folder(kind, settings.task)
    return RunFolder.create(path, kind=kind, request=request, config=dump(settings), seed=settings.seed)


def requested(folder: RunFolder, name: str) -> Any:
    """What was asked for when a run began, to do it again; UserError where the folder does not say."""
    if name not in folder.request:
        raise UserError(
            f"{folder.path} does not say which {name} it was begun with, and cannot go on; begin anew in "
            f"another folder with: {folder.command_text()}"
        )
    return folder.request[name]


@contextmanager
def interruption_told(folder: RunFolder) -> Iterator[None]:
    """Where Ctrl-C ends what is inside, say how to go on, and end the command."""
    try:
        yield
    except KeyboardInterrupt:
        print_line(f"stopped; begin it again with: esper resume {folder.path}", for_machines=True)
        raise typer.Exit(INTERRUPTED) from None


def carry_through(
    run: TrainingRun, quiet: bool = False, json_lines: bool = False, report: bool = True
) -> int:
    """Play a training run to its end, or to the end of the round in which a stop is asked for.

    Returns the exit code: 0, or that of the signal. A second signal ends it at once, between two steps. Of
    several processes the first one shows and reports.
    """
    from esper.runs.live import QuietView, open_view, stopping
    from esper.runs.report import learning_in_words, write_report
    from esper.utils.launch import StopRequest

    if not run.writes:
        with StopRequest() as asked:
            run.run(QuietView(), asked)
        return asked.exit_code
    config, trainer = run.config, run.trainer
    rounds = {line["round"] for line in run.folder.metrics_file}
    missing = [number for number in range(1, trainer.rounds_done + 1) if number not in rounds]
    usual = type(config.ppo)().minibatches  # of which fewer members than that silently need fewer
    if config.ppo.minibatches > max(config.members, usual):
        print_line(
            f"note: ppo.minibatches is {config.ppo.minibatches}, and a round has one row for each of "
            f"{plural(config.members, 'member')}: {config.members} minibatches are made",
            for_machines=True,
        )
    if missing:
        print_line(
            f"note: {run.folder.metrics_file.path} lacks {plural(len(missing), 'round')} of the "
            f"{trainer.rounds_done} that are done; the report cannot show what is missing",
            for_machines=True,
        )
    screen = console()
    device = trainer.environment.device
    place = f"{trainer.gather.size} × {device.type}" if trainer.gather.size > 1 else f"{device}"
    title = f"{config.task}: {config.members} members, {config.episode.steps} steps, {place}"
    page = None
    view = open_view(screen, config.rounds, quiet=quiet, json_lines=json_lines)
    with run.folder, StopRequest(lambda: view.notice(stopping(view.round_ends_in))) as stop:
        if not (quiet or json_lines):
            print_line(f"training on {title}, {plural(config.rounds, 'round')}, in {run.folder.path}")
        try:
            run.run(view, stop)
            page = write_report(run.folder) if report or stop.requested else None
        except KeyboardInterrupt:
            print_line("stopped at once: the round in flight is not kept", for_machines=True)
    if not run.finished:
        print_line(
            f"stopped after round {trainer.rounds_done} of {trainer.rounds}; "
            f"go on with: esper resume {run.folder.path}",
            json_lines,
        )
    if not quiet and trainer.rounds_done:
        print_line(learning_in_words(run.folder.metrics()), json_lines)
    if page is not None:
        print_line(f"wrote {page}", json_lines)
    return stop.exit_code
