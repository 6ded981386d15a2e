"""What several processes gain, and what they pay for it: `python -m benchmarks.scaling --processes 1 2 4`

Rounds of `esper train --preset digits` (or another) by 1 and 2 (or more) processes of torchrun, one thread
each. The table has the wall time of a round; the processor time of a round in the process that needs most,
which is what the wall time would be with a core for each; how much of that is the update; the start of the
command, until its first round; the gain in a round, and in the whole command; and the bytes that each process
sends. About a minute and a half on two idle cores.

`--turns`: all members and half of them, a step each in turns, for a machine that others use as well.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.common import line_of
from esper.builders import LEARNER, make_trainer
from esper.config import load_config
from esper.simic.trainer import Trainer
from esper.tamiyo.controller import EpisodeInfo
from esper.utils.devices import cpu_threads
from esper.utils.gather import Gather, all_gather_values, processes
from esper.utils.launch import Launch


@dataclass(frozen=True)
class Result:
    """A round, on the mean over the timed ones."""

    preset: str
    members: int
    processes: int
    shards: int
    wall_s: float
    busiest_s: float  # processor time of the process that needs most
    update_s: float  # of that: the update
    start_s: float  # processor time of the command until its first round
    whole_s: float  # of the command with all rounds of the preset
    exchange_s: float  # wall time of the exchange, waiting for the others included
    sent_bytes: int  # by one process
    transitions: int


class Counted:
    """A gather that counts what it sends and how long it takes."""

    def __init__(self, gather: Gather) -> None:
        self.gather, self.rank, self.size = gather, gather.rank, gather.size
        self.sent, self.seconds = 0, 0.0

    def exchange(self, message: bytes) -> list[bytes]:
        begun = time.perf_counter()
        told = self.gather.exchange(message)
        self.sent += len(message)
        self.seconds += time.perf_counter() - begun
        return told


@contextmanager
def timed(owner: object, name: str, spent: list[float]) -> Iterator[None]:
    """Add the processor time of every call of a method to `spent`."""
    method: Callable[..., object] = getattr(owner, name)

    def call(*arguments: object, **named: object) -> object:
        begun = time.process_time()
        result = method(*arguments, **named)
        spent.append(time.process_time() - begun)
        return result

    setattr(owner, name, call)
    yield
    delattr(owner, name)


def measure(args: argparse.Namespace, gather: Gather) -> Result:
    """One process's part of the measurement; all of them get the same result."""
    shards = args.shards or gather.size
    config = load_config(preset=args.preset, overrides=[*args.set, f"shards={shards}", "device=cpu"])
    counted, updates = Counted(gather), list[float]()
    with cpu_threads(1):
        trainer = make_trainer(config, torch.device("cpu"), counted)
        start = time.process_time()  # of this process so far
        small = ["members=2", "episode.steps=2", "lifecycle.allow_unfinished=true", "rounds=1"]
        make_trainer(load_config(overrides=[*small, "shards=1"], base=config)).play_round()  # loads kernels
        wall, busy = time.perf_counter(), time.process_time()
        told = []
        with timed(trainer.learners[LEARNER].agent, "update", updates):
            for done in range(1, args.rounds + 1):
                told.append(trainer.play_round()[LEARNER])
                left = (args.rounds - done) * (time.perf_counter() - wall) / done
                if gather.rank == 0:
                    tell(f"  round {done} of {args.rounds} is done, about {left:.0f} s left")
        wall, busy = time.perf_counter() - wall, time.process_time() - busy
    everyone = all_gather_values(gather, [busy, sum(updates), wall, counted.seconds, counted.sent, start])
    busiest = max(everyone)
    return Result(
        preset=args.preset,
        members=config.members,
        processes=gather.size,
        shards=shards,
        wall_s=round(max(each[2] for each in everyone) / args.rounds, 3),
        busiest_s=round(busiest[0] / args.rounds, 3),
        update_s=round(busiest[1] / args.rounds, 3),
        start_s=round(busiest[5], 3),
        whole_s=round(busiest[5] + config.rounds * busiest[0] / args.rounds, 1),
        exchange_s=round(busiest[3] / args.rounds, 3),
        sent_bytes=int(max(each[4] for each in everyone) / args.rounds),
        transitions=int(sum(t.update.steps_learned for t in told) / args.rounds),
    )


def tell(text: str) -> None:
    """How far it is, for whoever waits."""
    print(text, file=sys.stderr, flush=True)


def launch(size: int, *arguments: str, restarts: int = 0, loud: bool = False) -> subprocess.Popen[str]:
    """A module in `size` processes with one thread each; loud: what they say on the way is shown."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]
    return subprocess.Popen(
        [*command, f"--max-restarts={restarts}", "-m", *arguments],
        stdout=subprocess.PIPE,
        stderr=None if loud else subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def run_all(args: argparse.Namespace) -> list[dict[str, object]]:
    """What every number of processes found, one after the other."""
    results = []
    for k, size in enumerate(args.processes, start=1):
        tell(f"{size} processes, measurement {k} of {len(args.processes)}")
        worker = launch(size, "benchmarks.scaling", "--worker", *sys.argv[1:], loud=True)
        out, _ = worker.communicate()
        if worker.returncode:
            sys.exit(worker.returncode)
        results += [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    return results


def show(results: list[Result], machine: str) -> None:
    table = Table(title=f"One round by several processes ({machine})")
    titles = ("processes", "shards", "wall, s", "busiest, s", "gain", "update, s", "start, s", "whole", "KB")
    for title in titles:
        table.add_column(title, justify="right")
    first = results[0]
    for r in results:
        gain = f"{first.busiest_s / r.busiest_s:.2f}× ({first.wall_s / r.wall_s:.2f}× wall)"
        whole = f"{first.whole_s / r.whole_s:.2f}×"
        cells = (r.processes, r.shards, r.wall_s, r.busiest_s, gain, r.update_s, r.start_s, whole)
        table.add_row(*map(str, cells), f"{r.sent_bytes / 1e3:,.0f}")
    Console(width=120).print(table)


# ---- in turns --------------------------------------------------------------------------------------------


@dataclass
class Pretended:
    """The first of several processes; what the others would send is what it sends itself."""

    size: int
    rank: int = 0

    def exchange(self, message: bytes) -> list[bytes]:
        return [message] * self.size


def step_seconds(trainer: Trainer) -> Iterator[float]:
    """The processor time of each step of a process's first episode."""
    environment = trainer.environment
    spans = trainer.blocks.spans(environment.num_members)
    seen = environment.reset(0, None, trainer.blocks.metric_users(environment.num_members))
    trainer.blocks.begin(
        EpisodeInfo(environment.members, environment.num_slots, environment.spec.seed, environment.device, 0)
    )
    while not environment.done:
        begun = time.process_time()
        result = environment.step(trainer.blocks.decide(seen, environment.masks(), environment.clock))
        trainer.record_steps(result, spans)
        seen = result.observation
        yield time.process_time() - begun


def in_turns(args: argparse.Namespace) -> None:
    """All members and half of them, a step each in turns: what others do to the machine, they do to both."""
    config = load_config(preset=args.preset, overrides=[*args.set, "device=cpu"])
    halves, steps = config.model_copy(update={"shards": 2}), list[tuple[float, float]]()
    with cpu_threads(1):
        all_members = make_trainer(config, torch.device("cpu"))
        half_of_them = make_trainer(halves, torch.device("cpu"), Pretended(2))
        for pair in zip(step_seconds(all_members), step_seconds(half_of_them), strict=False):
            steps.append(pair)
            tell(f"  step {len(steps)} of {config.episode.steps}")
        learner, begun = all_members.learners[LEARNER], time.process_time()
        learner.finish_episode()
        learner.agent.update(learner.buffer)
        update = time.process_time() - begun
    whole, half = (sum(column) for column in zip(*steps[2:], strict=True))
    gains = whole / half, (whole + update) / (half + update)
    print(
        f"{len(steps) - 2} steps: {whole:.1f} s of all members, {half:.1f} s of half: {gains[0]:.2f}×; "
        f"with the update of {update:.2f} s in both {gains[1]:.2f}×"
    )


def work(args: argparse.Namespace) -> None:
    """One process's part of a measurement; the first one prints what all found."""
    with processes(Launch.of()) as gather:
        found = measure(args, gather)
        if gather.rank == 0:
            print(json.dumps(vars(found)))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--preset", default="digits")
    parser.add_argument("--set", action="append", default=[], help="a setting, a.b=c")
    parser.add_argument("--shards", type=int, default=0, help="0: one for each process")
    parser.add_argument("--rounds", type=int, default=1, help="timed rounds")
    parser.add_argument("--turns", action="store_true", help="a step each in turns, in one process, instead")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.turns:
        in_turns(args)
    elif args.worker:
        work(args)
    else:
        report(args)


def report(args: argparse.Namespace) -> None:
    """Measure and show."""
    machine = f"{os.cpu_count()} cores, {platform.machine()}"
    found = [Result(**told) for told in run_all(args)]
    if args.json:
        print("\n".join(line_of(result, machine) for result in found))
    else:
        show(found, machine)


if __name__ == "__main__":
    main()
