"""`esper train`: Tamiyo learns, round after round, and nothing of it is lost."""

from __future__ import annotations

import typer

from esper.commands.options import ConfigFile, Device, JsonLines, Out, Overrides, Preset, Quiet, TaskName
from esper.commands.running import carry_through, new_folder, resolve_settings


def train(
    config: ConfigFile = None,
    preset: Preset = None,
    overrides: Overrides = None,
    task: TaskName = None,
    out: Out = None,
    device: Device = None,
    quiet: Quiet = False,
    json_lines: JsonLines = False,
) -> None:
    """Train a controller that decides when and where networks grow.

    A member is one small network that trains and grows. A round is one training of all members, from first
    weights to last, after which the controller learns from what came of it. A film, in the report, shows what
    happened in the slots of a few members. Ctrl-C ends the run after the round in flight, a second one at
    once; either way, and after a crash too, 'esper resume' goes on where it stopped.
    """
    settings = resolve_settings(config, preset, overrides, task, device)
    from esper.training import TrainingRun

    run = TrainingRun.start(settings, out or new_folder("train", settings.task))
    raise typer.Exit(carry_through(run, quiet, json_lines))
