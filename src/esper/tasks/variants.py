"""Tasks from tasks: pure functions that keep the shape, so that members may each have their own.

Every function takes a seed and returns a new task. Training, validation and test data change alike, and the
test split changes behind its door, unread; what changes training alone says so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from esper.tasks.task import Split, Task


def class_subset(task: Task, num_kept: int, seed: int) -> Task:
    """A random set of classes. Sizes, labels and number of outputs stay: the samples left are repeated."""
    if task.train.targets.ndim != 1:
        raise ValueError(f"task {task.name} has a target per position; class_subset needs one per sample")
    if not 2 <= num_kept <= task.num_classes:
        raise ValueError(f"num_kept is {num_kept}; task {task.name} allows 2 to {task.num_classes} classes")
    kept = torch.from_numpy(np.random.default_rng(seed).permutation(task.num_classes)[:num_kept].copy())

    def choose(split: Split) -> Split:
        fitting = torch.isin(split.targets, kept).nonzero().squeeze(1)
        if not len(fitting):
            raise ValueError(
                f"task {task.name} has no sample of the classes {sorted(kept.tolist())} in a split of "
                f"{len(split)}; keep more classes"
            )
        return split.subset(fitting[torch.arange(len(split)) % len(fitting)])

    return _changed(task, f"{num_kept} classes", choose)


def permuted_labels(task: Task, seed: int) -> Task:
    """The same task with its classes renamed."""
    order = torch.from_numpy(np.random.default_rng(seed).permutation(task.num_classes))
    return _changed(task, "labels permuted", lambda split: Split(split.inputs, order[split.targets]))


def permuted_inputs(task: Task, seed: int) -> Task:
    """The same task with the elements of every sample in one random order."""
    _need_numbers(task, "permuted_inputs")
    size = int(torch.Size(task.input_shape).numel())
    order = torch.from_numpy(np.random.default_rng(seed).permutation(size))
    return _changed(
        task,
        "inputs permuted",
        lambda split: Split(split.inputs.flatten(1)[:, order].reshape(split.inputs.shape), split.targets),
    )


def input_noise(task: Task, deviation: float, seed: int) -> Task:
    """Fixed normal noise on every input. Inputs are standardised: a deviation of 1 doubles their variance."""
    _need_numbers(task, "input_noise")
    if deviation < 0:
        raise ValueError(f"deviation is {deviation}; it must be at least 0")
    seeds = iter(np.random.SeedSequence(seed).spawn(3))

    def adder() -> Callable[[Split], Split]:
        own = next(seeds)

        def add(split: Split) -> Split:
            noise = np.random.default_rng(own).standard_normal(split.inputs.shape, dtype=np.float32)
            return Split(split.inputs + deviation * torch.from_numpy(noise), split.targets)

        return add

    return replace(
        task,
        name=f"{task.name} (noise {deviation:g})",
        train=adder()(task.train),
        validation=adder()(task.validation),
        held_out=task.held_out.transformed(adder()),
    )


def label_noise(task: Task, share: float, seed: int) -> Task:
    """This share of the training labels, and no others, drawn anew at random."""
    if not 0 <= share <= 1:
        raise ValueError(f"share is {share}; it lies between 0 and 1")
    generator = np.random.default_rng(seed)
    shape = tuple(task.train.targets.shape)
    wrong = torch.from_numpy(generator.random(shape) < share)
    drawn = torch.from_numpy(generator.integers(task.num_classes, size=shape))
    targets = torch.where(wrong, drawn, task.train.targets)
    train = Split(task.train.inputs, targets)
    return replace(task, name=f"{task.name} (labels {share:g} wrong)", train=train)


def training_subset(task: Task, size: int, seed: int) -> Task:
    """A random part of the training data; validation and test data stay."""
    if not 1 <= size <= len(task.train):
        raise ValueError(f"size is {size}; task {task.name} has {len(task.train)} training samples")
    chosen = torch.from_numpy(np.random.default_rng(seed).permutation(len(task.train))[:size].copy())
    name = f"{task.name} ({size} samples)"
    return replace(task, name=name, train=task.train.subset(chosen))


def _need_numbers(task: Task, what: str) -> None:
    if task.train.inputs.dtype != torch.float32:
        raise ValueError(f"task {task.name} has tokens as inputs; {what} needs numbers")


def _changed(task: Task, how: str, change: Callable[[Split], Split]) -> Task:
    return replace(
        task,
        name=f"{task.name} ({how})",
        train=change(task.train),
        validation=change(task.validation),
        held_out=task.held_out.transformed(change),
    )
