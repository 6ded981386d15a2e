"""What is drawn: made tasks with label noise, hosts of a ladder, budgets, learning rates.

A cell is one task with a host, a budget and an initial learning rate. The cells of a group share the family,
the host and the budget, so that all their networks train as one population; each has a task of its own.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property
from typing import Any

import numpy as np
import torch

from esper.tasks.task import Split, Task
from studies.growth.environments import unit_of
from studies.growth.families import FAMILIES, Family, make_task
from studies.growth.ladders import SIZES, with_size

BUDGETS = (0.25, 64.0)  # times what the smallest host spends in 192 minibatches of 128
RATES = (0.1, 10.0)  # times the recipe's learning rate
SAMPLES = (300, 60_000)  # to train on
NOISE = 0.4  # at most this share of the labels is drawn anew
VALIDATION, TEST = 512, 2048  # samples; the test split has two halves
BATCH = 64
EPOCHS = 48  # measurements in a run, at least; one for each update where there are fewer updates
LEAST_UPDATES = 40  # a budget that pays for fewer is drawn again
TASK_SEEDS = 1_000_000  # from here on: tasks that no controller is trained on


@dataclass(frozen=True)
class Scale:
    """The ranges of a draw; the defaults are those of the whole study."""

    families: tuple[str, ...] = tuple(family.name for family in FAMILIES)
    cells: int = 8  # of a group
    budgets: tuple[float, float] = BUDGETS
    samples: tuple[int, int] = SAMPLES
    sizes: int = SIZES
    test: int = TEST
    epochs: int = EPOCHS


QUICK = Scale(families=("tables",), cells=3, budgets=(0.25, 0.5), samples=(300, 3000), test=1024, epochs=20)


@dataclass(frozen=True)
class Cell:
    """One draw."""

    family: str
    size: int  # of the ladder
    budget: float  # in units
    updates: int  # minibatches that the budget pays for as long as nothing grows
    task: int  # seed
    samples: int
    noise: float
    rate: float  # times the recipe's


@dataclass(frozen=True)
class Group:
    """Cells that train as one population."""

    index: int
    cells: tuple[Cell, ...]
    epochs: int
    batches: int  # of an epoch
    test: int

    @property
    def family(self) -> Family:
        return family_named(self.cells[0].family)

    @cached_property
    def tasks(self) -> tuple[Task, ...]:
        """One task for each cell, all of one shape: short training splits are repeated to the longest."""
        longest = max(BATCH, *(cell.samples for cell in self.cells))
        return tuple(_task_of(cell, self.family, longest, self.test) for cell in self.cells)

    def facts(self, cell: int) -> dict[str, Any]:
        """What the record of a cell says about its draw."""
        task = self.tasks[cell]
        return {
            "group": self.index,
            "name": task.name,
            "classes": task.num_classes,
            **asdict(self.cells[cell]),
        }


def family_named(name: str) -> Family:
    """Return a family of made tasks."""
    return next(family for family in FAMILIES if family.name == name)


def draw_group(index: int, scale: Scale | None = None, seed: int = 0) -> Group:
    """Draw a group; families take turns, the rest is random by (seed, index)."""
    scale = scale or Scale()
    rng = np.random.default_rng([seed, index])
    name = scale.families[index % len(scale.families)]
    unit, _ = _costs(name, 0)
    while True:
        size, budget = int(rng.integers(scale.sizes)), _log_uniform(rng, *scale.budgets)
        _, forward = _costs(name, size)
        updates = round(budget * unit / (3.0 * BATCH * forward))  # forward and backward are three passes
        if updates >= LEAST_UPDATES:
            break
    batches = max(1, updates // scale.epochs)
    epochs = round(updates / batches)
    cells = tuple(
        Cell(
            family=name,
            size=size,
            budget=round(budget, 4),
            updates=epochs * batches,
            task=TASK_SEEDS + 1000 * index + k,
            samples=round(_log_uniform(rng, *scale.samples)),
            noise=round(float(rng.uniform(0, NOISE)), 4),
            rate=round(_log_uniform(rng, *RATES), 4),
        )
        for k in range(scale.cells)
    )
    return Group(index, cells, epochs, batches, scale.test)


@cache
def _costs(name: str, size: int) -> tuple[float, float]:
    """The unit of budget if this were the smallest host, and the forward FLOPs of a sample."""
    family = family_named(name)
    return unit_of(with_size(make_task(replace(family, sizes=(64, 64, 64)), 0), size))


def _log_uniform(rng: np.random.Generator, low: float, high: float) -> float:
    return float(np.exp(rng.uniform(np.log(low), np.log(high))))


def _task_of(cell: Cell, family: Family, longest: int, test: int) -> Task:
    """Make the task of a cell with its host; labels of the test split stay as they are."""
    made = with_size(make_task(replace(family, sizes=(cell.samples, VALIDATION, test)), cell.task), cell.size)
    draw = torch.Generator().manual_seed(cell.task)
    train, validation = (
        with_noise(split, cell.noise, made.num_classes, draw) for split in (made.train, made.validation)
    )
    return replace(made, train=train.subset(torch.arange(longest) % len(train)), validation=validation)


def with_noise(split: Split, share: float, classes: int, draw: torch.Generator) -> Split:
    """Draw a share of the labels anew among all classes."""
    anew = torch.rand(split.targets.shape, generator=draw) < share
    random = torch.randint(classes, split.targets.shape, generator=draw)
    return Split(split.inputs, torch.where(anew, random, split.targets))
