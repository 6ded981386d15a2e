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

USUAL_MEMBERS = 8
BASELINE = "static"


def grow(
    controller: Annotated[
        str, typer.Option("--controller", "-C", help=f"decides what grows: {common.CONTROLLER_HELP}")
    ] = "schedule",
    members: Annotated[
        int | None,
        typer.Option("--members", "-n", help=f"networks to grow; the best is kept; usually {USUAL_MEMBERS}"),
    ] = None,
    task: common.TaskName = None,
    preset: common.Preset = None,
    config: common.ConfigFile = None,
    overrides: common.Overrides = None,
    device: common.Device = None,
    out: common.Out = None,
    force: common.Force = False,
    quiet: common.Quiet = False,
    as_json: common.JsonResult = False,
) -> None:
    """Grow networks on a task, and write the one that is best on the validation split.

    Seeds are planted at slots, between two layers of a network, and stay if they help. The same networks are
    also trained without any growth, and the report compares the two. It writes network.pt2, which torch alone
    can run, and a report.

    A learned controller, and the rule of thumb 'schedule', do not grow outside of the conditions that they
    were trained or found in, and say so: '--preset compute' has those.
    """
    common.check_range("--members", members, 1, 1_000_000)
    settings = common.resolve_settings(
        config, preset, overrides, task, device, [controller], members, USUAL_MEMBERS
    )
    request = {"controller": controller, "force": force}
    _run(
        settings,
        controller,
        force,
        lambda: common.begin_folder(settings, out, "grow", request),
        quiet,
        as_json,
    )


def grow_again(folder: RunFolder, quiet: bool, as_json: bool) -> None:
    """Do an interrupted growth again in its folder, as it was asked for."""
    from esper.runs.run_folder import RunFolder
    from esper.training import read_config

    settings, controller = read_config(folder), common.requested(folder, "controller")
    force = bool(folder.request.get("force"))
    _run(settings, controller, force, lambda: RunFolder.open(folder.path), quiet, as_json)


def _run(
    settings: RunConfig,
    controller: str,
    force: bool,
    open_folder: Callable[[], RunFolder],
    quiet: bool,
    as_json: bool,
) -> None:
    """Grow the networks and write the best one, its history and a comparison with no growth into a folder.

    The folder is opened once everything that can be refused has been accepted.
    """
    from esper.builders import make_environment
    from esper.comparing import as_comparison, compare
    from esper.controllers import Fixed, check_schedule, load_controller, why_not_here
    from esper.grown_network import GrownMember
    from esper.runs.schema import json_values, to_json
    from esper.simic.telemetry import build_lanes, describe_host, episode_events
    from esper.tamiyo.scripted import Static
    from esper.utils.devices import choose_device, cpu_threads
    from esper.watch.report import write_report

    loaded = load_controller(controller, choose_device(settings.device))
    check_schedule(loaded, settings)
    environment = make_environment(settings, best_epoch=True)
    why_not = None if force else why_not_here(controller, loaded, environment.spec, "--force")
    arms: dict[str, Arm] = {BASELINE: Fixed(), controller: loaded}
    if why_not or isinstance(loaded, Static):  # both arms would be the same
        arms = {BASELINE: Static()}
    with open_folder() as folder:
        with (
            common.resume_hint(folder),
            cpu_threads(settings.threads),
            common.step_progress(len(arms), "growing", quiet) as advance,
        ):
            runs = compare(environment, arms, advance)
            best = GrownMember.best(environment, runs[-1], runs[0])
            best.save(folder.path)
        folder.lanes.write(build_lanes(runs[-1].record, describe_host(environment.population), 0))
        folder.replace_events(episode_events(runs[-1].record, 0))  # an earlier attempt may have left its own
        remarks = [why_not] if why_not else []
        comparison = as_comparison(environment, [run.result() for run in runs], remarks)
        folder.write(comparison)  # last but for the report: 'esper resume' takes it for the end of the run
        page = write_report(folder)
    if as_json:
        summary = {"folder": str(folder.path), "report": str(page), "network": best.record()}
        print(to_json({**summary, **json_values(comparison)}))
        return
    common.print_line(best.describe().split("\n```")[0])
    for remark in remarks:
        common.print_line(remark)
    common.print_line(f"wrote {folder.path / 'network.pt2'} and {page}")
