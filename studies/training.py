"""Training of the study's controllers: all of them at once, on made tasks, until the time is up.

    python -m studies.growth train --agents main:5 no_memory sparse_reward --members 512 --seconds 500
    python -m studies.training ...       the same, where there is little more than torch, numpy and pydantic
    torchrun --nproc-per-node=8 -m studies.training ...     the same by several processes, the members shared

Every agent is saved every few rounds and at the end (`main-0.safetensors` ...), each file whole or not at
all; `--resume` goes on from what is there. `train.jsonl` gets one line per agent and round.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from safetensors.torch import save as as_safetensors

from esper.builders import make_learner
from esper.foundation.devices import own_device
from esper.foundation.errors import UserError
from esper.foundation.gather import Alone, Gather, from_first
from esper.foundation.launch import Launch
from esper.foundation.processes import processes
from esper.simic.agent.ppo import PPOAgent
from esper.simic.learner import Learner
from esper.simic.steps import EnvironmentSpec
from esper.simic.trainer import Round, Trainer
from esper.telemetry.files import write_atomically
from studies import command_line
from studies.distribution import FAMILIES, TOKENS, Family, make_tasks
from studies.setting import CONFIG, Setting
from studies.variants import KNOWN, MAIN, VARIANTS, config_of

WORLD_SEED = 1000
AGENTS = (f"{MAIN}:5", *(name for name in VARIANTS if name != MAIN))


def agent_names(wanted: list[str]) -> list[str]:
    """`main:2 no_memory` → main-0, main-1, no_memory-0."""
    names = []
    for word in wanted:
        variant, _, count = word.partition(":")
        if variant not in KNOWN or not (count or "1").isdigit():
            raise UserError(f"--agents has {word!r}; give NAME or NAME:COUNT with {', '.join(KNOWN)}")
        names += [f"{variant}-{seed}" for seed in range(int(count or 1))]
    return names


def make_learners(names: Sequence[str], setting: Setting) -> list[Learner]:
    """Fresh learners by name."""
    episode = CONFIG.episode.model_copy(update={"steps": setting.steps})
    configs = {name: config_of(name).model_copy(update={"episode": episode}) for name in names}
    return [make_learner(config, torch.device(setting.device), name) for name, config in configs.items()]


def world_of(family: Family, setting: Setting, members: int) -> EnvironmentSpec:
    """What the rounds of one family are played in."""
    tasks = make_tasks(family)
    variants, governor = tuple(tasks), CONFIG.governor
    return setting.spec(tasks[0], torch.arange(members), variants=variants, governor=governor)


def save(agents: Mapping[str, PPOAgent], folder: Path) -> None:
    for name, agent in agents.items():
        state = {key: tensor.cpu().contiguous() for key, tensor in agent.state_dict().items()}
        write_atomically(folder / f"{name}.safetensors", as_safetensors(state))


def load(agents: Mapping[str, PPOAgent], folder: Path, device: str) -> int:
    """Take every agent from its file; the number of rounds that all of them have done."""
    for name, agent in agents.items():
        agent.load_state_dict(load_file(folder / f"{name}.safetensors", device=device))
    return min(agent.updates for agent in agents.values())


class Timetable:
    """Round after round, as long as one more fits into the time."""

    def __init__(self, seconds: float):
        self.seconds = seconds
        self.begun = time.perf_counter()
        self.ends: list[float] = []  # of the rounds so far

    @property
    def spent(self) -> float:
        return time.perf_counter() - self.begun

    def rounds(self, first: int, last: int, gather: Gather) -> Iterator[int]:
        """The numbers of the rounds; at least one. The clock of the first process is that of all."""
        for number in range(first, last):
            yield number
            self.ends.append(self.spent)
            if from_first(gather, self.spent + self.length() > self.seconds):
                return

    def length(self) -> float:
        """Of the longest of the latest rounds: the families differ, and the first rounds set things up."""
        latest = [0.0, *self.ends, self.spent][-5:]
        return max(after - before for before, after in pairwise(latest))

    def __str__(self) -> str:
        left = int(max(self.seconds - self.spent, 0.0) / self.length())
        return f"{self.spent:.0f} of {self.seconds:.0f} s, about {left} rounds to go"


def train(args: argparse.Namespace, gather: Gather | None = None) -> None:
    """Rounds on the families in turn, until the time is up; `gather` shares the members with others."""
    gather = gather or Alone()
    timetable = Timetable(args.seconds)
    device = str(own_device(args.device))
    setting = Setting(args.steps, args.batches, device, args.graphs, seed=WORLD_SEED)
    learners = make_learners(agent_names(args.agents), setting)
    agents = {learner.name: learner.agent for learner in learners}
    chosen = [family for family in FAMILIES if family.name in args.families]
    families = (*chosen, TOKENS) if args.tokens else tuple(chosen)
    worlds = [world_of(family, setting, args.members) for family in families]
    shards = args.shards or gather.size
    trainer = Trainer(worlds, learners, args.rounds, shards=shards, gather=gather)
    trainer.rounds_done = load(agents, args.out, device) if args.resume else 0
    log = Log(args.out, args.resume, writes=gather.rank == 0)
    for number in timetable.rounds(trainer.rounds_done, args.rounds, gather):
        family = families[number % len(families)]
        rows = log_rows(trainer.play_round())
        log.add(rows, {"round": number, "family": family.name, "seconds": round(timetable.spent, 2)})
        log.say(f"round {number:3d} {family.name:8s} {summary(rows)}  {timetable}")
        if log.writes and (number + 1) % args.save_every == 0:
            save(agents, args.out)
    if log.writes:
        save(agents, args.out)


class Log:
    """`train.jsonl` and the screen; neither in a process that does not write."""

    def __init__(self, folder: Path, goes_on: bool, writes: bool = True) -> None:
        self.writes, self.path = writes, folder / "train.jsonl"
        if writes:
            folder.mkdir(parents=True, exist_ok=True)
        if writes and not goes_on:
            self.path.write_text("")

    def add(self, rows: Mapping[str, Mapping[str, Any]], when: Mapping[str, Any]) -> None:
        """A line for every agent."""
        lines = [json.dumps({**when, "agent": name, **row}) for name, row in rows.items()]
        if self.writes:
            with self.path.open("a") as file:
                file.write("".join(f"{line}\n" for line in lines))

    def say(self, text: str) -> None:
        """A line on the screen."""
        if self.writes:
            print(text, flush=True)


def log_rows(rounds: Mapping[str, Round]) -> dict[str, dict[str, Any]]:
    """What a log keeps of a round: a row for every agent."""
    return {name: log_row(told) for name, told in rounds.items()}


TOLD = (
    "above_twin",
    "above_twin_ci",
    "epochs_done",
    "explained_by_baseline",
    "germinated",
    "pruned",
    "rollbacks",
)


def log_row(told: Round) -> dict[str, Any]:
    """One agent's round as a line of the log."""
    summary = told.summary
    return {
        "return": summary.return_mean,
        "accuracy": summary.accuracy_mean,
        "ratio": summary.parameter_ratio_mean,
        "kl": summary.kl,
        "explained_variance": summary.explained_variance,
        "entropy": summary.entropy,
        "head_entropy": {head: v for head, v in summary.head_entropy.items() if v == v},
        "ops": summary.op_shares,
        **{name: summary.extra[name] for name in TOLD if name in summary.extra},
    }


def summary(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """One line: the main agents (all, if there are none) beyond their twins, and how they learn."""
    main = [row for name, row in rows.items() if name.startswith(f"{MAIN}-")] or list(rows.values())

    def mean(key: str) -> float:
        return float(sum(row.get(key, math.nan) for row in main) / len(main))

    return (
        f"above twin {mean('above_twin'):+.4f}  accuracy {mean('accuracy'):.3f}  ratio {mean('ratio'):.2f}  "
        f"kl {mean('kl'):.3f}  explained {mean('explained_variance'):+.2f}  entropy {mean('entropy'):.2f}"
    )


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--agents", nargs="+", default=list(AGENTS), help="NAME or NAME:COUNT of seeds")
    parser.add_argument("--members", type=command_line.positive, default=512, help="of every agent")
    parser.add_argument("--steps", type=int, default=Setting.steps)
    parser.add_argument("--batches", type=int, default=Setting.batches, help="minibatches in a step")
    parser.add_argument("--rounds", type=int, default=10**6)
    parser.add_argument("--seconds", type=float, default=500.0)
    parser.add_argument("--save-every", type=int, default=3, help="rounds")
    names = [family.name for family in FAMILIES]
    parser.add_argument("--families", nargs="+", choices=names, default=names, help="of made tasks, in turn")
    parser.add_argument("--tokens", action="store_true", help="also train on token sequences")
    parser.add_argument("--shards", type=int, default=0, help="of the members; 0: one for each process")
    parser.add_argument("--resume", action="store_true", help="go on from the files in --out")
    parser.add_argument("--out", type=Path, default=Path("runs/study"))
    parser.add_argument("--device", type=command_line.existing_device, default="auto")
    parser.add_argument("--graphs", action=argparse.BooleanOptionalAction, default=True)


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add_options(options)
    given = options.parse_args()

    def shared() -> None:
        with processes(Launch.of()) as gather:
            train(given, gather)

    command_line.run(shared)
