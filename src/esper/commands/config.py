"""`esper config`: show a configuration or check one, without starting anything."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from esper.commands import common

app = typer.Typer(help="Show a configuration, or check one.")


@app.callback(invoke_without_command=True)
def root(context: typer.Context) -> None:
    """Show the help where no command is given."""
    if context.invoked_subcommand is None:
        print(context.get_help())


@app.command()
def show(
    config: common.ConfigFile = None,
    preset: common.Preset = None,
    overrides: common.Overrides = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="what each key means and takes, as a table")
    ] = False,
) -> None:
    """Print the configuration as a run would see it: defaults, preset, file, --set, in that order."""
    from esper.config import load_config
    from esper.utils.settings import dump

    resolved = load_config(config, preset, overrides or [])
    if explain:
        _explain(resolved.model_dump())
    else:
        print(dump(resolved), end="")


@app.command()
def validate(
    config: Annotated[Path, typer.Argument(help="the YAML file to check")],
    overrides: common.Overrides = None,
) -> None:
    """Check a file: exit code 0 and one line, or exit code 2 and what is wrong with it."""
    from esper.config import load_config

    load_config(config, None, overrides or [])
    print(f"{config} is valid")


@app.command()
def presets() -> None:
    """List the configurations that ship with esper, with what each is for and how long it takes."""
    from esper.config import about_preset, load_config, preset_names

    for name in preset_names():
        resolved = load_config(preset=name)
        steps = common.plural(resolved.episode.steps, "step")
        members, rounds = common.plural(resolved.members, "member"), common.plural(resolved.rounds, "round")
        print(f"{name:12} {members}, {rounds} of {steps}\n{'':12} {about_preset(name)}")


def _explain(values: dict[str, Any]) -> None:
    """A table of every key; what differs from its default is bold."""
    from rich.table import Table
    from rich.text import Text

    from esper.config import RunConfig
    from esper.utils.settings import keys_of

    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in ("key", "value", "allowed", "meaning"):
        table.add_column(title, overflow="fold", no_wrap=title == "key")
    for key in keys_of(RunConfig):
        value: Any = values
        for name in key.path.split("."):
            value = value[name]
        table.add_row(
            key.path, Text(str(value), "" if value == key.default else "bold"), key.allowed, key.meaning
        )
    common.console().print(table)
