"""`esper demo`: train Tamiyo, compare it with controls, show pictures, and say honestly what came of it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from esper.commands.options import Overrides
from esper.commands.running import Out, carry_through, new_folder, say

if TYPE_CHECKING:
    from esper.comparing import Contest
    from esper.telemetry.schema import Comparison
    from esper.training import TrainingRun

CONTROLS = ("static", "random", "heuristic")
BEFORE, LEARNED = "untrained", "tamiyo"


def demo(
    out: Out = None,
    members: Annotated[
        int, typer.Option("--members", "-n", help="fresh networks under each controller")
    ] = 24,
    overrides: Overrides = None,
) -> None:
    """Train a controller on an embedded task, compare it with controls on fresh networks, write a report."""
    begun = time.monotonic()
    from esper.commands.compare import hold, show
    from esper.config import load_config
    from esper.telemetry.report import write_report
    from esper.training import TrainingRun

    settings = load_config(preset="demo", overrides=overrides or [])
    run = TrainingRun.start(settings, out or new_folder("demo", settings.task))
    code = carry_through(run, report=False)
    if code:
        raise typer.Exit(code)
    comparison, _ = hold(_contest(run, members))
    run.folder.write_results(comparison)
    page = write_report(run.folder)
    show(comparison)
    say(verdict(comparison))
    seconds = time.monotonic() - begun
    say(f"\nThe report with all pictures: {page}")
    say(f"The whole took {seconds // 60:.0f} min {seconds % 60:.0f} s.")


def _contest(run: TrainingRun, members: int) -> Contest:
    """The trained controller, itself before training, and the controls, on fresh networks."""
    from esper.builders import LEARNER, make_agent
    from esper.comparing import Contest
    from esper.controllers import load_controller
    from esper.simic.learner import LearnedController

    agent, gates = run.trainer.learners[LEARNER].agent, run.config.lifecycle.gates
    controllers = {name: load_controller(name, gates, agent.device) for name in CONTROLS}
    controllers[BEFORE] = LearnedController(make_agent(run.config, agent.device), run.config.learner)
    controllers[LEARNED] = LearnedController(agent, run.config.learner)
    return Contest(run.config.model_copy(update={"members": members}), controllers)


def verdict(comparison: Comparison) -> str:
    """What training changed, and what growth is worth, each with its interval."""
    from esper.telemetry.differences import paired_differences
    from esper.telemetry.live import interval

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
