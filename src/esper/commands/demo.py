"""`esper demo`: a GPT trained plainly and grown into, at equal compute, and a controller that learns."""

from __future__ import annotations

from concurrent.futures import as_completed
from typing import TYPE_CHECKING, Annotated

import typer

from esper.commands import common

if TYPE_CHECKING:
    from esper.runs.schema import ControllerResult
    from esper.training import TrainingRun

USUAL_NETWORKS = 4
FRESH = 48  # networks that the trained controller is tried on, each on a table of its own


def demo(
    out: common.Out = None,
    networks: Annotated[
        int, typer.Option("--networks", "-n", min=2, max=100, help="GPTs that are trained in each way")
    ] = USUAL_NETWORKS,
    overrides: common.Overrides = None,
) -> None:
    """See in about two minutes what growing does: the same network, for less compute.

    Trains small language models plainly, with half of their layers, and grown into, at equal compute, and
    meanwhile a controller that sets the learning rate of small networks. Writes a report of both. Ctrl-C
    is safe: 'esper resume' completes the demo.
    """
    settings = common.resolve_settings(None, "demo", overrides)
    typer.echo(
        "1. A small language model, trained to predict the next character of Python's own sources: plainly,\n"
        "   with half of its layers, and grown into (half of the layers first, the others later as copies).\n"
        "2. Meanwhile, a controller learns to set the learning rate while a small network trains. Each\n"
        "   network begins with a random rate: nobody knows the right one beforehand."
    )
    from esper.training import TrainingRun  # 20 seconds where no bytecode of torch is kept yet

    path = out or common.new_folder("demo", "text")
    run = TrainingRun.start(settings, path, kind="demo", request={"networks": networks})
    raise typer.Exit(finish(run))


def finish(run: TrainingRun) -> int:
    """Do what is left of a demo, write its report, print what came out, and return the exit code."""
    from esper.commands.demo_networks import ARMS, WORKERS, compare_networks, train_networks
    from esper.runs.run_folder import RunFolder
    from esper.watch.report import write_report

    networks, path = int(run.folder.request.get("networks", USUAL_NETWORKS)), run.folder.path
    total, rounds = networks * len(ARMS), run.config.rounds
    # A round of the controller takes about as long as a network.
    with (
        common.resume_hint(run.folder),
        common.step_progress(total + rounds, "   training both:") as advance,
        train_networks(path, networks) as trainings,
    ):

        def show(rounds_done: int) -> None:
            left = sum(not training.done() for training in trainings)
            advance(total - left + min(left, WORKERS) / 2 + rounds_done)  # in training: half done on the mean

        if code := common.run_training(run, show=lambda done: show(done.round)):
            return code
        with RunFolder.open(path) as folder:
            remarks = try_controller(run)
            for training in as_completed(trainings):
                training.result()
                show(rounds)
            comparison = compare_networks(path, networks, remarks)
            folder.write(comparison)
            page = write_report(folder)
    typer.echo("\nWhat came out:")
    for sentence in (*comparison.verdicts, *comparison.remarks):
        typer.echo(f"- {sentence}")
    typer.echo(f"\nFigures and curves: open {page} in a browser.")
    return 0


def try_controller(run: TrainingRun) -> list[str]:
    """Let the trained controller set the rate of fresh networks; say what it does and how they fare."""
    from esper.builders import LEARNER
    from esper.comparing import compare, prepare
    from esper.controllers import arms_of
    from esper.lifecycle.actions import Rate
    from esper.runs.console import interval
    from esper.simic.learner import LearnedController
    from esper.simic.telemetry import rate_choices
    from esper.utils.devices import cpu_threads
    from esper.utils.statistics import paired_interval

    config = run.config
    agent = run.trainer.learners[LEARNER].agent
    arms = {**arms_of("static,reactive", config), "controller": LearnedController(agent, deterministic=True)}
    # Tables of another seed: nothing was trained on them.
    fresh = config.model_copy(update={"members": FRESH, "task_seed": config.task_seed + 1})
    environment, arms, _ = prepare(fresh, arms)
    with cpu_threads(config.threads):
        tried = compare(environment, arms)
    alone, rule, led = (each.result() for each in tried)
    done = rate_choices(tried[-1].record)
    changes = (Rate.DOUBLE, Rate.HALVE, Rate.DECAY)
    doubled, halved, decayed = ((done == each).any(0).mean() for each in changes)

    def beside(other: ControllerResult) -> tuple[str, str]:
        mean, half = paired_interval(led.test_accuracy, other.test_accuracy)
        word = "behind" if mean + half < 0 else "ahead of" if mean - half > 0 else "not clearly apart from"
        return word, f"{interval(100 * mean, 100 * half, '+.1f')} points of test accuracy"

    (word, points), (rule_word, rule_points) = beside(alone), beside(rule)
    least, most = (config.population.host_lr * config.episode.rate_span**power for power in (-0.5, 0.5))
    return [
        f"With a controller that sets the learning rate, networks are {word} the same ones left alone: "
        f"{points} on {FRESH} fresh tables, at equal compute. All began with rates of {least:g} to {most:g}.",
        f"What it learned: it doubles the rate of {doubled:.0%} of them at least once, halves that of "
        f"{halved:.0%}, and makes that of {decayed:.0%} fall earlier than usual.",
        f"It is {rule_word} a simple rule that doubles the rate while progress is slow: {rule_points}.",
    ]
