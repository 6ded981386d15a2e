"""Rounds of the training of the study's controllers: seconds, captures, and what the GPU does in a step.

    python -m benchmarks.rounds --family tokens --precision bfloat16
    python -m benchmarks.rounds --family tables --members 3 --trainings 1 --rounds 1 --device cpu

One line for each round, as JSON. `twins` is the accuracy of the members that never grow: precision must not
move it. With `--profile` one more round is played, and some of its steps are told one by one.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from benchmarks.clocks import captures, gpu_seconds
from benchmarks.population import machine_name, synchronise
from esper.builders import make_learner
from esper.simic.trainer import Trainer
from studies.command_line import existing_device, positive, run
from studies.growth.families import FAMILIES, make_tasks
from studies.growth.world import CONFIG, spec_of

PROFILED = (2, 8, 20)  # steps: while all members live, when the smallest budgets are spent, and the next


def make_trainer(args: argparse.Namespace) -> Trainer:
    """What `python -m studies.growth train` begins with, on one family."""
    device = torch.device(args.device)
    learners = [
        make_learner(CONFIG.model_copy(update={"seed": k}), device, f"main-{k}")
        for k in range(args.trainings)
    ]
    tasks = make_tasks({family.name: family for family in FAMILIES}[args.family])
    more = {"variants": tuple(tasks), "budgets": CONFIG.budgets}
    spec = spec_of(tasks[0], torch.arange(args.members), args.device, **more)
    population = spec.population.model_copy(update={"precision": args.precision})
    return Trainer([replace(spec, population=population)], learners, args.rounds + args.profile)


@contextmanager
def profiled(trainer: Trainer) -> Iterator[list[dict[str, float]]]:
    """Some steps of the round that is played meanwhile: wall and GPU milliseconds, kernels."""
    environment, told = trainer.environment, list[dict[str, float]]()
    step = environment.step

    def timed(actions: Any) -> Any:
        if environment.clock not in PROFILED:
            return step(actions)
        number, found, walls = environment.clock, [], []

        def one() -> None:
            torch.cuda.synchronize()
            begun = time.perf_counter()
            found.append(step(actions))
            torch.cuda.synchronize()
            walls.append(time.perf_counter() - begun)

        busy, kernels = gpu_seconds(one)
        milliseconds = {"wall_ms": round(walls[0] * 1e3, 1), "gpu_ms": round(busy * 1e3, 1)}
        told.append({"step": number, **milliseconds, "kernels": kernels})
        return found[0]

    environment.step = timed  # type: ignore[method-assign]
    yield told
    del environment.step


def timed_round(trainer: Trainer, args: argparse.Namespace) -> dict[str, Any]:
    """One round, timed."""
    device = torch.device(args.device)
    synchronise(device)
    begun = time.perf_counter()
    with captures() as captured:
        trainer.play_round()
    synchronise(device)
    return {
        "round": trainer.rounds_done,
        "seconds": round(time.perf_counter() - begun, 2),
        "captures": captured[0],
        "twins": round(float(trainer.environment.rows.signals.accuracy[: args.members].mean()), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--family", choices=[family.name for family in FAMILIES], default="tables")
    parser.add_argument("--precision", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--trainings", type=positive, default=5)
    parser.add_argument("--members", type=positive, default=CONFIG.members, help="of each training")
    parser.add_argument("--rounds", type=positive, default=3, help="the first ones compile and capture")
    parser.add_argument("--profile", action="store_true", help="a GPU's time in some steps")
    parser.add_argument("--device", type=existing_device, default="auto")
    args = parser.parse_args()
    trainer = make_trainer(args)
    name = {"machine": machine_name(args.device), "family": args.family, "precision": args.precision}
    for _ in range(args.rounds):
        print(json.dumps({**name, **timed_round(trainer, args)}), flush=True)
    if args.profile:
        with profiled(trainer) as steps:
            trainer.play_round()
        for row in steps:
            print(json.dumps({**name, **row}))


if __name__ == "__main__":
    run(main)
