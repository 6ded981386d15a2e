"""`esper compare`: controllers on equal footing, with intervals."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from esper.commands.options import ConfigFile, Overrides, Preset, check_range, console
from esper.commands.running import Out, Quiet, TaskName, new_folder, say, settle

if TYPE_CHECKING:
    from esper.comparing import Contest
    from esper.telemetry.schema import Comparison, FilmReel

WIDTH = 120  # of the whole table, and of any where there is no terminal
WIDE = ("test accuracy, %", "parameters", "Φ", "GFLOPs", "Δ accuracy", "Δ Φ")
NARROW = ("test accuracy, %", "parameters", "Δ accuracy", "Δ Φ")  # the report has the rest
CONTROLLERS = "static,random,heuristic,final:heuristic"


def compare(
    controllers: Annotated[
        str,
        typer.Option(
            "--controllers",
            "-C",
            help="names, run folders, checkpoints, or final:NAME (the network that NAME ended with, trained "
            "from the start), with commas between them; the first one is the baseline",
        ),
    ] = CONTROLLERS,
    members: Annotated[
        int, typer.Option("--members", "-n", help="networks under each controller and seed")
    ] = 16,
    seeds: Annotated[int, typer.Option("--seeds", help="how often all of it is repeated")] = 1,
    config: ConfigFile = None,
    preset: Preset = None,
    overrides: Overrides = None,
    task: TaskName = None,
    out: Out = None,
    quiet: Quiet = False,
) -> None:
    """Compare controllers: same initial weights, same data order, same members, and a test split that
    nothing else reads. Settings are those of the first run folder among the controllers, if there is one.
    """
    check_range("--members", members, 1, 1_000_000)
    check_range("--seeds", seeds, 1, 10_000)
    from esper.comparing import Contest, LineUp
    from esper.foundation.config_files import dump
    from esper.telemetry.report import write_report
    from esper.telemetry.run_folder import RunFolder

    line_up = LineUp.parse(controllers)
    names = line_up.controllers.values()
    settings = settle(config, preset, overrides, task, controllers=names, members=members)
    contest = Contest(settings, line_up.load(settings), line_up.finals, seeds)
    folder = RunFolder.create(
        out or new_folder("compare", settings.task), config=dump(settings), seed=settings.seed
    )
    with folder:
        comparison, reel = hold(contest, quiet)
        folder.write_results(comparison)
        folder.write_film(reel)
        page = write_report(folder)
    show(comparison)
    say(f"wrote {page}")


def hold(contest: Contest, quiet: bool = False) -> tuple[Comparison, FilmReel]:
    """Run a contest and show how far it is."""
    from esper.commands.progress import StepProgress

    with StepProgress(contest.steps, quiet) as progress:
        return contest.run(lambda environment: progress.advance("comparing"))


def show(comparison: Comparison) -> None:
    """Means with 95 % intervals, and paired differences to the first controller, as a table."""
    from rich.table import Table

    from esper.foundation.statistics import mean_interval
    from esper.telemetry.live import interval

    baseline = comparison.controllers[0].name
    screen = console()
    if not screen.is_terminal:
        screen.width = WIDTH
    titles = WIDE if screen.width >= WIDTH else NARROW
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("controller", no_wrap=True)
    for title in titles:
        table.add_column(title, justify="right", no_wrap=True)
    for result in comparison.controllers:
        accuracy, half = mean_interval(result.test_accuracy)
        gaps = {d.quantity: d for d in comparison.differences if d.controller == result.name}
        points, worth = gaps.get("test_accuracy"), gaps.get("potential")
        cells = {
            "test accuracy, %": interval(100 * accuracy, 100 * half, ".1f"),
            "parameters": interval(*mean_interval(result.parameters), ",.0f"),
            "Φ": interval(*mean_interval(result.potential), ".3f"),
            "GFLOPs": interval(*mean_interval([flops / 1e9 for flops in result.flops]), ",.3g"),
            "Δ accuracy": interval(100 * points.mean, 100 * points.ci, "+.1f") if points else "",
            "Δ Φ": interval(worth.mean, worth.ci, "+.3f") if worth else "",
        }
        table.add_row(result.name, *[cells[title] for title in titles])
    members = len(comparison.controllers[0].members)
    say(f"\n{comparison.task}, host {comparison.host}, {members} members each: mean ± 95 % interval.")
    say(f"Δ is the difference to {baseline}, member by member; accuracy in points.\n")
    screen.print(table)
    screen.print()
