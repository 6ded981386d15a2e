"""Training of the study's controllers: all of them at once, on made tasks, until the time is up.

Every agent is saved every few rounds and at the end (`main-0.safetensors` ...), each file whole or not at
all. `train.jsonl` gets one line per agent and round.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch
from safetensors.torch import load_file
from safetensors.torch import save as as_safetensors

from esper.builders import LEARNER, agent_schema, make_agent, make_learner
from esper.runs.checkpoints import save_checkpoint
from esper.runs.files import write_atomically
from esper.simic.learner import LearnedController
from esper.simic.trainer import Round, Trainer
from esper.tamiyo.config import STUDY
from esper.utils.errors import UserError
from esper.utils.gather import Gather, broadcast, processes
from esper.utils.launch import Launch
from esper.utils.rows import add_prefix, strip_prefix
from studies.growth.environments import CONFIG, spec_of, tidy
from studies.growth.families import FAMILIES, make_tasks

TRAINING_SEED = 1000  # of the worlds; judged members live under another
SAVE_EVERY = 4  # rounds


def train(args: argparse.Namespace) -> None:
    """Rounds on the families in turn, until the time is up or all are played.

    Under torchrun the members are dealt to the processes, and the first one writes.
    """
    with processes(Launch.of()) as gather:
        trainer = _trainer(args, gather)
        writes = gather.rank == 0
        args.out.mkdir(parents=True, exist_ok=True)
        with (args.out / "train.jsonl" if writes else Path(os.devnull)).open("w") as log:
            _play(trainer, args, log)
        if writes:
            save(trainer, args.out)
    tidy()


def _trainer(args: argparse.Namespace, gather: Gather) -> Trainer:
    """All learners in the worlds of the chosen families, at the rounds from which they go on."""
    learners = [
        make_learner(CONFIG.model_copy(update={"seed": k}), torch.device(args.device), f"main-{k}")
        for k in range(args.trainings)
    ]
    known = {family.name: family for family in FAMILIES}
    worlds = []
    for place, name in enumerate(args.families):
        tasks = make_tasks(known[name], seed=args.families[:place].count(name))  # named again: other tasks
        more = {"variants": tuple(tasks), "budgets": CONFIG.budgets}
        worlds.append(spec_of(tasks[0], torch.arange(args.members), args.device, **more))
    trainer = Trainer(worlds, learners, args.rounds, shards=gather.size, gather=gather)
    if args.resume:
        for learner in learners:
            path = args.resume / f"{learner.name}.safetensors"
            learner.agent.load_state_dict(load_file(path, device=args.device))
        trainer.rounds_done = min(learner.agent.updates for learner in learners)
    return trainer


def _play(trainer: Trainer, args: argparse.Namespace, log: TextIO) -> None:
    """Play rounds and tell of each; the clock of the first process ends them."""
    writes = trainer.gather.rank == 0
    first = trainer.rounds_done
    begun = time.perf_counter()
    slowest = 0.0
    for number, rounds in enumerate(trainer.run(), start=first):
        spent = time.perf_counter() - begun
        slowest = max(slowest, spent / (number + 1 - first))
        family = args.families[number % len(args.families)]
        for name, told in rounds.items():
            when = {"round": number, "family": family, "seconds": round(spent, 1), "agent": name}
            print(json.dumps({**when, **log_row(told)}), file=log, flush=True)
        if writes:
            print(f"round {number:3d} {family:8s} {summary(rounds)}  {spent:.0f} s", flush=True)
        if writes and (number + 1) % SAVE_EVERY == 0:
            save(trainer, args.out)
        if broadcast(trainer.gather, spent + 1.5 * slowest > args.seconds):
            break


KEPT = ("above_twin", "above_twin_ci", "germinated", "pruned", "rollbacks")


def log_row(told: Round) -> dict[str, Any]:
    """One agent's round as a line of the log."""
    summary, record = told.summary, told.record
    ratio = record.parameter_ratio[-1]
    dealt = np.resize(CONFIG.budgets, ratio.shape)  # [N]
    by_budget = {
        f"{budget:g}": [float(ratio[dealt == budget].mean()), float(record.returns[dealt == budget].mean())]
        for budget in sorted(set(dealt))
    }
    return {
        "return": summary.return_mean,
        "accuracy": summary.accuracy_mean,
        "kl": summary.kl,
        "explained_variance": summary.explained_variance,
        "entropy": summary.entropy,
        "ops": summary.op_shares,
        "size and return by budget": by_budget,
        **{name: summary.extra[name] for name in KEPT if name in summary.extra},
    }


def summary(rounds: Mapping[str, Round]) -> str:
    """One line: means over the agents."""
    rows = [log_row(told) for told in rounds.values()]

    def mean(key: str) -> float:
        return sum(float(row.get(key, float("nan"))) for row in rows) / len(rows)

    by_budget = [row["size and return by budget"] for row in rows]
    sizes = [sum(sizes[budget][0] for sizes in by_budget) / len(rows) for budget in by_budget[0]]
    return (
        f"above twin {mean('above_twin'):+.4f}  accuracy {mean('accuracy'):.3f}  "
        f"sizes {' '.join(f'{size:.2f}' for size in sizes)}  kl {mean('kl'):.3f}  "
        f"entropy {mean('entropy'):.2f}"
    )


def save(trainer: Trainer, folder: Path) -> None:
    """Every agent in a file of its own."""
    for name, learner in trainer.learners.items():
        state = {key: tensor.cpu().contiguous() for key, tensor in learner.agent.state_dict().items()}
        write_atomically(folder / f"{name}.safetensors", as_safetensors(state))


def load_controllers(folder: Path, device: str) -> dict[str, LearnedController]:
    """The trained controllers of a folder, by name; raises UserError where there are none."""
    found = {}
    for path in sorted(folder.glob("main-*.safetensors")):
        agent = make_agent(CONFIG, torch.device(device))
        agent.load_state_dict(load_file(path, device=device))
        found[path.stem] = LearnedController(agent)
    if not found:
        raise UserError(f"{folder} holds no main-*.safetensors; give the folder that `train` wrote")
    return found


def ship(args: argparse.Namespace) -> None:
    """Write a trained policy as the controller that comes with the package; also one that did before."""
    agent = make_agent(CONFIG, torch.device("cpu"))
    weights = {name.removeprefix(f"{LEARNER}."): value for name, value in load_file(args.policy).items()}
    agent.policy.load_state_dict(strip_prefix("policy", weights))
    agent.value_normalizer.load_state_dict(strip_prefix("value_normalizer", weights))
    trained_for = STUDY.model_copy(update={"blueprints": tuple(sorted(CONFIG.lifecycle.block_blueprints))})
    record = {
        "config": CONFIG.model_dump(mode="json"),
        "conditions": trained_for.model_dump(mode="json"),
        "round": args.rounds,
    }
    tensors = {
        **add_prefix(f"{LEARNER}.policy", agent.policy.state_dict()),
        **add_prefix(f"{LEARNER}.value_normalizer", agent.value_normalizer.state_dict()),
    }
    save_checkpoint(args.to, tensors, record, agent_schema())
