"""Tasks from tasks: pure functions that keep the shape, so that members may each have their own.

Every function takes a seed and returns a new task. Training, validation and test data change alike.
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
    if task.train.inputs.dtype != torch.float32:
        raise ValueError(f"task {task.name} has tokens as inputs; permuted_inputs needs numbers")
    size = int(torch.Size(task.input_shape).numel())
    order = torch.from_numpy(np.random.default_rng(seed).permutation(size))
    return _changed(
        task,
        "inputs permuted",
        lambda split: Split(split.inputs.flatten(1)[:, order].reshape(split.inputs.shape), split.targets),
    )


def _changed(task: Task, how: str, change: Callable[[Split], Split]) -> Task:
    return replace(
        task,
        name=f"{task.name} ({how})",
        train=change(task.train),
        validation=change(task.validation),
        held_out=task.held_out.map(change),
    )
