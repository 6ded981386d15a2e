"""Tasks: data in three splits, each with a host too small for it on purpose, and their registry."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, Self

import numpy as np
import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class HostSpec:
    """A host by name: `build_host(spec.preset, task.input_shape, task.num_classes, **spec.options)`."""

    preset: str
    options: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))

    def __str__(self) -> str:
        return f"{self.preset}({', '.join(f'{name}={value}' for name, value in self.options.items())})"


class Standardize(nn.Module):
    """(inputs − mean) / deviation, as a layer, so that a network can carry it.  # broadcast over [B, ...]"""

    mean: Tensor
    deviation: Tensor

    def __init__(self, mean: Tensor, deviation: Tensor) -> None:
        super().__init__()
        self.register_buffer("mean", mean)
        self.register_buffer("deviation", deviation)

    def forward(self, inputs: Tensor) -> Tensor:
        return (inputs - self.mean) / self.deviation


@dataclass(frozen=True)
class Split:
    """Inputs [M, *input_shape] (float32, or int64 tokens) and targets [M] or, for text, [M, T] (int64)."""

    inputs: Tensor = field(repr=False)
    targets: Tensor = field(repr=False)

    def __post_init__(self) -> None:
        if len(self.inputs) != len(self.targets):
            raise ValueError(f"{len(self.inputs)} inputs with {len(self.targets)} targets; give one for each")
        if self.targets.dtype != torch.long or self.inputs.dtype not in (torch.float32, torch.long):
            raise ValueError(
                f"inputs are {self.inputs.dtype} and targets {self.targets.dtype}; expected float32 (or "
                "int64 tokens) and int64: convert with .float() and .long()"
            )

    def __len__(self) -> int:
        return len(self.inputs)

    def subset(self, indices: Tensor) -> Self:
        """Return the chosen samples, in the given order.  # indices [K] int64"""
        return type(self)(self.inputs[indices], self.targets[indices])

    def to(self, device: torch.device | str) -> Split:
        return Split(self.inputs.to(device), self.targets.to(device))


class TestSplit:
    """The test split, which counts how often it is read: only a final report may read it."""

    __test__ = False  # pytest: not a test case

    def __init__(self, split: Split) -> None:
        self._split = split
        self.reads = 0

    def __len__(self) -> int:
        return len(self._split)

    def read(self) -> Split:
        """Return the samples, and count it."""
        self.reads += 1
        return self._split

    def map(self, change: Callable[[Split], Split]) -> TestSplit:
        """Return a changed test split that nobody has read yet."""
        return TestSplit(change(self._split))


@dataclass(frozen=True)
class Task:
    """The data of a run and the host that belongs to it; raises ValueError where they do not fit together."""

    name: str
    topology: str
    input_shape: tuple[int, ...]
    num_classes: int
    train: Split
    validation: Split
    held_out: TestSplit
    host: HostSpec
    description: str = ""
    standardize: Standardize | None = None  # what was done to the inputs of every split; None is nothing

    def __post_init__(self) -> None:
        for name, split, per_class in (("training", self.train, 2), ("validation", self.validation, 1)):
            needed = per_class * self.num_classes
            if split.targets.numel() < needed:
                raise ValueError(
                    f"task {self.name} has {split.targets.numel()} {name} samples for "
                    f"{self.num_classes} classes; at least {needed} are needed: give more data"
                )
            if tuple(split.inputs.shape[1:]) != self.input_shape:
                raise ValueError(
                    f"task {self.name} declares input_shape {list(self.input_shape)} but its {name} inputs "
                    f"have {list(split.inputs.shape[1:])}; make them equal"
                )
            low, high = int(split.targets.min()), int(split.targets.max())
            if low < 0 or high >= self.num_classes:
                raise ValueError(
                    f"task {self.name} has {name} targets from {low} to {high}; with {self.num_classes} "
                    f"classes they run from 0 to {self.num_classes - 1}"
                )
        if len(self.held_out) < 1:
            raise ValueError(f"task {self.name} has no test samples; at least 1 is needed")

    def test(self) -> Split:
        """Return the test split. Every call is counted: only a final report may read it."""
        return self.held_out.read()


Scaling = Literal["feature", "channel", "none"]


@dataclass(frozen=True)
class Splits:
    """The raw data of a task, before they are standardized."""

    train: Split
    validation: Split
    test: Split


@dataclass(frozen=True)
class TaskEntry:
    """The description of a task, known before its data are loaded."""

    name: str
    topology: str
    input_shape: tuple[int, ...]
    num_classes: int
    sizes: tuple[int, int, int]  # to train on, to validate, to test
    host: HostSpec
    description: str
    scaling: Scaling = "channel"
    package: str | None = None  # needed beyond the core, from the extra "data"

    @property
    def installed(self) -> bool:
        """Whether its data can be loaded here."""
        return self.package is None or importlib.util.find_spec(self.package) is not None


Loader = Callable[[int], Splits]

_REGISTRY: dict[str, tuple[TaskEntry, Loader]] = {}


def register(entry: TaskEntry) -> Callable[[Loader], Loader]:
    """Register a function seed → Splits as the loader of a task."""

    def decorate(loader: Loader) -> Loader:
        _REGISTRY[entry.name] = (entry, loader)
        return loader

    return decorate


def task_names() -> tuple[str, ...]:
    return tuple(_REGISTRY)


def load_task(name: str, seed: int = 0) -> Task:
    """Load a registered task. The seed decides the splits, or the data where they are generated.

    Raises ValueError for an unknown name.
    """
    if name not in _REGISTRY:
        raise ValueError(f"task is {name!r}; allowed are {', '.join(task_names())}")
    entry, loader = _REGISTRY[name]
    return build_task(entry, loader(seed))


def build_task(entry: TaskEntry, splits: Splits) -> Task:
    """Standardize the splits by the training split alone, so that no other leaks, and build the task."""
    standardize = _standardize(splits.train.inputs, entry.scaling)

    def scale(split: Split) -> Split:
        return split if standardize is None else Split(standardize(split.inputs), split.targets)

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
        standardize=standardize,
    )


def _standardize(inputs: Tensor, scaling: Scaling) -> Standardize | None:
    """Return a layer to mean 0 and deviation 1 by feature or by channel; constant features become 0."""
    if scaling == "none":
        return None
    axes = (0,) if scaling == "feature" else (0, *range(2, inputs.ndim))
    mean = inputs.mean(axes, keepdim=True)
    deviation = inputs.std(axes, correction=0, keepdim=True)
    # A constant feature has deviation 0 and would become NaN.
    return Standardize(mean, torch.where(deviation > 0, deviation, 1.0))


def random_splits(split: Split, seed: int, validation: int, test: int) -> Splits:
    """Shuffle by the seed and cut off `validation` and `test` samples; the rest is for training."""
    order = torch.from_numpy(np.random.default_rng(seed).permutation(len(split)))
    test_part, validation_part, train_part = order.tensor_split([test, test + validation])
    return Splits(split.subset(train_part), split.subset(validation_part), split.subset(test_part))


def as_split(inputs: Any, targets: Any) -> Split:
    """Convert arrays to a split of float32 inputs and int64 targets."""
    return Split(
        torch.from_numpy(np.asarray(inputs, np.float32)), torch.from_numpy(np.asarray(targets, np.int64))
    )


def task_table() -> list[TaskEntry]:
    """List every task with its sizes and its host, without loading data."""
    return [entry for entry, _ in _REGISTRY.values()]
