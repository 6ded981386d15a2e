"""What several commands share: options, output, progress, settings, and running a training run."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from esper.utils.errors import UserError
from esper.utils.launch import StopRequest, interruptible

if TYPE_CHECKING:
    from esper.config import RunConfig
    from esper.runs.run_folder import Kind, RunFolder
    from esper.runs.schema import RoundSummary
    from esper.training import TrainingRun

TABLE_WIDTH = 120  # of tables where there is no terminal
TRAINING = ("rounds", "shards", "policy", "ppo", "learner", "telemetry")  # settings of 'esper train' alone
FIRST_LINE, LINE_EVERY = 1.0, 5.0  # seconds to the first line of progress and between two lines

CONTROLLER_HELP = (
    "static, heuristic, random, reactive, schedule, tamiyo and rates (trained ones that ship with esper), a "
    "run folder, a checkpoint or MODULE:FUNCTION; 'esper controllers' describes them"
)

ConfigFile = Annotated[Path | None, typer.Option("--config", "-c", help="a YAML file of settings")]
Preset = Annotated[
    str | None,
    typer.Option("--preset", "-p", help="one of compute, demo, digits, gpu, letter, mnist1d, text"),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", "-s", help="one setting, as key.path=value; repeatable: see 'esper config'"),
]
Out = Annotated[Path | None, typer.Option("--out", "-o", help="the folder to write; by default one in runs/")]
TaskName = Annotated[str | None, typer.Option("--task", "-t", help="data set, with its preset if it has one")]
Members = Annotated[
    int | None, typer.Option("--members", "-n", min=1, max=1_000_000, help="networks for each controller")
]
Force = Annotated[bool, typer.Option("--force", help="let controllers act also where they were not trained")]
Device = Annotated[str | None, typer.Option("--device", help="auto, cpu, cuda, cuda:1, ...")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="show nothing until the end")]


# ---- output ----------------------------------------------------------------------------------------------


def print_table(titles: Sequence[str], rows: Iterable[Sequence[object]], right: Sequence[int] = ()) -> None:
    """Print a table of plain text; neither its first column nor the columns `right`, of numbers, wrap."""
    from rich.console import Console  # here: loading it takes a fifth of the time of `--help`
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    for i, title in enumerate(titles):
        justify: Literal["left", "right"] = "right" if i in right else "left"
        table.add_column(title, justify=justify, overflow="fold", no_wrap=i == 0 or i in right)
    for row in rows:
        table.add_row(*(escape(str(cell)) for cell in row))
    screen = Console(highlight=False)
    if not screen.is_terminal:
        screen.width = max(screen.width, TABLE_WIDTH)
    screen.print(table)


def plural(count: int, word: str) -> str:
    """Return '1 round', '2 rounds'."""
    return f"{count:,} {word}{'s' * (count != 1)}"


@contextmanager
def step_progress(total: int, what: str, quiet: bool = False) -> Iterator[Callable[[float], None]]:
    """Yield a function that prints progress, see `progress_lines`; Ctrl-C meanwhile ends the command."""
    with interruptible():
        yield progress_lines(total, what, quiet)


def progress_lines(total: int, what: str, quiet: bool = False) -> Callable[[float], None]:
    """Return a function to call with how much of `total` is done; now and then it says that on stderr."""
    from esper.runs.console import duration

    begun = time.monotonic()
    next_line = begun + FIRST_LINE

    def advance(done: float) -> None:
        nonlocal next_line
        now = time.monotonic()
        if now >= next_line and not quiet:
            next_line = now + LINE_EVERY
            left = (now - begun) / done * (total - done)
            typer.echo(f"{what}  {done / total:.0%}  about {duration(left)} left", err=True)

    return advance


# ---- settings and folders --------------------------------------------------------------------------------


def resolve_settings(
    config: Path | None,
    preset: str | None,
    overrides: Sequence[str] | None,
    task: str | None = None,
    device: str | None = None,
    controllers: Sequence[str] = (),
    members: int | None = None,
    base: RunConfig | None = None,
) -> RunConfig:
    """Return the settings of a run: defaults (or `base`), preset, file, options, --set, in that order.

    Where nothing else is named, those of the first run folder among the controllers replace the defaults.
    """
    from esper.config import load_config, preset_names

    for text in (overrides or []) if controllers else []:  # a file may serve several commands
        group = text.partition("=")[0].partition(".")[0].strip()
        if group in TRAINING:
            raise UserError(f"--set is {text!r}; {group} is for 'esper train' alone, leave it out here")
    # The defaults are those of digits: another task wants its own host and budget, if it has a preset.
    if task is not None and preset is None and config is None and task in preset_names():
        preset = task
    named = {"task": task, "device": device, "members": members}
    options = [f"{key}={value}" for key, value in named.items() if value is not None]
    if base is None and preset is None and config is None:
        folders = (name.removesuffix(":greedy") for name in controllers)
        trained = next((name for name in folders if Path(name, "config.yaml").is_file()), None)
        if trained is not None:
            from esper.runs.run_folder import RunFolder
            from esper.training import read_config

            base = read_config(RunFolder.read(trained))
    return load_config(config, preset, [*options, *(overrides or [])], base)


def new_folder(kind: str, task: str) -> Path:
    """Return a folder under runs/ that no other run has."""
    task = task.replace(":", ".")  # of MODULE:FUNCTION; not every file system takes a colon
    base = Path("runs") / f"{kind}-{task}-{time.strftime('%Y%m%d-%H%M%S')}"
    names = [base, *(base.with_name(f"{base.name}-{i}") for i in range(2, 1000))]
    return next((path for path in names if not path.exists()), base)


def begin_folder(settings: RunConfig, out: Path | None, kind: Kind, request: Mapping[str, Any]) -> RunFolder:
    """Create the folder of a run: `out`, or a new one under runs/."""
    from esper.runs.run_folder import RunFolder
    from esper.utils.settings import dump

    path = out or new_folder(kind, settings.task)
    return RunFolder.create(path, kind=kind, request=request, config=dump(settings), seed=settings.seed)


# ---- a training run --------------------------------------------------------------------------------------


def run_training(run: TrainingRun, quiet: bool = False) -> int:
    """Train to the end, or to the end of the round in which a stop is asked for, and write the report.

    Returns the exit code: 0, or that of the signal. A second signal ends it at once, between two steps. Of
    several processes the first one shows and reports.
    """
    from esper.runs.console import learning_in_words, notice_stop, round_lines
    from esper.watch.report import write_report

    if not run.writes:
        # A signal that reaches any process stops all of them after the round, so that each must take it.
        with StopRequest() as asked:
            run.run(asked)
        return asked.exit_code
    config, trainer, folder = run.config, run.trainer, run.folder
    for note in _notes(run):
        typer.echo(f"note: {note}", err=True)
    page, ends = None, [time.monotonic()]  # of rounds

    def notice() -> None:
        longest = max((end - begin for begin, end in pairwise(ends)), default=math.nan)
        notice_stop(folder.path, max(ends[-1] + longest - time.monotonic(), 0.0))

    def after_round(summary: RoundSummary) -> None:
        trainer.on_step = None  # from now on the lines of the rounds say how long it takes
        ends.append(time.monotonic())
        if not quiet:
            typer.echo(round_lines(summary))

    with folder, StopRequest(notice) as stop:
        if not quiet:
            device = trainer.environment.device
            where = f"{trainer.gather.size} × {device.type}" if trainer.gather.size > 1 else f"{device}"
            typer.echo(
                f"training on {config.task}: {config.members} members, {config.episode.steps} steps, "
                f"{where}, {plural(config.rounds, 'round')}, in {folder.path}"
            )
        trainer.on_step = progress_lines(trainer.rounds - trainer.rounds_done, "training", quiet)
        try:
            run.run(stop, after_round)
            page = write_report(folder)
        except KeyboardInterrupt:
            typer.echo("stopped at once: the round in flight is not kept", err=True)
    if run.rounds_saved < trainer.rounds:
        saved = f"{run.rounds_saved} of {plural(trainer.rounds, 'round')} saved"
        typer.echo(f"stopped with {saved}; go on with: esper resume {folder.path}")
    if not quiet and run.rounds_saved:
        typer.echo(learning_in_words(folder.metrics_file))
    if page is not None:
        typer.echo(f"wrote {page}")
    return stop.exit_code


def _notes(run: TrainingRun) -> Iterator[str]:
    """Say what a person may not expect of a run that is about to go on."""
    config, done = run.config, run.trainer.rounds_done
    usual = type(config.ppo)().minibatches  # with fewer members than that fewer are made without a note
    if config.ppo.minibatches > max(config.members, usual):
        yield (
            f"ppo.minibatches is {config.ppo.minibatches}, and a round has one row for each of "
            f"{plural(config.members, 'member')}: {config.members} minibatches are made"
        )
    missing = set(range(1, done + 1)) - {line["round"] for line in run.folder.metrics_file}
    if missing:
        yield (
            f"{run.folder.metrics_file.path} lacks {plural(len(missing), 'round')} of the {done} that are "
            "done; the report cannot show what is missing"
        )
