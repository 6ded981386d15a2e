"""Options that several commands share, and the one door to the terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from esper.utils.errors import UserError

CONTROLLER_HELP = (
    "static (never grows), habit (large seeds early), heuristic, random or random:0.1 (its planting rate), "
    "schedule or schedule:clone@0.1 (by the share of the budget that is spent), tamiyo (the trained one that "
    "ships with esper), a run folder or a checkpoint; ':greedy' after a trained one takes its likeliest "
    "choices; 'esper controllers' lists all"
)

ConfigFile = Annotated[Path | None, typer.Option("--config", "-c", help="a YAML file of settings")]
Preset = Annotated[
    str | None,
    typer.Option("--preset", "-p", help="settings that ship with esper: see 'esper config presets'"),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", "-s", help="one setting, as key.path=value; repeatable: see 'esper config show'"),
]
Out = Annotated[
    Path | None, typer.Option("--out", "-o", help="the folder to write; by default a new one in runs/")
]
TaskName = Annotated[
    str | None, typer.Option("--task", "-t", help="the data set, with the preset of its name if there is one")
]
Force = Annotated[
    bool, typer.Option("--force", help="let controllers act outside of the conditions they were trained in")
]
Device = Annotated[str | None, typer.Option("--device", help="auto, cpu, cuda, cuda:1, ...")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="show nothing until the end")]
JsonLines = Annotated[bool, typer.Option("--json", help="one JSON object per round on stdout, for machines")]
JsonResult = Annotated[bool, typer.Option("--json", help="the result as one JSON object on stdout")]


def check_range(name: str, value: int | None, least: int, most: int) -> None:
    """Raise UserError unless least ≤ value ≤ most, or none is given; `name` is the option as it is typed."""
    if value is not None and not least <= value <= most:
        raise UserError(f"{name} is {value}; allowed are {least} to {most}")


def console(stream: Literal["stdout", "stderr"] = "stdout") -> Console:
    """The terminal, or plain text where there is none."""
    file = sys.stdout if stream == "stdout" else sys.stderr
    return Console(file=file, highlight=False)


def print_table(titles: Sequence[str], rows: Iterable[Sequence[object]], right: Sequence[int] = ()) -> None:
    """Print a table of plain text; the columns `right` are of numbers."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for i, title in enumerate(titles):
        table.add_column(title, justify="right" if i in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*(escape(str(cell)) for cell in row))
    console().print(table)


def plural(count: int, word: str) -> str:
    """'1 round', '2 rounds'."""
    return f"{count:,} {word}{'s' * (count != 1)}"


def print_line(text: str, for_machines: bool = False) -> None:
    """Print a line of plain text at once; on stderr where stdout is kept for machines."""
    print(text, file=sys.stderr if for_machines else sys.stdout, flush=True)
