"""Does growth pay? Train controllers on made tasks, judge them on tasks that they never saw.

    python -m studies.growth train --seed 0 --seconds 240 --out runs/study        (GPU)
    python -m studies.growth evaluate --task mnist1d --policy runs/study/seed0.safetensors --out runs/study
    python -m studies.growth ship --policy runs/study/seed0.safetensors --rounds 23
    python -m studies.report                                       (the table and the figure of docs/study.md)

Every arm of an evaluation has the same members: the same initial hosts, the same order of data, the same
number of epochs. What is compared is what a controller made of them. The test split is read once per arm.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from esper.config import RunConfig
from esper.controllers import AGENT
from esper.lifecycle.config import GateConfig, LifecycleConfig
from esper.population.config import PopulationConfig
from esper.runs import agent_schema
from esper.simic.agent.ppo import PPOAgent, PPOConfig
from esper.simic.compare import ControllerRun, compare, run_controller
from esper.simic.config import EpisodeConfig, RewardConfig
from esper.simic.environment import EnvironmentSpec, GrowthEnvironment
from esper.simic.learned import LearnedController
from esper.simic.trainer import Trainer
from esper.tamiyo.controllers import Controller, Periodic, RandomLegal, Scheduled, Static
from esper.tamiyo.heuristic import Heuristic
from esper.tamiyo.policy.network import TamiyoNet, TamiyoNetConfig
from esper.tasks.task import HostSpec, Split, Task, TestSplit
from esper.telemetry.checkpoints import save_checkpoint
from studies.distribution import FAMILIES, make_task

STEPS = 24
VARIANTS = 32  # made tasks per family
TURNS = (0, 1, 0, 1, 2)  # the families in turn: where growth has more to give, more often
GATES = GateConfig(training_epochs=2, blending_epochs=2)
RULES = LifecycleConfig(gates=GATES)
PPO = PPOConfig(
    learning_rate=1e-3,
    lam=0.95,
    minibatches=8,
    target_kl=0.03,
    entropy_start=0.02,
    entropy_end=0.002,
    entropy_updates=40,
)
REWARD = RewardConfig(rent_weight=0.01)  # a network e times as large must be a point better
POLICY = TamiyoNetConfig(width=128)
WIDER = (6, 8)  # static hosts along the size frontier


def population_config(args: argparse.Namespace) -> PopulationConfig:
    return PopulationConfig(
        batch_size=64,
        batches_per_epoch=args.batches,
        validation_samples=512,
        host_lr=3e-2,
        seed_lr=1e-2,
        graphs=args.graphs,
    )


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
        population=population_config(args),
        **more,
    )
    return GrowthEnvironment(spec)


def make_agent(seed: int, device: str) -> PPOAgent:
    torch.manual_seed(seed)
    return PPOAgent(TamiyoNet(POLICY), PPO, device, seed=seed)


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


def held_out_task(name: str, data: Path | None) -> Task:
    """A real task, from the registry or from a file that was made where its package is installed."""
    if data is None:
        from esper.tasks import load_task

        return load_task(name)
    saved = torch.load(data / f"{name}.pt", weights_only=True)
    splits = {part: Split(saved[f"{part}_x"], saved[f"{part}_y"]) for part in ("train", "validation", "test")}
    return Task(
        name=name,
        topology=saved["topology"],
        input_shape=tuple(saved["input_shape"]),
        num_classes=saved["num_classes"],
        train=splits["train"],
        validation=splits["validation"],
        held_out=TestSplit(splits["test"]),
        host=HostSpec(saved["preset"], saved["options"]),
    )


def export_tasks(args: argparse.Namespace) -> None:
    """Write tasks as plain tensors, for a machine that lacks their packages."""
    args.out.mkdir(parents=True, exist_ok=True)
    for name in args.tasks:
        task = held_out_task(name, None)
        splits = {"train": task.train, "validation": task.validation, "test": task.test()}
        saved: dict[str, Any] = {f"{part}_x": split.inputs for part, split in splits.items()}
        saved |= {f"{part}_y": split.targets for part, split in splits.items()}
        saved |= {"topology": task.topology, "input_shape": list(task.input_shape)}
        saved |= {"num_classes": task.num_classes, "preset": task.host.preset}
        torch.save(saved | {"options": dict(task.host.options)}, args.out / f"{name}.pt")


def load_policy(path: Path, device: str) -> LearnedController:
    agent = make_agent(0, device)
    agent.load_state_dict(load_file(path, device=device))
    return LearnedController(agent)


def arms(args: argparse.Namespace) -> dict[str, Controller]:
    learned = {
        "tamiyo" if k == 0 else f"tamiyo seed {k}": load_policy(path, args.device)
        for k, path in enumerate(args.policy)
    }
    return {
        "static": Static(),
        **learned,
        "heuristic": Heuristic(gates=GATES),
        "random": RandomLegal(),
        "periodic": Periodic(gates=GATES),
        "scheduled": Scheduled(gates=GATES),
    }


def evaluate(args: argparse.Namespace) -> None:
    """All arms on one held-out task, paired; then static hosts along the size frontier."""
    task = held_out_task(args.task, args.data)
    members = torch.arange(5000, 5000 + args.members)
    args.out.mkdir(parents=True, exist_ok=True)
    rows = []
    for run in runs(args, task, members):
        begun = time.perf_counter()
        rows.append(as_row(run, args.task))
        mean = float(np.mean(rows[-1]["test_accuracy"]))
        print(
            f"{args.task:18s} {run.name:28s} test {mean:.4f} {time.perf_counter() - begun:.1f} s", flush=True
        )
        (args.out / f"evaluation-{args.task}.json").write_text(json.dumps(rows))


def runs(args: argparse.Namespace, task: Task, members: torch.Tensor) -> Iterator[ControllerRun]:
    world = environment(args, task, members, seed=77)
    finals = ("tamiyo", "heuristic") if args.policy else ("heuristic",)
    yield from compare(world, arms(args), static_final_of=finals)
    for width in WIDER if args.frontier else ():
        host = replace(task.host, options={**task.host.options, "width": width})
        wider = environment(args, replace(task, host=host), members, seed=77)
        yield run_controller(wider, f"static width {width}", Static())


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


def as_row(run: ControllerRun, task: str) -> dict[str, Any]:
    record = run.record
    return {
        "task": task,
        "arm": run.name,
        "test_accuracy": run.test.accuracy.tolist(),
        "validation_accuracy": record.accuracy[-1].tolist(),
        "curve": record.accuracy.mean(axis=1).tolist(),
        "parameters": record.parameters[-1].tolist(),
        "host_parameters": int(record.host_parameters),
        "flops": np.asarray(record.flops).tolist(),
        "potential": np.asarray(run.potential).tolist(),
        "op_shares": [[float((step == op).mean()) for op in range(6)] for step in record.executed_op],
        "blueprints": np.bincount(
            record.final_slots.blueprint.clamp(min=0).flatten().cpu(), minlength=13
        ).tolist(),
        "seeds": float((record.final_slots.blueprint >= 0).float().sum(1).mean()),
    }


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

    two = commands.add_parser("evaluate", help="all arms on one held-out task")
    two.add_argument("--task", required=True)
    two.add_argument("--policy", type=Path, nargs="*", default=[])
    two.add_argument("--members", type=int, default=256)
    two.add_argument("--batches", type=int, default=40)
    two.add_argument("--data", type=Path, help="folder of exported tasks")
    two.add_argument("--frontier", action="store_true", help="also static hosts of other widths")
    two.set_defaults(run=evaluate)

    three = commands.add_parser("export", help="write held-out tasks as plain tensors")
    three.add_argument("tasks", nargs="+")
    three.set_defaults(run=export_tasks)

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
