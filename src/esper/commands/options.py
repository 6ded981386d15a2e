"""Options that several commands share, and the one door to the terminal."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from esper.foundation.errors import UserError

ConfigFile = Annotated[Path | None, typer.Option("--config", "-c", help="a YAML file of settings")]
Preset = Annotated[
    str | None,
    typer.Option("--preset", "-p", help="settings that ship with esper: see 'esper config presets'"),
]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", "-s", help="one setting, as key.path=value; repeatable")
]
Seed = Annotated[int, typer.Option(help="every random number derives from it")]


def check_range(name: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise UserError(f"{name} is {value}; allowed are {least} to {most}")


def console(stream: Literal["stdout", "stderr"] = "stdout") -> Console:
    """The terminal, or plain text where there is none."""
    file = sys.stdout if stream == "stdout" else sys.stderr
    return Console(file=file, highlight=False)
