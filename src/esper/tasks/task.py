"""A task: data in three splits, and a host that is deliberately too small for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Self

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class HostSpec:
    """A host by name: `build_host(spec.preset, task.input_shape, task.num_classes, **spec.options)`."""

    preset: str
    options: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))

    def __str__(self) -> str:
        return f"{self.preset}({', '.join(f'{name}={value}' for name, value in self.options.items())})"


class Standardise(nn.Module):
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
            raise ValueError(
                f"{len(self.inputs)} inputs with {len(self.targets)} targets; give one target per input"
            )
        if self.targets.dtype != torch.long or self.inputs.dtype not in (torch.float32, torch.long):
            raise ValueError(
                f"inputs are {self.inputs.dtype} and targets {self.targets.dtype}; expected float32 (or "
                "int64 tokens) and int64: convert with .float() and .long()"
            )

    def __len__(self) -> int:
        return len(self.inputs)

    def subset(self, indices: Tensor) -> Self:
        """The chosen samples, in the given order.  # indices [K] int64"""
        return type(self)(self.inputs[indices], self.targets[indices])

    def to(self, device: torch.device | str) -> Split:
        return Split(self.inputs.to(device), self.targets.to(device))


class TestSplit:
    """The test split behind a door that counts: nothing but the final report goes through it."""

    __test__ = False  # pytest: not a test case

    def __init__(self, split: Split, transform: Callable[[Split], Split] | None = None) -> None:
        self._split = split
        self._transform = transform
        self.reads = 0

    def __len__(self) -> int:
        return len(self._split)

    def read(self) -> Split:
        self.reads += 1
        return self._transform(self._split) if self._transform else self._split

    def transformed(self, transform: Callable[[Split], Split]) -> TestSplit:
        """The same door with a change that happens when it is opened; its count starts at 0."""
        before = self._transform
        return TestSplit(self._split, transform if before is None else lambda split: transform(before(split)))

    def __repr__(self) -> str:
        return f"TestSplit({len(self)} samples, read {self.reads} times)"


@dataclass(frozen=True)
class Task:
    """Everything that a run needs to know about its data."""

    name: str
    topology: str
    input_shape: tuple[int, ...]
    num_classes: int
    train: Split
    validation: Split
    held_out: TestSplit
    host: HostSpec
    description: str = ""
    standardise: Standardise | None = None  # what was done to the inputs of every split; None is nothing

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

    @property
    def chance(self) -> float:
        """The share of the most common class in the validation split."""
        counts = torch.bincount(self.validation.targets.flatten(), minlength=self.num_classes)
        return float(counts.max()) / float(counts.sum())

    def test(self) -> Split:
        """The test split. Every call is counted: only a final report may ask."""
        return self.held_out.read()

    @property
    def test_reads(self) -> int:
        """How often the test split has been read."""
        return self.held_out.reads
