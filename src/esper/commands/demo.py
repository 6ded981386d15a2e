"""`esper demo`: train Tamiyo, compare it with controls, show pictures, and say honestly what came of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from esper.commands.options import Out, Overrides, check_range, print_line
from esper.commands.running import carry_through, interruption_told, new_folder, resolve_settings

if TYPE_CHECKING:
    from esper.comparing import Contest
    from esper.telemetry.schema import Comparison
    from esper.training import TrainingRun

USUAL_MEMBERS = 24
CONTROLS = ("static", "random", "heuristic")
BEFORE, LEARNED = "untrained", "tamiyo"


def demo(
    out: Out = None,
    members: Annotated[
        int, typer.Option("--members", "-n", help="fresh networks under each controller")
    ] = USUAL_MEMBERS,
    overrides: Overrides = None,
) -> None:
    """Train a controller on small images, compare it with controls on fresh networks, and write a report.

    The first line says about how long it will take. Ctrl-C is safe: 'esper resume' completes the demo.
    """
    check_range("--members", members, 1, 1_000_000)
    settings = resolve_settings(None, "demo", overrides)
    from esper.training import TrainingRun

    path = out or new_folder("demo", settings.task)
    run = TrainingRun.start(settings, path, kind="demo", request={"members": members})
    code = carry_through(run, report=False)
    if code:
        raise typer.Exit(code)
    complete(run, members)


def complete(run: TrainingRun, members: int) -> None:
    """Compare what a demo trained with its controls, and say what came of it."""
    from esper.commands.compare import print_comparison, run_contest
    from esper.telemetry.report import write_report

    with run.folder.reopened():
        with interruption_told(run.folder):
            comparison, _ = run_contest(_contest(run, members))
        run.folder.write_results(comparison)
        page = write_report(run.folder)
    print_comparison(comparison)
    print_line(verdict(comparison))
    print_line(f"\nThe report with all pictures: {page}")


def _contest(run: TrainingRun, members: int) -> Contest:
    """The trained controller, itself before training, and the controls, on fresh networks."""
    from esper.builders import LEARNER, make_agent
    from esper.comparing import Contest
    from esper.line_up import LineUp
    from esper.simic.learner import LearnedController

    agent = run.trainer.learners[LEARNER].agent
    arms = LineUp.parse(",".join(CONTROLS)).load(run.config)
    arms[BEFORE] = LearnedController(make_agent(run.config, agent.device), run.config.learner)
    arms[LEARNED] = LearnedController(agent, run.config.learner)
    return Contest(run.config.model_copy(update={"members": members}), arms)


def verdict(comparison: Comparison) -> str:
    """What training changed, and what growth is worth, each with its interval."""
    from esper.telemetry.differences import paired_differences
    from esper.telemetry.numbers import interval

    by_name = {result.name: result for result in comparison.controllers}
    sentences = []
    for other, said in ((BEFORE, "itself before it was trained"), (CONTROLS[0], "networks that never grow")):
        gaps = paired_differences([by_name[other], by_name[LEARNED]])
        phi = next(gap for gap in gaps if gap.quantity == "potential")
        points = next(gap for gap in gaps if gap.quantity == "test_accuracy")
        word = "above" if phi.mean > phi.ci else "below" if phi.mean < -phi.ci else "not clearly apart from"
        sentences.append(
            f"Tamiyo is {word} {said}: Φ {interval(phi.mean, phi.ci, '+.4f')}, "
            f"test accuracy {interval(100 * points.mean, 100 * points.ci, '+.2f')} points, "
            f"over {phi.members} fresh networks."
        )
    return "\n".join(sentences)
