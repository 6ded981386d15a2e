"""`esper grow`: grow networks with any controller, and keep the best."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from esper.commands.options import (
    CONTROLLER_HELP,
    ConfigFile,
    Device,
    Force,
    JsonResult,
    Out,
    Overrides,
    Preset,
    Quiet,
    TaskName,
    check_range,
    print_line,
)
from esper.commands.running import begin_folder, interruption_told, requested, resolve_settings

if TYPE_CHECKING:
    from esper.config import RunConfig
    from esper.controllers import Arm
    from esper.runs.run_folder import RunFolder
    from esper.simic.environment import GrowthEnvironment

USUAL_MEMBERS = 8
BASELINE = "static"


def grow(
    controller: Annotated[
        str, typer.Option("--controller", "-C", help=f"who decides what grows: {CONTROLLER_HELP}")
    ] = "schedule",
    members: Annotated[
        int | None,
        typer.Option("--members", "-n", help=f"networks to grow; the best is kept; usually {USUAL_MEMBERS}"),
    ] = None,
    config: ConfigFile = None,
    preset: Preset = None,
    overrides: Overrides = None,
    task: TaskName = None,
    out: Out = None,
    device: Device = None,
    force: Force = False,
    quiet: Quiet = False,
    as_json: JsonResult = False,
) -> None:
    """Grow networks on a task, and write the one that is best on the validation split.

    Seeds are planted at the joints, the places between two layers of a network, and stay if they help. The
    same networks are also trained without any growth, and the report compares the two. It writes
    network.pt2, which torch alone can run, and a report.

    A learned controller, and the rule of thumb 'schedule', do not grow outside of the conditions that they
    were trained or found in, and say so: '--preset compute' has those.
    """
    check_range("--members", members, 1, 1_000_000)
    settings = resolve_settings(config, preset, overrides, task, device, [controller], members, USUAL_MEMBERS)
    growth = _prepare(settings, controller, force)
    with begin_folder(settings, out, "grow", {"controller": controller, "force": force}) as folder:
        _finish(growth, folder, quiet, as_json)


def grow_again(folder: RunFolder, quiet: bool, as_json: bool) -> None:
    """Do an interrupted growth again in its folder, as it was asked for."""
    from esper.runs.run_folder import RunFolder
    from esper.training import read_config

    force = bool(folder.request.get("force"))
    growth = _prepare(read_config(folder), requested(folder, "controller"), force)
    with RunFolder.open(folder.path) as opened:
        _finish(growth, opened, quiet, as_json)


@dataclass(frozen=True)
class _Growth:
    """All that a growth needs, known to work before anything is written."""

    settings: RunConfig
    arms: dict[str, Arm]  # the baseline first, whose networks are in no file, then who grows; or static alone
    environment: GrowthEnvironment
    remarks: list[str]


def _prepare(settings: RunConfig, controller: str, force: bool) -> _Growth:
    from esper.builders import make_environment
    from esper.controllers import Fixed, check_schedule, load_controller, why_not_here
    from esper.tamiyo.scripted import Static
    from esper.utils.devices import choose_device

    loaded = load_controller(controller, choose_device(settings.device))
    check_schedule(loaded, settings)
    environment = make_environment(settings, best_epoch=True)
    why_not = None if force else why_not_here(controller, loaded, environment.spec, "--force")
    arms: dict[str, Arm] = {BASELINE: Fixed(), controller: loaded}
    if why_not or isinstance(loaded, Static):  # both arms would be the same
        arms = {BASELINE: Static()}
    return _Growth(settings, arms, environment, [why_not] if why_not else [])


def _finish(growth: _Growth, folder: RunFolder, quiet: bool, as_json: bool) -> None:
    """Grow the networks, and leave the best and the story of it in a folder."""
    from esper.commands.progress import step_progress
    from esper.comparing import as_comparison, compare
    from esper.grown_network import GrownMember
    from esper.runs.report import write_report
    from esper.runs.schema import json_values, to_json
    from esper.simic.events import episode_events
    from esper.simic.lanes import host_parts, lanes_of
    from esper.utils.devices import cpu_threads

    environment, settings = growth.environment, growth.settings
    steps = environment.spec.episode.steps * len(growth.arms)
    with (
        interruption_told(folder),
        cpu_threads(settings.threads),
        step_progress(steps, "growing", quiet) as advance,
    ):
        runs = compare(environment, growth.arms, on_step=lambda _: advance())
        best = GrownMember.best(environment, runs[-1], runs[0])
        best.save(folder.path)
    folder.lanes.write(lanes_of(runs[-1].record, host_parts(environment.population), 0))
    folder.replace_events(episode_events(runs[-1].record, 0))  # an earlier attempt may have left its own
    comparison = as_comparison(environment, runs, growth.remarks)
    folder.write(comparison)  # last but for the report: 'esper resume' takes it for the end of the run
    page = write_report(folder)
    if as_json:
        summary = {"folder": str(folder.path), "report": str(page), "network": best.record()}
        print(to_json({**summary, **json_values(comparison)}))
        return
    print_line(best.describe().split("\n```")[0])
    for remark in growth.remarks:
        print_line(remark)
    print_line(f"wrote {folder.path / 'network.pt2'} and {page}")
