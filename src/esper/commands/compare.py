"""`esper compare`: controllers and networks that never change, at equal compute, with intervals."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from esper.commands import common

if TYPE_CHECKING:
    from esper.comparing import ControllerRun
    from esper.config import RunConfig
    from esper.controllers import Arm
    from esper.runs.run_folder import RunFolder
    from esper.runs.schema import Comparison
    from esper.simic.environment import GrowthEnvironment

CONTROLLERS = "static,schedule,tamiyo"


def compare(
    controllers: Annotated[
        str,
        typer.Option(
            "--controllers",
            "-C",
            help=f"names with commas between them, the first one is the baseline: {common.CONTROLLER_HELP}; "
            "fixed:hidden=16+depth=2 is a host of that size that never grows",
        ),
    ] = CONTROLLERS,
    members: common.Members = None,
    config: common.ConfigFile = None,
    preset: common.Preset = None,
    overrides: common.Overrides = None,
    task: common.TaskName = None,
    out: common.Out = None,
    device: common.Device = None,
    force: common.Force = False,
    quiet: common.Quiet = False,
) -> None:
    """Compare controllers on the same networks.

    It says which differences are larger than chance. Every controller gets the same members (networks), with
    the same first weights and the same order of the data. Networks that never grow get as many FLOPs as the
    controller that spent most. What is compared is accuracy on a test split that nothing else reads. Settings
    are those of the first run folder among the controllers, if there is one. A learned controller, and the
    rule of thumb 'schedule', do not grow outside of the conditions that they were trained or found in, and
    say so.
    """
    names = [name.strip() for name in controllers.split(",")]
    settings = common.resolve_settings(config, preset, overrides, task, device, names, members)
    request = {"controllers": controllers, "force": force}
    run(settings, controllers, force, lambda: common.begin_folder(settings, out, "compare", request), quiet)


def run(
    settings: RunConfig, controllers: str, force: bool, open_folder: Callable[[], RunFolder], quiet: bool
) -> None:
    """Run a comparison, write it into a folder, opened once nothing can be refused any more, and show it."""
    if not quiet:
        typer.echo(f"loading PyTorch and {settings.task} ...")  # takes seconds
    from esper.comparing import as_comparison, prepare, trajectories_of
    from esper.controllers import arms_of
    from esper.watch.report import write_report

    environment, arms, remarks = prepare(settings, arms_of(controllers, settings), force)
    with open_folder() as folder:
        runs = run_arms(environment, arms, settings, folder, "comparing", quiet)
        for trajectories in trajectories_of(environment, runs):
            folder.trajectories.write(trajectories, len(runs))
        comparison = as_comparison(environment, runs, remarks)
        folder.write(comparison)
        page = write_report(folder)
    print_comparison(comparison)
    typer.echo(f"wrote {page}")


def run_arms(
    environment: GrowthEnvironment,
    arms: dict[str, Arm],
    settings: RunConfig,
    folder: RunFolder,
    what: str,
    quiet: bool = False,
) -> list[ControllerRun]:
    """Run the arms of a comparison and say how far they are; Ctrl-C ends the command with a hint."""
    from esper.comparing import compare
    from esper.utils.devices import cpu_threads

    try:
        with cpu_threads(settings.threads), common.step_progress(len(arms), what, quiet) as advance:
            return compare(environment, arms, advance)
    except KeyboardInterrupt:
        typer.echo(f"stopped; begin it again with: esper resume {folder.path}", err=True)
        raise typer.Exit(130) from None  # the exit code of Ctrl-C


def print_comparison(comparison: Comparison) -> None:
    """Print means with 95 % intervals, and paired differences to the first controller, as a table."""
    from esper.runs.console import interval, three_digits
    from esper.utils.statistics import mean_interval

    baseline, rows = comparison.controllers[0], []
    # The intervals of two arms may overlap although their paired difference is clear, so both are shown.
    for result in comparison.controllers:
        accuracy, half = mean_interval(result.test_accuracy)
        flops, half_flops = mean_interval(result.flops)
        gaps = [
            interval(100 * d.mean, 100 * d.ci, "+.1f")
            for d in comparison.differences
            if d.controller == result.name and d.quantity == "test_accuracy"
        ]
        row = [
            result.name,
            interval(100 * accuracy, 100 * half, ".1f"),
            interval(*mean_interval(result.parameters), ",.0f"),
            interval(flops / 1e9, half_flops / 1e9, three_digits(flops / 1e9)),
        ]
        rows.append([*row, *(gaps or [""])])
    typer.echo(
        f"\n{comparison.task}, host {comparison.host}, {len(baseline.members)} members each: mean ± 95 % "
        f"interval.\nΔ is the difference to {baseline.name}, member by member, in points.\n"
    )
    titles = ("controller", "test accuracy, %", "parameters", "GFLOPs", "Δ accuracy")
    common.print_table(titles, rows, right=range(1, len(titles)))
    for remark in comparison.remarks:
        typer.echo(remark)
