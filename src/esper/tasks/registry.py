"""The registry of tasks, and what every task goes through: loading, splitting, standardising, checking."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from esper.tasks.task import HostSpec, Split, Standardise, Task, TestSplit

Scaling = Literal["feature", "channel", "none"]


@dataclass(frozen=True)
class Splits:
    """The raw data of a task, before it is standardised."""

    train: Split
    validation: Split
    test: Split


@dataclass(frozen=True)
class TaskEntry:
    """What is known about a task before its data are loaded; loading checks it."""

    name: str
    topology: str
    input_shape: tuple[int, ...]
    num_classes: int
    sizes: tuple[int, int, int]  # to train on, to validate, to test; of fold 0 where there are folds
    host: HostSpec
    description: str
    scaling: Scaling = "channel"
    package: str | None = None  # needed beyond the core, from the extra "data"
    folds: int = 0  # 0: the task has none, and its seed decides the splits

    @property
    def installed(self) -> bool:
        """Whether its data can be loaded here."""
        return self.package is None or importlib.util.find_spec(self.package) is not None


Loader = Callable[[int, int | None], Splits]

_REGISTRY: dict[str, tuple[TaskEntry, Loader]] = {}


def register(entry: TaskEntry) -> Callable[[Loader], Loader]:
    """Register a function (seed, fold) → Splits as the loader of a task."""

    def decorate(loader: Loader) -> Loader:
        _REGISTRY[entry.name] = (entry, loader)
        return loader

    return decorate


def task_names() -> tuple[str, ...]:
    return tuple(_REGISTRY)


def load_task(name: str, seed: int = 0, fold: int | None = None) -> Task:
    """A registered task. The seed decides the splits, or the data where they are generated.

    `fold` chooses one of the published folds of a table; without it, fold 0.
    """
    if name not in _REGISTRY:
        raise ValueError(f"task is {name!r}; allowed are {', '.join(task_names())}")
    entry, loader = _REGISTRY[name]
    if fold is not None and not 0 <= fold < entry.folds:
        allowed = f"allowed are 0 to {entry.folds - 1}" if entry.folds else "it has no folds: leave fold out"
        raise ValueError(f"fold is {fold} for task {name}; {allowed}")
    if seed < 0:
        raise ValueError(f"seed is {seed} for task {name}; it must be at least 0")
    return build_task(entry, loader(seed, fold))


def build_task(entry: TaskEntry, splits: Splits) -> Task:
    """Standardise the splits by the training split alone and put the task together."""
    standardise = _standardise(splits.train.inputs, entry.scaling)

    def scale(split: Split) -> Split:
        return split if standardise is None else Split(standardise(split.inputs), split.targets)

    return Task(
        name=entry.name,
        topology=entry.topology,
        input_shape=entry.input_shape,
        num_classes=entry.num_classes,
        train=scale(splits.train),
        validation=scale(splits.validation),
        held_out=TestSplit(scale(splits.test)),
        host=entry.host,
        description=entry.description,
        standardise=standardise,
    )


def _standardise(inputs: Tensor, scaling: Scaling) -> Standardise | None:
    """Mean 0 and deviation 1 over these inputs, for each feature or each channel; constants become 0."""
    if scaling == "none":
        return None
    axes = (0,) if scaling == "feature" else (0, *range(2, inputs.ndim))
    mean = inputs.mean(axes, keepdim=True)
    deviation = inputs.std(axes, correction=0, keepdim=True)
    return Standardise(mean, torch.where(deviation > 0, deviation, 1.0))


def random_splits(split: Split, seed: int, validation: int, test: int) -> Splits:
    """Shuffle by the seed and cut off `validation` and `test` samples; the rest is for training."""
    if validation + test >= len(split):
        raise ValueError(
            f"{len(split)} samples cannot give {validation} for validation and {test} for testing; "
            "the rest would be nothing to train on: give more data"
        )
    order = torch.from_numpy(np.random.default_rng(seed).permutation(len(split)))
    test_part, validation_part, train_part = order.tensor_split([test, test + validation])
    return Splits(split.subset(train_part), split.subset(validation_part), split.subset(test_part))


def as_split(inputs: Any, targets: Any) -> Split:
    """Arrays as a split of float32 inputs and int64 targets."""
    return Split(
        torch.from_numpy(np.asarray(inputs, np.float32)), torch.from_numpy(np.asarray(targets, np.int64))
    )


def task_table() -> list[TaskEntry]:
    """Every task with its sizes and its host; loads no data."""
    return [entry for entry, _ in _REGISTRY.values()]
