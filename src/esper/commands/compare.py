"""`esper compare`: controllers and networks that never change, at equal compute, with intervals."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from esper.commands import common
from esper.utils.launch import Launch

if TYPE_CHECKING:
    from esper.comparing import Experiment
    from esper.config import RunConfig
    from esper.runs.run_folder import RunFolder
    from esper.runs.schema import Comparison
    from esper.utils.gather import Gather

WIDE_ONLY = ("Φ", "GFLOPs")  # columns that a narrow terminal leaves to the report
CONTROLLERS = "static,schedule,tamiyo"
USUAL_MEMBERS = 16


def compare(
    controllers: Annotated[
        str,
        typer.Option(
            "--controllers",
            "-C",
            help=f"names with commas between them, the first one is the baseline: {common.CONTROLLER_HELP}; "
            "final:NAME is the network that NAME ended with, trained from the start, and best-of (or "
            "best-of:8) the best of several that never grow; fixed:hidden=16+depth=2 is a host of that size",
        ),
    ] = CONTROLLERS,
    members: Annotated[
        int | None,
        typer.Option(
            "--members", "-n", help=f"networks under each controller and seed; usually {USUAL_MEMBERS}"
        ),
    ] = None,
    seeds: Annotated[int, typer.Option("--seeds", help="how often all of it is repeated")] = 1,
    config: common.ConfigFile = None,
    preset: common.Preset = None,
    overrides: common.Overrides = None,
    task: common.TaskName = None,
    out: common.Out = None,
    device: common.Device = None,
    force: common.Force = False,
    quiet: common.Quiet = False,
    as_json: common.JsonResult = False,
) -> None:
    """Compare controllers on the same networks, and say which differences are larger than chance.

    Every controller gets the same members (networks), with the same first weights and the same order of the
    data. Networks that never grow get as many FLOPs as the controller that spent most, and final:NAME as many
    as NAME. What is compared is accuracy on a test split that nothing else reads. Settings are those of the
    first run folder among the controllers, if there is one. A learned controller, and the rule of thumb
    'schedule', do not grow outside of the conditions that they were trained or found in, and say so.
    """
    common.check_range("--members", members, 1, 1_000_000)
    common.check_range("--seeds", seeds, 1, 10_000)
    names = [name.strip().removeprefix("final:") for name in controllers.split(",")]
    settings = common.resolve_settings(config, preset, overrides, task, device, names, members, USUAL_MEMBERS)
    from esper.training import shared_config, with_shards
    from esper.utils.gather import processes

    request = {"controllers": controllers, "seeds": seeds, "force": force}
    with processes(Launch.of()) as gather:
        shared = with_shards(shared_config(settings, gather), gather)
        _run(
            shared,
            request,
            gather,
            lambda: common.begin_folder(shared, out, "compare", request),
            quiet,
            as_json,
        )


def compare_again(folder: RunFolder | None, gather: Gather, quiet: bool, as_json: bool) -> None:
    """Do an interrupted comparison again in its folder, as it was asked for; None in other processes."""
    from esper.config import RunConfig
    from esper.runs.run_folder import RunFolder
    from esper.training import read_config, shared_config
    from esper.utils.gather import all_or_none, broadcast

    def read() -> tuple[RunConfig, dict[str, Any]]:
        if folder is None:
            return RunConfig(), {}
        request = {name: common.requested(folder, name) for name in ("controllers", "seeds")}
        return read_config(folder), {**request, "force": bool(folder.request.get("force"))}

    def reopen() -> RunFolder:
        assert folder is not None, "only the first process opens the folder"
        return RunFolder.open(folder.path)

    settings, request = all_or_none(gather, read)
    shared, request = shared_config(settings, gather), broadcast(gather, request)
    _run(shared, request, gather, reopen, quiet, as_json)


def _run(
    settings: RunConfig,
    request: dict[str, Any],
    gather: Gather,
    open_folder: Callable[[], RunFolder],
    quiet: bool,
    as_json: bool,
) -> None:
    """Run a comparison; the first process writes the results into its folder and shows them.

    The folder is opened once everything that can be refused has been accepted by all processes.
    """
    from esper.comparing import Experiment
    from esper.controllers import arms_of
    from esper.runs.schema import json_values, to_json
    from esper.utils.gather import all_or_none
    from esper.watch.report import write_report

    def prepare() -> Experiment:
        arms = arms_of(request["controllers"], settings)
        return Experiment(settings, arms, request["seeds"], gather, request["force"])

    experiment = all_or_none(gather, prepare)
    folder = all_or_none(gather, lambda: None if gather.rank else open_folder())
    if folder is None:
        experiment.run()
        return
    with folder:
        with common.resume_hint(folder):
            comparison = run_experiment(experiment, quiet)
        for lanes in experiment.lanes:
            folder.lanes.write(lanes, len(experiment.lanes))
        folder.write(comparison)
        page = write_report(folder)
    if as_json:
        print(to_json({"folder": str(folder.path), "report": str(page), **json_values(comparison)}))
    else:
        print_comparison(comparison)
        common.print_line(f"wrote {page}")


def run_experiment(experiment: Experiment, quiet: bool = False) -> Comparison:
    """Run an experiment and show how far it is."""
    total = experiment.seeds * len(experiment.arms)
    with common.step_progress(total, "comparing", quiet) as advance:
        return experiment.run(advance)


def print_comparison(comparison: Comparison, potential: bool = True) -> None:
    """Print means with 95 % intervals, and paired differences to the first controller, as a table.

    potential: with the columns of Φ, what a controller is rewarded for.
    """
    from esper.runs.console import interval, three_digits
    from esper.utils.statistics import mean_interval

    rows = []
    for result in comparison.controllers:
        accuracy, half = mean_interval(result.test_accuracy)
        flops, half_flops = mean_interval(result.flops)
        gaps = {d.quantity: d for d in comparison.differences if d.controller == result.name}
        points, value = gaps.get("test_accuracy"), gaps.get("potential")
        rows.append(
            {
                "controller": result.name,
                "test accuracy, %": interval(100 * accuracy, 100 * half, ".1f"),
                "parameters": interval(*mean_interval(result.parameters), ",.0f"),
                "Φ": interval(*mean_interval(result.potential), ".3f"),
                "GFLOPs": interval(flops / 1e9, half_flops / 1e9, three_digits(flops / 1e9)),
                "Δ accuracy": interval(100 * points.mean, 100 * points.ci, "+.1f") if points else "",
                "Δ Φ": interval(value.mean, value.ci, "+.3f") if value else "",
            }
        )
    screen = common.console()
    narrow = screen.is_terminal and screen.width < common.TABLE_WIDTH
    titles = [t for t in rows[0] if (potential or "Φ" not in t) and not (narrow and t in WIDE_ONLY)]
    baseline = comparison.controllers[0]
    lines = [
        f"\n{comparison.task}, host {comparison.host}, {len(baseline.members)} members each: mean ± 95 % "
        "interval.",
        f"Δ is the difference to {baseline.name}, member by member; accuracy in points.",
    ]
    if potential:
        lines.append("Φ is accuracy less a price on parameters: what a controller is rewarded for.")
    common.print_line("\n".join(lines) + "\n")
    cells = [[row[title] for title in titles] for row in rows]
    common.print_table(titles, cells, right=range(1, len(titles)))
    for remark in comparison.remarks:
        common.print_line(remark)
