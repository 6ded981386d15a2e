"""Processes killed at random moments: `python -m benchmarks.kills 10`

A run of two processes of which a random one is killed (SIGKILL) at a random moment; torchrun starts both
again. Each run is held to the weights, metrics and events of one that nobody disturbed. Exit code 1 where one
differs. Linux only: the processes are found in /proc.

`--processes 1 2 4 8`: nobody is killed; one run by each of these numbers of processes instead, with as many
shards as the largest.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.scaling import launch
from esper.runs.checkpoints import load_checkpoint

TINY = (
    *("task=spirals", "members=6", "shards=4", "rounds=12", "episode.steps=8"),
    *("lifecycle.allow_unfinished=true", "reward.control_variate=true", "policy.width=16"),
    *("population.batch_size=16", "population.batches_per_epoch=2", "telemetry.checkpoint_every=2"),
)


def kill(times: int, seed: int) -> bool:
    """Kill a random one of two processes at a random moment, as often as asked; whether all ended alike."""
    draw, well = random.Random(seed), 0
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
            same = _bits(run) == _bits(whole)
            well += same and not torn
            alike = "the same bits" if same else "OTHER BITS"
            print(
                f"{k + 1}: process {rank} after {done} rounds: {alike}, torn files: {torn or 'none'}",
                flush=True,
            )
    print(f"{well} of {times} ended with the bits of a run that nobody disturbed, and no file half-written")
    return well == times


def alike(sizes: Sequence[int]) -> bool:
    """Whether one run has the same bits by each number of processes."""
    shards = (f"members={max(sizes)}", f"shards={max(sizes)}", "rounds=3")
    with tempfile.TemporaryDirectory() as folder:
        runs = [Path(folder, f"by-{size}") for size in sizes]
        for size, run in zip(sizes, runs, strict=True):
            _finished(_train(size, run, more=shards))
        same = [_bits(run) == _bits(runs[0]) for run in runs[1:]]
    for size, equal in zip(sizes[1:], same, strict=True):
        print(f"{size} processes: {'the' if equal else 'NOT THE'} same bits as {sizes[0]}")
    return all(same)


def _workers(process: subprocess.Popen[str]) -> list[int]:
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
    return [int(number) for number in children.split()]


def _train(size: int, out: Path, restarts: int = 0, more: Sequence[str] = ()) -> subprocess.Popen[str]:
    settings = [word for setting in (*TINY, *more) for word in ("--set", setting)]
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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("times", type=int, nargs="?", default=10)
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--processes", type=int, nargs="+", help="compare these numbers of them instead")
    args = parser.parse_args()
    sys.exit(0 if (alike(args.processes) if args.processes else kill(args.times, args.seed)) else 1)


if __name__ == "__main__":
    main()
