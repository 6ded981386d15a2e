"""`esper demo`: a GPT trained plainly and grown into, at equal compute, and a controller that learns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from esper.commands import common

if TYPE_CHECKING:
    from esper.runs.schema import RoundSummary
    from esper.training import TrainingRun

USUAL_NETWORKS = 4
FRESH = 16  # networks that the trained controller is tried on


def demo(
    out: common.Out = None,
    networks: Annotated[
        int, typer.Option("--networks", "-n", min=2, max=100, help="GPTs that are trained in each way")
    ] = USUAL_NETWORKS,
    overrides: common.Overrides = None,
) -> None:
    """See in two minutes what growing does: the same network, for less compute.

    Trains small language models plainly, with half of their layers, and grown into, at equal compute. Then
    trains a controller that decides when and where small networks grow. Writes a report of both. Ctrl-C is
    safe: 'esper resume' completes the demo.
    """
    settings = common.resolve_settings(None, "demo", overrides)
    from esper.training import TrainingRun

    path = out or common.new_folder("demo", "text")
    run = TrainingRun.start(settings, path, kind="demo", request={"networks": networks})
    raise typer.Exit(finish(run))


def finish(run: TrainingRun) -> int:
    """Do what is left of a demo, write its report, print what came out, and return the exit code."""
    from esper.commands.demo_networks import ARMS, compare_networks, train_networks
    from esper.runs.console import learning_in_words
    from esper.runs.run_folder import RunFolder
    from esper.watch.report import write_report

    networks, path = int(run.folder.request.get("networks", USUAL_NETWORKS)), run.folder.path
    typer.echo(
        "1. A small language model, trained to predict the next character of Python's own sources: plainly,\n"
        "   with half of its layers, and grown into (half of the layers first, the others later as copies)."
    )
    total = networks * len(ARMS)
    with common.resume_hint(run.folder), common.step_progress(total, "   training networks:") as advance:
        train_networks(path, networks, advance)
    rounds = run.config.rounds
    typer.echo("2. A controller learns by trial when and where small networks should grow.")

    def show(done: RoundSummary) -> None:
        left = f"about {done.seconds_left:.0f} s left"
        typer.echo(f"   training the controller: round {done.round} of {rounds}, {left}", err=True)

    if code := common.run_training(run, report=False, show=show):
        return code
    with RunFolder.open(path) as folder, common.resume_hint(folder):
        comparison = compare_networks(path, networks, [try_controller(run)])
        folder.write(comparison)
        page = write_report(folder)
        learned = learning_in_words(folder.metrics_file)
    typer.echo("\nWhat came out:")
    for sentence in (*comparison.verdicts, *comparison.remarks, learned):
        typer.echo(f"- {sentence}")
    typer.echo(f"\nFigures and curves: open {page} in a browser.")
    return 0


def try_controller(run: TrainingRun) -> str:
    """Let the trained controller grow fresh networks, and say how they compare with ones that do not grow."""
    from esper.builders import LEARNER
    from esper.comparing import compare, prepare
    from esper.controllers import arms_of
    from esper.runs.console import interval
    from esper.simic.learner import LearnedController
    from esper.utils.devices import cpu_threads
    from esper.utils.statistics import paired_interval

    arms = {
        **arms_of("static", run.config),
        "controller": LearnedController(run.trainer.learners[LEARNER].agent),
    }
    environment, arms, _ = prepare(run.config.model_copy(update={"members": FRESH}), arms)
    with cpu_threads(run.config.threads):
        static, grown = (each.result().test_accuracy for each in compare(environment, arms))
    mean, half = paired_interval(grown, static)
    points = interval(100 * mean, 100 * half, "+.1f")
    sizes = [line["parameter_ratio_mean"] for line in run.folder.metrics_file]
    learned = "less" if sizes[-1] < sizes[0] else "more"
    worth = "does not pay" if mean + half < 0 else "pays" if mean - half > 0 else "makes no difference"
    return (
        f"On these networks growth {worth}: on {FRESH} fresh ones the controller reaches {points} points of "
        f"test accuracy against no growth, at equal compute. It learned to grow {learned}: to {sizes[0]:.2f} "
        f"times the size in the first round, {sizes[-1]:.2f} in the last."
    )
