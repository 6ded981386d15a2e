"""What several processes gain, and what they pay for it: `python -m benchmarks.scaling --processes 1 2 4`

Rounds of `esper train --preset digits` (or another) by 1, 2 and 4 processes of torchrun, one thread each. The
table has the wall time of a round; the processor time of a round in the process that needs most, which is
what the wall time would be with a core for each; how much of that is the update, which every process makes;
and the bytes that each process sends.

`--turns`: all members and half of them, a step each in turns, for a machine that others use as well.
`--kills N`: a run of two processes of which one is killed at a random moment, N times, each held to the bits
of a run that nobody disturbed. `--model`: the cost of a round on 1 to 1,024 GPUs by the formula of
docs/scaling.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.lines import line_of
from esper.builders import LEARNER, make_trainer
from esper.config import RunConfig, load_config
from esper.foundation.devices import cpu_threads
from esper.foundation.gather import Alone, Gather, exchange_values
from esper.foundation.launch import Launch
from esper.foundation.processes import processes
from esper.tamiyo.controller import Scene
from esper.telemetry.checkpoints import load_checkpoint


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
    exchange_s: float  # wall time of the exchange, waiting for the others included
    sent_bytes: int  # by one process
    transitions: int


class Counted:
    """A gather that counts what it sends and how long it takes."""

    def __init__(self, gather: Gather) -> None:
        self.gather, self.rank, self.size, self.patience = gather, gather.rank, gather.size, gather.patience
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

    def call(*arguments: object) -> object:
        begun = time.process_time()
        result = method(*arguments)
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
        trainer.play_round()  # weights are drawn, kernels loaded
        counted.sent, counted.seconds = 0, 0.0
        wall, busy = time.perf_counter(), time.process_time()
        with timed(trainer.learners[LEARNER].agent, "update", updates):
            told = [trainer.play_round()[LEARNER] for _ in range(args.rounds)]
        wall, busy = time.perf_counter() - wall, time.process_time() - busy
    everyone = exchange_values(gather, [busy, sum(updates), wall, counted.seconds, float(counted.sent)])
    busiest = max(everyone)
    return Result(
        preset=args.preset,
        members=config.members,
        processes=gather.size,
        shards=shards,
        wall_s=round(max(each[2] for each in everyone) / args.rounds, 3),
        busiest_s=round(busiest[0] / args.rounds, 3),
        update_s=round(busiest[1] / args.rounds, 3),
        exchange_s=round(busiest[3] / args.rounds, 3),
        sent_bytes=int(max(each[4] for each in everyone) / args.rounds),
        transitions=int(sum(t.update.steps_learned for t in told) / args.rounds),
    )


def launch(size: int, *arguments: str, restarts: int = 0) -> subprocess.Popen[str]:
    """A module in `size` processes with one thread each."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]
    return subprocess.Popen(
        [*command, f"--max-restarts={restarts}", "-m", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def run_all(args: argparse.Namespace) -> list[Result]:
    """Every number of processes, one after the other."""
    results = []
    for size in args.processes:
        options = [f"--preset={args.preset}", f"--rounds={args.rounds}", f"--shards={args.shards}"]
        worker = launch(size, "benchmarks.scaling", "--worker", *options, *(f"--set={s}" for s in args.set))
        out, err = worker.communicate()
        if worker.returncode:
            sys.exit(err)
        results.append(Result(**json.loads(out.splitlines()[-1])))
    return results


def show(results: list[Result], machine: str) -> None:
    table = Table(title=f"One round by several processes ({machine})")
    titles = ("processes", "shards", "wall, s", "busiest, s", "gain", "update, s", "exchange, s", "sent, KB")
    for title in titles:
        table.add_column(title, justify="right")
    for r in results:
        gain = f"{results[0].busiest_s / r.busiest_s:.2f}× ({results[0].wall_s / r.wall_s:.2f}× wall)"
        cells = (r.processes, r.shards, r.wall_s, r.busiest_s, gain, r.update_s, r.exchange_s)
        table.add_row(*map(str, cells), f"{r.sent_bytes / 1e3:,.0f}")
    Console(width=120).print(table)


# ---- in turns --------------------------------------------------------------------------------------------


@dataclass
class Half:
    """The first of two processes, for as long as it need not talk."""

    rank: int = 0
    size: int = 2
    patience: float = 0.0

    def exchange(self, message: bytes) -> list[bytes]:
        raise AssertionError("there is nobody to talk to")


def step_seconds(config: RunConfig, gather: Gather) -> Iterator[float]:
    """The processor time of each step of a process's first episode."""
    trainer = make_trainer(config, torch.device("cpu"), gather)
    world = trainer.environment
    spans = trainer.blocks.spans(world.num_members)
    seen = world.reset(0, None, trainer.blocks.looking(world.num_members))
    trainer.blocks.begin(Scene(world.members, world.num_slots, world.spec.seed, world.device, 0))
    while not world.done:
        begun = time.process_time()
        result = world.step(trainer.blocks.decide(seen, world.masks(), world.clock))
        trainer.teach(result, spans)
        seen = result.observation
        yield time.process_time() - begun


def in_turns(args: argparse.Namespace) -> None:
    """All members and half of them, a step each in turns: what others do to the machine, they do to both."""
    config = load_config(preset=args.preset, overrides=[*args.set, "device=cpu"])
    halves = config.model_copy(update={"shards": 2})
    with cpu_threads(1):
        steps = list(zip(step_seconds(config, Alone()), step_seconds(halves, Half()), strict=False))[2:]
    whole, half = (sum(column) for column in zip(*steps, strict=True))
    print(
        f"{len(steps)} steps: {whole:.1f} s of all members, {half:.1f} s of half of them: {whole / half:.2f}×"
    )


# ---- killed at random moments ----------------------------------------------------------------------------

TINY = (
    *("task=spirals", "members=6", "shards=4", "rounds=12", "episode.steps=8"),
    *("lifecycle.allow_unfinished=true", "reward.control_variate=true", "policy.width=16"),
    *("population.batch_size=16", "population.batches_per_epoch=2", "telemetry.checkpoint_every=2"),
)


def kill(times: int, seed: int) -> None:
    """Kill a random one of two processes at a random moment, as often as asked, and compare."""
    draw = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder, "whole")
        _finished(_train(2, whole))
        for k in range(times):
            run, rank, rounds = Path(folder, f"killed-{k}"), draw.randrange(2), draw.randrange(10)
            process = _train(2, run, restarts=1)
            while _lines(run) < rounds or len(_workers(process)) < 2:
                time.sleep(0.01)
            time.sleep(draw.uniform(0.0, 1.0 if rounds else 5.0))  # before the first round, or within one
            workers, done = _workers(process), _lines(run)
            os.kill(workers[rank], signal.SIGKILL)
            _finished(process)
            torn = [path.name for path in run.rglob("*.tmp")]
            alike = "the same bits" if _bits(run) == _bits(whole) else "OTHER BITS"
            print(f"{k + 1}: process {rank} after {done} rounds: {alike}, torn files: {torn or 'none'}")


def _workers(process: subprocess.Popen[str]) -> list[int]:
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
    return [int(number) for number in children.split()]


def _train(size: int, out: Path, restarts: int = 0) -> subprocess.Popen[str]:
    settings = [word for setting in TINY for word in ("--set", setting)]
    return launch(size, "esper", "train", "--quiet", "--out", str(out), *settings, restarts=restarts)


def _finished(process: subprocess.Popen[str]) -> None:
    _, err = process.communicate()
    if process.returncode:
        sys.exit(err)


def _lines(run: Path) -> int:
    file = run / "metrics.jsonl"
    return file.read_text().count("\n") if file.exists() else 0


def _bits(run: Path) -> dict[str, object]:
    """All that a run leaves that the clock on the wall has no part in."""
    tensors = load_checkpoint(run / "checkpoints" / "last.safetensors").tensors
    kept = {name: value.numpy().tobytes() for name, value in tensors.items() if name != "seconds"}
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    metrics = [{name: value for name, value in line.items() if name != "seconds"} for line in lines]
    return kept | {"metrics": metrics, "events": (run / "events.jsonl").read_text()}


# ---- the cost of a round, by formula ---------------------------------------------------------------------


@dataclass(frozen=True)
class Model:
    """A round of P processes: T · step + P · members · T · (epochs · update + bytes / network)."""

    members: int = 2048  # of each process
    steps: int = 40
    epochs: int = 4
    step_s: float = 0.207  # without the update; one H200, work "images" of benchmarks.loop
    update_s: float = 5.7e-6  # of one transition in one epoch
    sent: int = 1600  # bytes of one transition, with its record and that of its twin
    network: float = 1.1e9  # bytes per second between two machines

    def parts(self, size: int) -> tuple[float, float, float]:
        """Seconds of the episode, of the update and of the exchange."""
        transitions = size * self.members * self.steps
        exchange = transitions * self.sent / self.network if size > 1 else 0.0
        return self.steps * self.step_s, transitions * self.epochs * self.update_s, exchange


def show_model() -> None:
    """With the update as it was measured, where the host was slower than the GPU, and at a fifth of that."""
    table = Table(title="A round by formula")
    for title in ("GPUs", "episode, s", "update, s", "exchange, s", "gathered, GB", "worth, GPUs"):
        table.add_column(title, justify="right")
    for size in (1, 8, 64, 256, 1024):
        slow, fast = Model(), Model(update_s=Model.update_s / 5)
        (episode, update, exchange), (_, quick, _) = slow.parts(size), fast.parts(size)
        worth = [size * sum(model.parts(1)) / sum(model.parts(size)) for model in (slow, fast)]
        held = size * slow.members * slow.steps * slow.sent / 1e9
        table.add_row(
            *(f"{size:,}", f"{episode:.1f}", f"{quick:.1f} to {update:.1f}", f"{exchange:.1f}"),
            *(f"{held:.1f}", f"{worth[0]:.1f} to {worth[1]:.1f}"),
        )
    Console(width=120).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--preset", default="digits")
    parser.add_argument("--set", action="append", default=[], help="a setting, a.b=c")
    parser.add_argument("--shards", type=int, default=0, help="0: one for each process")
    parser.add_argument("--rounds", type=int, default=3, help="timed rounds")
    parser.add_argument("--kills", type=int, default=0, help="kill a process this many times instead")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--turns", action="store_true", help="a step each in turns, in one process, instead")
    parser.add_argument("--model", action="store_true", help="the cost by formula instead")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.model:
        show_model()
    elif args.turns:
        in_turns(args)
    elif args.kills:
        kill(args.kills, args.seed)
    elif args.worker:
        with processes(Launch.of()) as gather:
            result = measure(args, gather)
        if gather.rank == 0:
            print(json.dumps(vars(result)))
    else:
        results, machine = run_all(args), f"{os.cpu_count()} cores, {platform.machine()}"
        if args.json:
            print("\n".join(line_of(result, machine) for result in results))
        else:
            show(results, machine)


if __name__ == "__main__":
    main()
