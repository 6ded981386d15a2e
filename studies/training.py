"""Training of the study's controllers: all of them at once, on made tasks, until the time is up.

    python -m studies.growth train --agents main:5 no_memory sparse_reward --members 512 --seconds 500
    python -m studies.training ...       the same, where there is little more than torch, numpy and pydantic

Every agent is saved every few rounds and at the end (`main-0.safetensors` ...), each file whole or not at
all; `--resume` goes on from what is there. `train.jsonl` gets one line per agent and round.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, TextIO

import torch
from safetensors.torch import load_file
from safetensors.torch import save as as_safetensors

from esper.foundation.errors import UserError
from esper.simic.agent.ppo import PPOAgent
from esper.simic.config import GovernorConfig
from esper.telemetry.files import write_atomically
from studies import command_line
from studies.cohort import Cohort
from studies.distribution import FAMILIES, TOKENS, Family, make_task
from studies.setting import POLICY, PPO, Setting
from studies.variants import MAIN, PROBES, VARIANTS, Pupil, Variant

TASKS_PER_FAMILY = 32
WORLD_SEED = 1000
GOVERNOR = GovernorConfig(penalty=0.1)  # a rollback in a thousand members must not drown what growth earns
AGENTS = (f"{MAIN}:5", *(name for name in VARIANTS if name != MAIN))
KNOWN = VARIANTS | PROBES


def agent_names(wanted: list[str]) -> list[str]:
    """`main:2 no_memory` → main-0, main-1, no_memory-0."""
    names = []
    for word in wanted:
        variant, _, count = word.partition(":")
        if variant not in KNOWN or not (count or "1").isdigit():
            raise UserError(f"--agents has {word!r}; give NAME or NAME:COUNT with {', '.join(KNOWN)}")
        names += [f"{variant}-{seed}" for seed in range(int(count or 1))]
    return names


def variant_of(name: str) -> Variant:
    """Of an agent: `no_memory-0` → that of no_memory."""
    return KNOWN[name.rpartition("-")[0]]


def make_agents(names: list[str], device: str) -> dict[str, PPOAgent]:
    """Fresh agents; the seed of each is the number in its name."""
    return {name: variant_of(name).agent(int(name.rpartition("-")[2]), PPO, POLICY, device) for name in names}


def made_tasks(family: Family, first: int = 0) -> dict[str, Any]:
    """The task and the variants of an environment; other values of `first` make other tasks."""
    tasks = tuple(make_task(family, first + k) for k in range(TASKS_PER_FAMILY))
    return {"task": tasks[0], "variants": tasks}


def make_cohort(family: Family, agents: Mapping[str, PPOAgent], setting: Setting, members: int) -> Cohort:
    """All agents on one family."""
    pupils = {name: Pupil(name, agent, variant_of(name), setting.steps) for name, agent in agents.items()}
    spec = setting.spec(members=torch.arange(members), governor=GOVERNOR, **made_tasks(family))
    return Cohort(spec, pupils)


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

    def rounds(self, first: int, last: int) -> Iterator[int]:
        """The numbers of the rounds; at least one."""
        for number in range(first, last):
            yield number
            self.ends.append(self.spent)
            if self.spent + self.length() > self.seconds:
                return

    def length(self) -> float:
        """Of the longest of the latest rounds: the families differ, and the first rounds set things up."""
        latest = [0.0, *self.ends, self.spent][-5:]
        return max(after - before for before, after in pairwise(latest))

    def __str__(self) -> str:
        left = int(max(self.seconds - self.spent, 0.0) / self.length())
        return f"{self.spent:.0f} of {self.seconds:.0f} s, about {left} rounds to go"


def train(args: argparse.Namespace) -> None:
    """Rounds on the families in turn, until the time is up."""
    timetable = Timetable(args.seconds)
    agents = make_agents(agent_names(args.agents), args.device)
    setting = Setting(args.steps, args.batches, args.device, args.graphs, seed=WORLD_SEED)
    chosen = [family for family in FAMILIES if family.name in args.families]
    families = (*chosen, TOKENS) if args.tokens else tuple(chosen)
    cohorts = [make_cohort(family, agents, setting, args.members) for family in families]
    args.out.mkdir(parents=True, exist_ok=True)
    first = load(agents, args.out, args.device) if args.resume else 0
    with (args.out / "train.jsonl").open("a" if args.resume else "w") as log:
        for number in timetable.rounds(first, args.rounds):
            family, cohort = families[number % len(families)], cohorts[number % len(families)]
            rows = cohort.play_round(number)
            when = {"round": number, "family": family.name, "seconds": round(timetable.spent, 2)}
            write_log(log, rows, when)
            print(f"round {number:3d} {family.name:8s} {summary(rows)}  {timetable}", flush=True)
            if (number + 1) % args.save_every == 0:
                save(agents, args.out)
    save(agents, args.out)


def write_log(log: TextIO, rows: Mapping[str, Mapping[str, Any]], when: Mapping[str, Any]) -> None:
    for name, row in rows.items():
        print(json.dumps({**when, "agent": name, **row}), file=log, flush=True)


def summary(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """One line: the main agents (all, if there are none) beyond their twins, and how they learn."""
    main = [row for name, row in rows.items() if name.startswith(f"{MAIN}-")] or list(rows.values())

    def mean(key: str) -> float:
        return float(sum(row[key] for row in main) / len(main))

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
    parser.add_argument("--resume", action="store_true", help="go on from the files in --out")
    parser.add_argument("--out", type=Path, default=Path("runs/study"))
    parser.add_argument("--device", type=command_line.existing_device, default="auto")
    parser.add_argument("--graphs", action=argparse.BooleanOptionalAction, default=True)


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add_options(options)
    command_line.run(lambda: train(options.parse_args()))
