"""`python -m benchmarks.versions OTHER`: the hot paths and a population step of two checkouts.

Both run side by side, each in a process of its own, and take turns: a burst of calls here, a burst there, so
that both meet the same machine. A row is the median thread CPU time of a call in each, their ratio, and the
operations that reach the dispatcher. To have another checkout: `git worktree add OTHER COMMIT`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from studies.command_line import run

HERE = Path(__file__).parents[1]
ROWS = (  # work, members, slots
    ("masks", 128, 3),
    ("masks", 128, 25),
    ("features", 128, 9),
    ("features", 128, 25),
    ("kl", 128, 1),
    ("update", 64, 3),
    ("buffer", 128, 3),
    ("gae", 128, 1),
    ("population", 16, 3),
)
# Runs in either checkout. In: work, members, slots, calls. Out: ms of each call, operations of one.
# Older checkouts have one module for each work and a function that finds them.
WORKER = """
import argparse, json, sys, time
import torch
from benchmarks import common, hot_paths, population
torch.set_num_threads(1)
works = hot_paths.find_works() if hasattr(hot_paths, 'find_works') else hot_paths.WORKS

def prepare(work, members, slots):
    if work != "population":
        return works[work].prepare(members, slots).ours
    shape = {"host": "cnn", "channels": 1, "side": 8, "width": 16}
    args = argparse.Namespace(device="cpu", batches=1, precision="float32", **shape)
    members, states, data = population.planted(args, members, seeds=True)
    return lambda: members.train_epoch(states, data, population.Clock(0, 0, 10))

cases = {}
for line in sys.stdin:
    work, members, slots, calls = json.loads(line)
    key = (work, members, slots)
    if key not in cases:
        call = prepare(work, members, slots)
        call()
        cases[key] = call, common.count_operations(call)
    call, operations = cases[key]
    times = []
    while len(times) < calls and sum(times) < 200:
        begun = time.thread_time()
        call()
        times.append(1e3 * (time.thread_time() - begun))
    print(json.dumps([times, operations]), flush=True)
"""


class Checkout:
    """The hot paths of a folder, in a process of their own."""

    def __init__(self, folder: Path) -> None:
        if not (folder / "benchmarks" / "hot_paths.py").exists():
            raise ValueError(f"{folder} is no checkout of Esper; make one with git worktree add")
        paths = os.pathsep.join(str(path) for path in (folder / "src", folder))
        self._worker = subprocess.Popen(
            [sys.executable, "-c", WORKER],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def burst(self, *request: Any) -> tuple[list[float], int]:
        """Milliseconds of each call, and the operations of one."""
        assert self._worker.stdin is not None
        assert self._worker.stdout is not None
        print(json.dumps(request), file=self._worker.stdin, flush=True)
        times, operations = json.loads(self._worker.stdout.readline())
        return times, operations


def main() -> None:
    """Print the table as Markdown."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.versions", description=__doc__)
    parser.add_argument("other", type=Path, help="another checkout")
    parser.add_argument("--rounds", type=int, default=15, help="bursts of each")
    parser.add_argument("--calls", type=int, default=10, help="of a burst, or 0.2 s")
    parser.add_argument("--works", nargs="+", choices=sorted({row[0] for row in ROWS}), help="all by default")
    args = parser.parse_args()
    checkouts = [Checkout(args.other.resolve()), Checkout(HERE)]
    print("| work | members | slots | before, ms | now, ms | now / before | operations before | now |")
    print("|---|---|---|---|---|---|---|---|")
    for work, members, slots in (row for row in ROWS if not args.works or row[0] in args.works):
        times: list[list[float]] = [[], []]
        operations = [0, 0]
        for _ in range(args.rounds):
            for i, checkout in enumerate(checkouts):
                found, operations[i] = checkout.burst(work, members, slots, args.calls)
                times[i] += found
        before, now = map(statistics.median, times)
        figures = f"{before:.3f} | {now:.3f} | {now / before:.2f} | {operations[0]} | {operations[1]}"
        print(f"| {work} | {members} | {slots} | {figures} |", flush=True)


if __name__ == "__main__":
    run(main)
