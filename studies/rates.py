"""Does a controller that sets the learning rate win? Trained with the preset `demo`, judged on fresh tasks.

    python -m studies.rates --trainings 5 --out FILE      about two minutes for each training on an idle core
    python -m studies.rates --read FILE                   the table

Each training has tasks and a seed of its own, and each is judged on 48 other tasks with networks of another
seed. All networks of a task begin with the same weights and the same learning rate, drawn from a range of a
factor of 100, and spend the same FLOPs; whoever reads validations pays for them. Opponents are the same
networks left alone, a reactive rule whose two parameters were tuned on the first training's tasks, and, which
nobody can have in one run, networks whose first rate is the best for those tasks. A line of JSON for each
training goes to --out.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from esper.builders import LEARNER, make_learner, make_specs
from esper.config import RunConfig
from esper.runs.console import interval
from esper.simic.agent.ppo import PPOAgent
from esper.simic.environment import EnvironmentSpec, GrowthEnvironment
from esper.simic.learner import LearnedController
from esper.simic.rollout import evaluate_test, play
from esper.simic.trainer import Trainer
from esper.tamiyo.controller import Blocks, Controller
from esper.tamiyo.rates import ReactiveRate
from esper.tamiyo.scripted import Static
from esper.utils.statistics import mean_interval
from studies import command_line

FRESH = 10_000  # from here on: seeds of tasks and networks that nothing was trained or tuned on
TASKS = 48  # judged on, for each training
FALLS, WINDOWS = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5), (1, 2, 4)  # of the reactive rule
SCALES = tuple(2.0**k for k in range(-3, 6))  # of the recipe's rate, for networks whose rate was tuned
TUNED = "static, best first rate"
CONTROLLER, SUPERVISED = "controller", "supervised start alone"
OPPONENTS = ("static", "reactive rule", SUPERVISED, TUNED)


def test_accuracy(spec: EnvironmentSpec, arms: Mapping[str, Controller]) -> dict[str, list[float]]:
    """Play an episode of every arm as one program; return the test accuracy of its networks in points."""
    blocks = Blocks(arms)
    members, scales = blocks.members(spec.members), spec.rate_scale * len(arms)
    environment = GrowthEnvironment(replace(spec, members=members, rate_scale=scales))
    play(environment, blocks, 0)
    accuracy = 100.0 * evaluate_test(environment).accuracy.astype(np.float64)
    spans = blocks.spans(environment.num_members)
    return {name: np.round(accuracy[span], 3).tolist() for name, span in spans.items()}


def spec_of(config: RunConfig, seed: int) -> EnvironmentSpec:
    """Return the environment of the tasks of a seed, with a network for each."""
    changed = config.model_copy(update={"task_seed": seed, "seed": seed, "members": TASKS})
    return make_specs(changed, torch.device("cpu"))[0]


def tune(config: RunConfig) -> tuple[tuple[float, int], float]:
    """Choose the parameters of the rule and the best first rate on the tasks of the first training."""
    spec = spec_of(config, 0)
    rules = {(fall, window): ReactiveRate(fall, window) for fall in FALLS for window in WINDOWS}
    found = test_accuracy(spec, {str(key): rule for key, rule in rules.items()})
    rule = max(rules, key=lambda key: float(np.mean(found[str(key)])))
    rates = {
        scale: float(np.mean(test_accuracy(at_rate(spec, scale), {"": Static()})[""])) for scale in SCALES
    }
    return rule, max(rates, key=lambda scale: rates[scale])


def at_rate(spec: EnvironmentSpec, scale: float) -> EnvironmentSpec:
    """Return the same environment with one first rate for all."""
    episode = spec.episode.model_copy(update={"rate_span": 1.0})
    return replace(spec, episode=episode, rate_scale=(scale,) * len(spec.members))


@dataclass(frozen=True)
class Trained:
    """What a training left."""

    agent: PPOAgent
    supervised: PPOAgent  # as it was after imitation
    rounds: list[list[float]]  # validation accuracy and entropy of the rate head in each
    seconds: float


def train(config: RunConfig, training: int, worlds: Sequence[EnvironmentSpec] = ()) -> Trained:
    """Train a controller with the seed of a training, on its tasks or in these environments in turn."""
    own = config.model_copy(update={"seed": training, "task_seed": training})
    began, device = time.perf_counter(), torch.device("cpu")
    trainer = Trainer(worlds or make_specs(own, device), [make_learner(own, device)], own.rounds)
    agent, rounds = trainer.learners[LEARNER].agent, []
    supervised = copy.deepcopy(agent)
    for done in trainer.run():
        update, summary = done[LEARNER].update, done[LEARNER].summary
        rounds.append([round(summary.accuracy_mean, 4), round(update.head_entropy["rate"], 3)])
        if trainer.rounds_done == config.learner.imitate:
            supervised = copy.deepcopy(agent)
    return Trained(agent, supervised, rounds, round(time.perf_counter() - began, 1))


def judge_training(config: RunConfig, training: int, rule: tuple[float, int], scale: float) -> dict[str, Any]:
    """Train a controller with the tasks and the seed of a training, and judge it on fresh ones."""
    trained = train(config, training)
    spec, greedy = spec_of(config, FRESH + training), LearnedController(trained.agent, deterministic=True)
    accuracy = test_accuracy(
        spec, {"static": Static(), "reactive rule": ReactiveRate(*rule), CONTROLLER: greedy}
    )
    accuracy |= test_accuracy(spec, {f"{CONTROLLER}, sampled": LearnedController(trained.agent)})
    accuracy |= test_accuracy(at_rate(spec, scale), {TUNED: Static()})
    accuracy |= test_accuracy(spec, {SUPERVISED: LearnedController(trained.supervised, deterministic=True)})
    return {
        "training": training,
        "seconds": trained.seconds,
        "rule": rule,
        "scale": scale,
        "rounds": trained.rounds,
        "accuracy": accuracy,
    }


def report(records: Sequence[Mapping[str, Any]]) -> str:
    """Return the tables: the mean of each arm, and the controller minus each opponent, in points."""
    arms = list(records[0]["accuracy"])
    lines = ["| arm | test accuracy |", "|---|---:|"]
    for arm in arms:
        lines.append(f"| {arm} | {np.mean([record['accuracy'][arm] for record in records]):.2f} |")
    trainings = " | ".join(str(record["training"]) for record in records)
    lines += [
        "",
        f"| controller minus | mean over trainings, 95 % interval | training {trainings} |",
        "|---|---:|" + "---:|" * len(records),
    ]
    for arm in OPPONENTS:
        pairs = [np.subtract(r["accuracy"][CONTROLLER], r["accuracy"][arm]) for r in records]
        each = [mean_interval(pair.tolist()) for pair in pairs]  # over the tasks of a training
        # Trainings are the unit: the tasks of one share a policy.
        mean, half = mean_interval([mean for mean, _ in each])
        cells = " | ".join(interval(*one, "+.2f") for one in each)
        lines.append(f"| {arm} | {interval(mean, half, '+.2f')} | {cells} |")
    seconds = np.mean([record["seconds"] for record in records])
    first = records[0]
    lines.append(
        f"\n{len(records)} trainings of {seconds:.0f} s, {TASKS} fresh tasks each; rule: fall "
        f"{first['rule'][0]:g} over {first['rule'][1]} epochs; best first rate: {first['scale']:g} times the "
        "recipe's."
    )
    return "\n".join(lines)


def judge(config: RunConfig, trainings: int) -> Iterator[dict[str, Any]]:
    """Train and judge so many controllers."""
    rule, scale = tune(config)
    for training in range(trainings):
        yield judge_training(config, training, rule, scale)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train and judge, or print the table of a file."""
    command_line.run_trainings(arguments, __doc__, 5, judge, report)


if __name__ == "__main__":
    command_line.run(main)
