"""Does growth pay? Train controllers on made tasks, judge them on tasks that they never saw.

    python -m studies.growth train --seed 0 --seconds 240 --out runs/study        (GPU)
    python -m studies.growth evaluate --task mnist1d --policies runs/study --out runs/study
    python -m studies.growth evaluate --quick                      (a small one, minutes on two cores)
    python -m studies.growth ship --policy runs/study/seed0.safetensors --rounds 23
    python -m studies.report                                       (the table and the figure of docs/study.md)

Every arm of an evaluation has the same members: the same initial hosts, the same order of data, the same
number of epochs. What is compared is what a controller made of them. The test split is read at the end of
each program, and nothing is chosen by it.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from esper.config import RunConfig
from esper.controllers import AGENT
from esper.runs import agent_schema
from esper.simic.config import EpisodeConfig
from esper.simic.environment import EnvironmentSpec, GrowthEnvironment
from esper.simic.trainer import Trainer
from esper.tasks.task import Task
from esper.telemetry.checkpoints import save_checkpoint
from studies.distribution import FAMILIES, make_task
from studies.evaluation import add_options, evaluate
from studies.held_out import HELD_OUT, export_tasks
from studies.setting import POLICY, PPO, REWARD, RULES, STEPS, make_agent, recipe

VARIANTS = 32  # made tasks per family
TURNS = (0, 1, 0, 1, 2)  # the families in turn: where growth has more to give, more often


def environment(
    args: argparse.Namespace, task: Task, members: torch.Tensor, **more: Any
) -> GrowthEnvironment:
    spec = EnvironmentSpec(
        task=task,
        members=members,
        gamma=PPO.gamma,
        device=args.device,
        episode=EpisodeConfig(steps=STEPS),
        reward=more.pop("reward", REWARD),
        lifecycle=RULES,
        population=recipe(args.batches, args.graphs),
        **more,
    )
    return GrowthEnvironment(spec)


def train(args: argparse.Namespace) -> None:
    """Rounds that alternate between the families, until the time is up."""
    agent = make_agent(args.seed, args.device)
    members = torch.arange(args.members)
    trainers = []
    for k, family in enumerate(FAMILIES):
        variants = tuple(make_task(family, 1000 * k + v) for v in range(VARIANTS))
        world = environment(args, variants[0], members, variants=variants, seed=1000 + args.seed)
        trainers.append(Trainer(world, agent, rounds=10**6))
    args.out.mkdir(parents=True, exist_ok=True)
    log = (args.out / f"train-{args.seed}.jsonl").open("w")
    begun = time.perf_counter()
    for number in range(args.rounds):
        turn = TURNS[number % len(TURNS)]
        summary = trainers[turn].play_round().summary
        line = {
            "round": number,
            "family": FAMILIES[turn].name,
            "seconds": round(time.perf_counter() - begun, 2),
            "return": summary.return_mean,
            "accuracy": summary.accuracy_mean,
            "ratio": summary.parameter_ratio_mean,
            "kl": summary.kl,
            "explained_variance": summary.explained_variance,
            "entropy": summary.entropy,
            "ops": dict(summary.op_shares),
            **{name: summary.extra[name] for name in ("potential", "germinated", "pruned", "rollbacks")},
        }
        print(json.dumps(line), file=log, flush=True)
        if args.verbose:
            print(json.dumps(line), flush=True)
        if time.perf_counter() - begun > args.seconds:
            break
    save_file(agent.state_dict(), args.out / f"seed{args.seed}.safetensors")


def export(args: argparse.Namespace) -> None:
    """Write held-out tasks for a machine that lacks their packages."""
    export_tasks(args.tasks or HELD_OUT, args.out)


def ship(args: argparse.Namespace) -> None:
    """Write a trained policy as the controller that comes with the package."""
    agent = make_agent(0, "cpu")
    agent.load_state_dict(load_file(args.policy[0]))
    config = RunConfig(
        episode=EpisodeConfig(steps=STEPS), reward=REWARD, lifecycle=RULES, policy=POLICY, ppo=PPO
    )
    record = {"config": config.model_dump(mode="json"), "round": args.rounds}
    tensors = {AGENT + name: value for name, value in agent.state_dict().items()}
    save_checkpoint(args.to, tensors, record, agent_schema())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    default_device = "cuda" if torch.cuda.is_available() else "cpu"

    one = commands.add_parser("train", help="train one controller on the made tasks")
    one.add_argument("--seed", type=int, default=0)
    one.add_argument("--members", type=int, default=512)
    one.add_argument("--batches", type=int, default=12)
    one.add_argument("--rounds", type=int, default=10**6)
    one.add_argument("--seconds", type=float, default=240.0)
    one.add_argument("--verbose", action="store_true")
    one.set_defaults(run=train)

    two = commands.add_parser("evaluate", help="all arms on held-out tasks")
    add_options(two)
    two.set_defaults(run=evaluate)

    three = commands.add_parser("export", help="write held-out tasks as plain tensors")
    three.add_argument("tasks", nargs="*", help="all of them if none is named")
    three.set_defaults(run=export)

    four = commands.add_parser("ship", help="make a policy the controller of the package")
    four.add_argument("--policy", type=Path, nargs=1, required=True)
    four.add_argument("--rounds", type=int, required=True, help="rounds that it was trained for")
    four.add_argument("--to", type=Path, default=Path("src/esper/pretrained/tamiyo.safetensors"))
    four.set_defaults(run=ship)

    for command in (one, two, three):
        command.add_argument("--out", type=Path, default=Path("runs/study"))
        command.add_argument("--device", default=default_device)
        command.add_argument("--graphs", action=argparse.BooleanOptionalAction, default=True)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
