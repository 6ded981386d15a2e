"""`esper demo`: train a controller, compare it with fixed sizes, and report the result."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from esper.commands import common

if TYPE_CHECKING:
    from esper.training import TrainingRun

USUAL_MEMBERS = 24
SIZES = ("static", "fixed:hidden=32", "fixed:hidden=64+depth=4")
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
    from esper.runs.run_folder import RunFolder
    from esper.simic.learner import LearnedController
    from esper.watch.facts import comparison_verdicts
    from esper.watch.report import write_report

    arms = arms_of(",".join((*SIZES, SCHEDULE)), run.config)
    arms[LEARNED] = LearnedController(run.trainer.learners[LEARNER].agent)
    environment, arms, remarks = prepare(run.config.model_copy(update={"members": members}), arms)
    with RunFolder.open(run.folder.path) as folder:
        runs = run_arms(environment, arms, run.config, folder, "comparing")
        comparison = as_comparison(environment, runs, remarks)
        folder.write(comparison)
        page = write_report(folder)
    print_comparison(comparison)
    for sentence in comparison_verdicts(comparison):
        typer.echo(sentence)
    typer.echo(f"\nThe report: {page}")
