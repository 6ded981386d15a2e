"""`esper grow`: grow networks with any controller, and keep the best."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from esper.commands import common

if TYPE_CHECKING:
    from esper.config import RunConfig
    from esper.controllers import Arm
    from esper.runs.run_folder import RunFolder

BASELINE = "static"


def grow(
    controller: Annotated[
        str, typer.Option("--controller", "-C", help=f"decides what grows: {common.CONTROLLER_HELP}")
    ] = "schedule",
    members: common.Members = None,
    task: common.TaskName = None,
    preset: common.Preset = None,
    config: common.ConfigFile = None,
    overrides: common.Overrides = None,
    device: common.Device = None,
    out: common.Out = None,
    force: common.Force = False,
    quiet: common.Quiet = False,
) -> None:
    """Grow networks of Esper's own, and write the best.

    Seeds are planted at slots, between two layers of a network, and stay if they help. The same networks are
    also trained without any growth, and the report compares the two. It writes network.pt2, which torch alone
    can run, and a report.

    A learned controller, and the rule of thumb 'schedule', do not grow outside of the conditions that they
    were trained or found in, and say so: '--preset compute' has those.
    """
    settings = common.resolve_settings(config, preset, overrides, task, device, [controller], members)
    request = {"controller": controller, "force": force}
    run(settings, controller, force, lambda: common.begin_folder(settings, out, "grow", request), quiet)


def run(
    settings: RunConfig, controller: str, force: bool, open_folder: Callable[[], RunFolder], quiet: bool
) -> None:
    """Grow networks; write the best and a comparison into a folder, opened once nothing can be refused."""
    if not quiet:
        typer.echo(f"loading PyTorch and {settings.task} ...")  # takes seconds
    from esper.commands.compare import run_arms
    from esper.comparing import as_comparison, prepare
    from esper.controllers import Fixed, load_controller
    from esper.grown_network import GrownMember
    from esper.simic.telemetry import build_trajectories, describe_host, episode_events
    from esper.tamiyo.scripted import Static
    from esper.utils.devices import choose_device
    from esper.watch.report import write_report

    loaded = load_controller(controller, choose_device(settings.device))
    asked: dict[str, Arm] = {BASELINE: Fixed(), controller: loaded}
    environment, arms, remarks = prepare(settings, asked, force, best_epoch=True)
    if remarks or isinstance(loaded, Static):  # both arms would be the same
        arms = {BASELINE: Static()}
    with open_folder() as folder:
        runs = run_arms(environment, arms, settings, folder, "growing", quiet)
        best = GrownMember.best(environment, runs[-1], runs[0])
        best.save(folder.path)
        parts = describe_host(environment.population)
        folder.trajectories.write(build_trajectories(runs[-1].record, parts, 0))
        folder.replace_events(episode_events(runs[-1].record, 0))  # an earlier attempt may have left its own
        # last but for the report: 'esper resume' takes it for the end of the run
        folder.write(as_comparison(environment, runs, remarks))
        page = write_report(folder)
    typer.echo(best.describe().split("\n```")[0])
    for remark in remarks:
        typer.echo(remark)
    typer.echo(f"wrote {folder.path / 'network.pt2'} and {page}")
