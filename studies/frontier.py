"""The frontier of fixed networks: what the preset hosts reach when they are trained well, by size.

    python -m studies.frontier                 every task and width of the table below
    python -m studies.frontier --hosts         each task's own host: the figures of `ungrown_accuracy`
    python -m studies.frontier --task mnist1d --seeds 3

Growth has to beat these lines. Plain PyTorch, one network after another. The test split is read once per
network, after its training; nothing is chosen by it.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import mean

import torch

from esper.population.hosts import Host, build_host
from esper.tasks import HostSpec, Split, Task, load_task, task_names
from studies.command_line import run
from tests.population.reference import accuracy_of, loss_of

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Recipe:
    """AdamW with one cycle of the learning rate."""

    steps: int = 4000
    batch: int = 128
    peak_lr: float = 3e-2
    weight_decay: float = 1e-2
    betas: tuple[float, float] = (0.9, 0.999)  # these two as in esper's own default recipe
    warmup: float = 0.05


@dataclass(frozen=True)
class Line:
    """A preset at several widths on one task."""

    task: str
    preset: str
    widths: tuple[int, ...]
    options: Mapping[str, int] = field(default_factory=dict)


FRONTIER = (
    Line("mnist1d", "cnn", (4, 6, 8, 12, 16, 32)),
    Line("mnist1d", "mlp", (8, 32)),
    Line("mnist1d_shuffled", "cnn", (4, 16)),
    Line("letter", "mlp", (8, 16, 48)),
    Line("digits", "cnn", (4, 8, 10)),
    Line("mnist5000", "cnn", (4, 8), {"first_stride": 2}),
    Line("spirals", "mlp", (8, 16)),
    Line("text", "gpt", (8, 16), {"heads": 2}),
)
SHORT_TASKS = {"digits": 1500, "mnist5000": 1500, "text": 2000}  # steps; the others take the recipe's


@dataclass(frozen=True)
class Result:
    """One network size on one task, over several seeds."""

    task: str
    host: str
    parameters: int
    steps: int
    validation: list[float]
    test: list[float]
    seconds: float


def train(host: Host, data: Split, recipe: Recipe, generator: torch.Generator) -> None:
    """Train a host in place on random minibatches."""
    optimiser = torch.optim.AdamW(
        host.parameters(), lr=recipe.peak_lr, weight_decay=recipe.weight_decay, betas=recipe.betas
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimiser, recipe.peak_lr, recipe.steps, pct_start=recipe.warmup, cycle_momentum=False
    )
    for _ in range(recipe.steps):
        chosen = torch.randint(len(data), (recipe.batch,), generator=generator)
        loss = loss_of(host(data.inputs[chosen]), data.targets[chosen])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()


@torch.no_grad()
def accuracy(host: Host, split: Split) -> float:
    return accuracy_of(host(split.inputs), split.targets)


def measure(task: Task, spec: HostSpec, recipe: Recipe, seeds: int) -> Result:
    """Train `seeds` networks and test each of them once."""
    started = time.perf_counter()
    validation, test = [], []
    for seed in range(seeds):
        torch.manual_seed(seed)
        host = build_host(spec.preset, task.input_shape, task.num_classes, **spec.options)
        train(host, task.train, recipe, torch.Generator().manual_seed(seed))
        validation.append(accuracy(host, task.validation))
        test.append(accuracy(host, task.test()))
    options = ", ".join(f"{k}={v}" for k, v in spec.options.items())
    name = f"{spec.preset}({options})"
    seconds = (time.perf_counter() - started) / seeds
    return Result(task.name, name, host.num_parameters, recipe.steps, validation, test, seconds)


def experiments(hosts: bool, only: str | None) -> Iterator[tuple[Task, HostSpec]]:
    """Each task's own host, or every width of the table."""
    if hosts:
        for name in task_names():
            if only in (None, name):
                task = load_task(name)
                yield task, task.host
        return
    for line in FRONTIER:
        if only in (None, line.task):
            task = load_task(line.task)
            for width in line.widths:
                yield task, HostSpec(line.preset, {"width": width, "depth": 3, **line.options})


def row(result: Result) -> str:
    low, high = min(result.test), max(result.test)
    spread = f"{mean(result.test):.3f} ({low:.3f} to {high:.3f})"
    return (
        f"| {result.task} | {result.host} | {result.parameters} | {result.steps} "
        f"| {mean(result.validation):.3f} | {spread} | {result.seconds:.0f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--hosts", action="store_true", help="measure each task's own host")
    parser.add_argument("--task", choices=task_names(), help="one task alone")
    parser.add_argument("--seeds", type=int, default=3, help="networks per size")
    parser.add_argument("--lr", type=float, default=Recipe.peak_lr, help="peak learning rate")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    path = RESULTS / ("ungrown_hosts.json" if arguments.hosts else "frontier.json")
    print("| task | host | parameters | steps | validation | test (min to max) | seconds |")
    print("|---|---|---|---|---|---|---|")
    for task, spec in experiments(arguments.hosts, arguments.task):
        steps = SHORT_TASKS.get(task.name, Recipe.steps)
        result = measure(task, spec, Recipe(steps=steps, peak_lr=arguments.lr), arguments.seeds)
        print(row(result), flush=True)
        keep(path, result)


def keep(path: Path, result: Result) -> None:
    """Write a result beside the others of its file, in the place of an older one."""
    path.parent.mkdir(exist_ok=True)
    kept = json.loads(path.read_text()) if path.exists() else []
    others = [r for r in kept if (r["task"], r["host"]) != (result.task, result.host)]
    order = task_names()
    rows = sorted([*others, asdict(result)], key=lambda r: (order.index(r["task"]), r["parameters"]))
    path.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    run(main)
