"""`esper demo`: train a controller, compare it with fixed sizes, and report the result."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from esper.commands import common

if TYPE_CHECKING:
    from esper.runs.schema import Comparison
    from esper.training import TrainingRun

USUAL_MEMBERS = 24
SMALL, MIDDLE, LARGE = "static", "fixed:hidden=32", "fixed:hidden=64+depth=4"
SIZES = (SMALL, MIDDLE, LARGE)
SCHEDULE, LEARNED = "schedule:widen_full@0.05+clone@0.2", "trained here"


def demo(
    out: common.Out = None,
    members: common.Members = None,
    overrides: common.Overrides = None,
) -> None:
    """Train a controller for a minute, then grow networks beside fixed sizes at equal compute.

    Ctrl-C is safe: 'esper resume' completes the demo.
    """
    members = members or USUAL_MEMBERS
    settings = common.resolve_settings(None, "demo", overrides)
    from esper.training import TrainingRun

    path = out or common.new_folder("demo", settings.task)
    run = TrainingRun.start(settings, path, kind="demo", request={"members": members})
    code = common.run_training(run, report=False)
    if code:
        raise typer.Exit(code)
    complete(run, members)


def complete(run: TrainingRun, members: int) -> None:
    """Compare what a demo trained with three fixed sizes and a schedule, on fresh networks, and print it."""
    from esper.builders import LEARNER
    from esper.commands.compare import print_comparison, run_arms
    from esper.comparing import as_comparison, prepare
    from esper.controllers import arms_of
    from esper.simic.learner import LearnedController
    from esper.watch.report import write_report

    arms = arms_of(",".join((*SIZES, SCHEDULE)), run.config)
    arms[LEARNED] = LearnedController(run.trainer.learners[LEARNER].agent)
    environment, arms, remarks = prepare(run.config.model_copy(update={"members": members}), arms)
    with run.folder.reopened() as folder:
        runs = run_arms(environment, arms, run.config, folder, "comparing")
        comparison = as_comparison(environment, runs, remarks)
        folder.write(comparison)
        page = write_report(folder)
    print_comparison(comparison)
    typer.echo(verdict(comparison))
    typer.echo(f"\nThe report: {page}")


def verdict(comparison: Comparison) -> str:
    """Say what one grown run reached beside the best and the worst of the fixed sizes."""
    from esper.runs.console import interval
    from esper.utils.statistics import mean_interval

    reached = {result.name: mean_interval(result.test_accuracy) for result in comparison.controllers}

    def percent(name: str) -> str:
        mean, half = reached[name]
        return f"{interval(100 * mean, 100 * half, '.1f')} %"

    ranked = sorted(SIZES, key=lambda name: reached[name][0])
    members = len(comparison.controllers[0].members)
    return (
        f"Test accuracy at equal compute, mean over {members} networks with its 95 % interval. Of three "
        f"fixed sizes the best reached {percent(ranked[-1])} ({ranked[-1]}) and the worst "
        f"{percent(ranked[0])} ({ranked[0]}); which is best is not known before training. One network "
        f"that grows reached {percent(SCHEDULE)} by a plain schedule and "
        f"{percent(LEARNED)} by the controller that was trained just now."
    )
