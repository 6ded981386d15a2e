"""`esper config`: show a configuration or check one, without starting anything."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

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
    from esper.config import RunConfig, load_config
    from esper.utils.settings import dump, keys_of

    resolved = load_config(config, preset, overrides or [])
    if not explain:
        print(dump(resolved), end="")
        return
    keys = keys_of(RunConfig, defaults=resolved)
    common.print_table(
        ("key", "value", "allowed", "meaning"), [(k.path, k.default, k.allowed, k.meaning) for k in keys]
    )


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
