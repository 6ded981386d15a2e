"""`esper train`: Tamiyo learns, round after round, and nothing of it is lost."""

from __future__ import annotations

import typer

from esper.commands.options import ConfigFile, Overrides, Preset
from esper.commands.running import Device, JsonLines, Out, Quiet, TaskName, carry_through, new_folder, settle


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
    """Train a controller: all members live an episode, Tamiyo learns from it, and so on for every round.

    Ctrl-C ends the run after the round in flight; a second one ends it at once. Either way, and after a
    crash too, 'esper resume' goes on where it stopped.
    """
    settings = settle(config, preset, overrides, task, device)
    from esper.training import TrainingRun

    run = TrainingRun.start(settings, out or new_folder("train", settings.task))
    raise typer.Exit(carry_through(run, quiet, json_lines))
