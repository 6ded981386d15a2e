"""Is the default recipe as good as a plain loop? `python -m benchmarks.recipe`

The same initial network is trained twice for the same number of minibatches: by a loop as anyone would write
it (AdamW, β₂ .999, a short warm-up, one cycle of the learning rate), and by `esper.grow` with the controller
that never grows and the default settings. What is printed is the difference of the test accuracies over
paired seeds with its 95 % interval; the recipe is level where the interval holds 0.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import esper
from esper.foundation.statistics import mean_interval
from esper.population.hosts import build_host
from esper.tasks import Split, Task, load_task
from studies.command_line import positive


@dataclass(frozen=True)
class Case:
    """How long a task is trained, and how."""

    task: str
    epochs: int
    batch: int
    lr: float


CASES = (Case("digits", 15, 32, 1e-2), Case("letter", 5, 64, 1e-2), Case("mnist1d", 12, 64, 1e-2))
WIDTH = 12  # of the hosts: those of the tasks are so narrow that luck outweighs the recipe


@dataclass(frozen=True)
class Row:
    """One task: test accuracies of paired seeds, and ours minus the plain loop's in points."""

    task: str
    plain: list[float]
    ours: list[float]
    difference: float
    half_width: float
    plain_seconds: float
    our_seconds: float


def train_plainly(model: nn.Module, data: Split, case: Case, seed: int) -> nn.Module:
    """A loop as anyone would write it; the model is trained in place."""
    steps = len(data) // case.batch
    optimiser = torch.optim.AdamW(model.parameters(), lr=case.lr, betas=(0.9, 0.999), weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimiser, case.lr, case.epochs * steps, pct_start=0.05, cycle_momentum=False
    )
    draw = torch.Generator().manual_seed(seed)
    for _ in range(case.epochs):
        for index in torch.randperm(len(data), generator=draw)[: steps * case.batch].split(case.batch):
            optimiser.zero_grad()
            F.cross_entropy(model(data.inputs[index]), data.targets[index]).backward()
            optimiser.step()
            schedule.step()
    return model.eval()


@torch.no_grad()
def accuracy(model: nn.Module, split: Split) -> float:
    """The share of samples whose class is found."""
    outputs: Tensor = model(split.inputs)
    return float((outputs.argmax(-1) == split.targets).float().mean())


def initial_model(task: Task, seed: int) -> nn.Module:
    """The task's host, `WIDTH` wide, as a plain sequence with weights by the seed."""
    torch.manual_seed(seed)
    options = {**task.host.options, "width": WIDTH}
    host = build_host(task.host.preset, task.input_shape, task.num_classes, **options)
    return nn.Sequential(*host.segments, host.head)


def measure(case: Case, seeds: int) -> Row:
    """Both ways on one task."""
    task = load_task(case.task)
    test = task.test()
    scores: dict[str, list[float]] = {"plain": [], "ours": []}
    seconds = {"plain": 0.0, "ours": 0.0}
    for seed in range(seeds):
        model = initial_model(task, seed)
        start = time.perf_counter()
        scores["plain"].append(accuracy(train_plainly(copy.deepcopy(model), task.train, case, seed), test))
        middle = time.perf_counter()
        grown = esper.grow(
            model,
            train=(task.train.inputs, task.train.targets),
            val=(task.validation.inputs, task.validation.targets),
            controller="static",
            epochs=case.epochs,
            batch_size=case.batch,
            lr=case.lr,
            seed=seed,
            progress=False,
        )
        scores["ours"].append(accuracy(grown.model, test))
        seconds["plain"] += middle - start
        seconds["ours"] += time.perf_counter() - middle
    gaps = [100 * (a - b) for a, b in zip(scores["ours"], scores["plain"], strict=True)]
    difference, half = mean_interval(gaps)
    return Row(
        case.task, scores["plain"], scores["ours"], difference, half, seconds["plain"], seconds["ours"]
    )


def rows(tasks: Sequence[str], seeds: int) -> Iterator[Row]:
    """Every task in turn."""
    for case in CASES:
        if case.task in tasks:
            yield measure(case, seeds)


def main() -> None:
    """Print one line per task, as JSON with --json."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.recipe", description=__doc__)
    names = [case.task for case in CASES]
    parser.add_argument("--tasks", nargs="+", choices=names, default=names)
    parser.add_argument("--seeds", type=positive, default=3)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    for row in rows(given.tasks, given.seeds):
        if given.json:
            print(json.dumps(asdict(row)), flush=True)
            continue
        plain, ours = (100 * sum(part) / len(part) for part in (row.plain, row.ours))
        print(
            f"{row.task:8}  plain loop {plain:5.1f} % ({row.plain_seconds:.0f} s)  static {ours:5.1f} % "
            f"({row.our_seconds:.0f} s)  difference {row.difference:+.2f} ± {row.half_width:.2f} points",
            flush=True,
        )


if __name__ == "__main__":
    main()
