"""Is the default recipe as good as a plain loop? `python -m benchmarks.recipe`

A network is trained twice for the same number of minibatches: by a loop as anyone would write it (AdamW, β₂
.999, a short warm-up, one cycle of the learning rate), and by an entry point of Esper with its default
settings and the controller that never grows:

    rows, live    the two engines of `esper.grow`
    callback      `esper.Grower` in that very loop
    estimator     `esper.GrowingClassifier`, on the inputs as a table
    preset        the ungrown members of `esper train` and `esper compare`, with the preset of the task

Both begin with the same weights and learn from the same samples; the order of the minibatches differs. What
is printed is the difference of the test accuracies over paired seeds with its 95 % interval; the recipe is
level where the interval holds 0.
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.utils import check_random_state
from torch import Tensor, nn

import esper
from esper.builders import make_environment
from esper.config import load_config
from esper.foundation.statistics import mean_interval
from esper.population.extract import extract
from esper.population.hosts import build_host
from esper.simic.rollout import evaluate_test, play
from esper.tamiyo.scripted import Static
from esper.tasks import Split, Task, load_task
from studies.command_line import positive


@dataclass(frozen=True)
class Case:
    """How long a task is trained, and how."""

    task: str
    epochs: int
    batch: int
    lr: float


CASES = {
    case.task: case
    for case in (Case("digits", 15, 32, 1e-2), Case("letter", 5, 64, 1e-2), Case("mnist1d", 12, 64, 1e-2))
}
WIDTH = 12  # of the hosts: those of the tasks are so narrow that luck outweighs the recipe
Scores = tuple[list[float], list[float]]  # of the plain loop and of the entry point, seed by seed


@dataclass(frozen=True)
class Row:
    """An entry point on a task: test accuracies of paired seeds, and ours minus the loop's in points."""

    task: str
    entry: str
    plain: list[float]
    ours: list[float]
    difference: float
    half_width: float

    @property
    def level(self) -> bool:
        """Whether the 95 % interval of the difference holds 0; a single seed has none, and is not level."""
        return abs(self.difference) <= self.half_width


def train_plainly(
    model: nn.Module,
    data: Split,
    case: Case,
    seed: int,
    minibatches: int = 0,
    watch: Callable[[nn.Module, torch.optim.Optimizer], Callable[[], object]] | None = None,
) -> nn.Module:
    """A loop as anyone would write it; the model is trained in place.

    minibatches: in all, if not the epochs of the case. watch: makes what is called after every epoch.
    """
    steps = len(data) // case.batch
    total = minibatches or case.epochs * steps
    optimiser = torch.optim.AdamW(model.parameters(), lr=case.lr, betas=(0.9, 0.999), weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimiser, case.lr, total, pct_start=0.05, cycle_momentum=False
    )
    after_epoch = watch(model, optimiser) if watch is not None else None
    draw = torch.Generator().manual_seed(seed)
    for done in range(total):
        if done % steps == 0:
            order = torch.randperm(len(data), generator=draw)
        index = order[done % steps * case.batch :][: case.batch]
        optimiser.zero_grad()
        F.cross_entropy(model(data.inputs[index]), data.targets[index]).backward()
        optimiser.step()
        schedule.step()
        if after_epoch is not None and (done + 1) % steps == 0:
            after_epoch()
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


# ---- the entry points ------------------------------------------------------------------------------------


@cache
def plain_score(name: str, seed: int) -> float:
    """Of the host that the engines and the callback begin with."""
    task = load_task(name)
    return accuracy(train_plainly(initial_model(task, seed), task.train, CASES[name], seed), task.test())


def by_engine(case: Case, seeds: int, engine: str) -> Scores:
    """`esper.grow` with one of its engines."""
    task, ours = load_task(case.task), []
    for seed in range(seeds):
        grown = esper.grow(
            initial_model(task, seed),
            train=(task.train.inputs, task.train.targets),
            val=(task.validation.inputs, task.validation.targets),
            controller="static",
            epochs=case.epochs,
            batch_size=case.batch,
            lr=case.lr,
            seed=seed,
            engine=engine,
            progress=False,
        )
        ours.append(accuracy(grown.model, task.test()))
    return [plain_score(case.task, seed) for seed in range(seeds)], ours


def by_callback(case: Case, seeds: int) -> Scores:
    """The plain loop with a `Grower` that is asked after every epoch; it restores the best one."""
    task = load_task(case.task)
    ours = [accuracy(train_with_grower(task, case, seed), task.test()) for seed in range(seeds)]
    return [plain_score(case.task, seed) for seed in range(seeds)], ours


def train_with_grower(task: Task, case: Case, seed: int) -> nn.Module:
    """What the callback hands back after the plain loop."""
    train, val = ((split.inputs, split.targets) for split in (task.train, task.validation))
    settings = {"controller": "static", "epochs": case.epochs, "batch_size": case.batch, "seed": seed}
    growers: list[esper.Grower] = []

    def watch(model: nn.Module, optimiser: torch.optim.Optimizer) -> Callable[[], object]:
        growers.append(esper.Grower(model, optimiser, train, val, **settings))
        return growers[0].step

    train_plainly(initial_model(task, seed), task.train, case, seed, watch=watch)
    return growers[0].finish().eval()


def by_estimator(case: Case, seeds: int) -> Scores:
    """`GrowingClassifier`, and the loop with its first weights on the samples that it trains on.

    It counts a sample that is given twice as one of twice the weight, so there are none of those here.
    """
    task, plain, ours = load_task(case.task), [], []
    table = np.unique(np.column_stack((task.train.inputs.flatten(1), task.train.targets)), axis=0)
    x, y = table[:, :-1], table[:, -1].astype(np.int64)
    asked = Split(task.test().inputs.flatten(1), task.test().targets)
    mean, spread = x.mean(axis=0), np.where(x.std(axis=0) > 0, x.std(axis=0), 1.0)
    test = Split(((asked.inputs - torch.from_numpy(mean)) / torch.from_numpy(spread)).float(), asked.targets)
    for seed in range(seeds):
        settings = {"epochs": case.epochs, "batch_size": case.batch, "lr": case.lr, "random_state": seed}
        classifier = esper.GrowingClassifier(controller="static", **settings).fit(x, y)
        ours.append(float(classifier.score(asked.inputs.numpy(), asked.targets.numpy())))
        random = check_random_state(seed)
        kept = random.permutation(len(x))[round(0.1 * len(x)) :]
        torch.manual_seed(int(random.randint(2**31 - 1)))
        model = nn.Sequential(nn.Linear(x.shape[1], 64), nn.ReLU(), nn.Linear(64, task.num_classes))
        scaled = torch.from_numpy(((x - mean) / spread)[kept]).float()
        plain.append(
            accuracy(train_plainly(model, Split(scaled, torch.from_numpy(y[kept])), case, seed), test)
        )
    return plain, ours


def by_preset(case: Case, seeds: int) -> Scores:
    """The members of a run that never grow, all at once, and the loop with the first weights of each."""
    config = load_config(preset=case.task, overrides=[f"members={seeds}"])
    environment, recipe = make_environment(config), config.population
    environment.reset(0)
    first = [extract(environment.population, environment.slots, i) for i in range(seeds)]
    record = play(environment, Static(), 0)
    task, minibatches = load_task(case.task), record.num_steps * recipe.batches_per_epoch
    like = replace(case, batch=recipe.batch_size, lr=recipe.host_lr)
    trained = [train_plainly(copy.deepcopy(m), task.train, like, i, minibatches) for i, m in enumerate(first)]
    return [accuracy(model, task.test()) for model in trained], evaluate_test(environment).accuracy.tolist()


ENTRIES: dict[str, Callable[[Case, int], Scores]] = {
    "rows": lambda case, seeds: by_engine(case, seeds, "rows"),
    "live": lambda case, seeds: by_engine(case, seeds, "live"),
    "callback": by_callback,
    "estimator": by_estimator,
    "preset": by_preset,
}


def measure(task: str, entry: str, seeds: int) -> Row:
    """Both ways through one entry point on one task."""
    plain, ours = ENTRIES[entry](CASES[task], seeds)
    gaps = [100 * (a - b) for a, b in zip(ours, plain, strict=True)]
    return Row(task, entry, plain, ours, *mean_interval(gaps))


def main(arguments: Sequence[str] | None = None) -> None:
    """Print one line per task and entry point, as JSON with --json."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.recipe", description=__doc__)
    parser.add_argument("--tasks", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--entries", nargs="+", choices=ENTRIES, default=list(ENTRIES))
    parser.add_argument("--seeds", type=positive, default=5)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    for task in given.tasks:
        for entry in given.entries:
            row = measure(task, entry, given.seeds)
            if given.json:
                print(json.dumps(asdict(row)), flush=True)
                continue
            plain, ours = (100 * sum(part) / len(part) for part in (row.plain, row.ours))
            print(
                f"{task:8} {entry:10} plain loop {plain:5.1f} %  Esper {ours:5.1f} %  "
                f"difference {row.difference:+.2f} ± {row.half_width:.2f} points"
                f"{'' if row.level else ', not level'}",
                flush=True,
            )


if __name__ == "__main__":
    main()
