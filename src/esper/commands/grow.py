"""`esper grow`: grow networks with any controller, and keep the best."""

from __future__ import annotations

from typing import Annotated

import typer

from esper.commands.options import ConfigFile, Overrides, Preset, check_range
from esper.commands.running import Device, Out, Quiet, TaskName, new_folder, say, settle


def grow(
    controller: Annotated[
        str,
        typer.Option(
            "--controller",
            "-C",
            help="tamiyo, heuristic, random, periodic, scheduled, static, a run folder or a checkpoint",
        ),
    ] = "heuristic",
    members: Annotated[int, typer.Option("--members", "-n", help="networks to grow; the best is kept")] = 8,
    config: ConfigFile = None,
    preset: Preset = None,
    overrides: Overrides = None,
    task: TaskName = None,
    out: Out = None,
    device: Device = None,
    quiet: Quiet = False,
) -> None:
    """Grow networks and write the one that is best on the validation split, with a film of how it grew."""
    check_range("--members", members, 1, 1_000_000)
    settings = settle(config, preset, overrides, task, device, [controller], members)
    from esper.builders import make_environment
    from esper.commands.progress import StepProgress
    from esper.controllers import load_controller
    from esper.foundation.config_files import dump
    from esper.foundation.devices import choose_device, cpu_threads
    from esper.grown_network import GrownMember
    from esper.simic.compare import as_comparison, run_controller
    from esper.simic.events import episode_events
    from esper.simic.films import film_reel
    from esper.simic.lanes import lanes_of
    from esper.telemetry.pictures import film_strips, save_png
    from esper.telemetry.report import write_report
    from esper.telemetry.run_folder import RunFolder

    chosen = load_controller(controller, settings.lifecycle.gates, choose_device(settings.device))
    environment = make_environment(settings)
    folder = RunFolder.create(
        out or new_folder("grow", settings.task), config=dump(settings), seed=settings.seed
    )
    with folder, cpu_threads(settings.threads), StepProgress(environment.steps, quiet) as progress:
        run = run_controller(environment, controller, chosen, on_step=lambda _: progress.advance("growing"))
        best = GrownMember.best(environment, run)
        best.save(folder.path)
        reel = film_reel(run.record, settings.telemetry.film_members or 1)
        folder.write_film(reel)
        folder.lanes.write(lanes_of(run.record, environment, 0))
        folder.append_events(episode_events(run.record, 0))
        folder.write_results(as_comparison(environment, [run]))
        save_png(film_strips(reel), folder.path / "film.png")
        page = write_report(folder)
    say(best.describe().split("\n```")[0])
    say(f"wrote {folder.path / 'network.pt2'}, {folder.path / 'film.png'} and {page}")
