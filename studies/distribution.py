"""The tasks that a controller is trained on: made from seeds, none of them a task that it is judged on.

Signals and images are random smooth templates, one or two per class, shifted, scaled and drowned in noise;
tables are labelled by random teacher networks. Every variant draws its own templates and its own noise, so
that a controller meets easy and hard tasks, on hosts that are too small for most of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from esper.tasks.synthetic import synthetic_task
from esper.tasks.task import HostSpec, Split, Task, TestSplit

Floats = NDArray[np.float64]
SIZES = (2048, 512, 512)  # training, validation, test


@dataclass(frozen=True)
class Family:
    """Tasks of one shape with one host."""

    name: str
    host: HostSpec
    shape: tuple[int, ...]
    classes: int


FAMILIES = (
    Family("signals", HostSpec("cnn", {"width": 4, "depth": 3}), (1, 40), 10),
    Family("images", HostSpec("cnn", {"width": 4, "depth": 3}), (1, 8, 8), 10),
    Family("tables", HostSpec("mlp", {"width": 6, "depth": 3}), (16,), 12),
)


def _smooth(noise: Floats, width: int, axes: tuple[int, ...]) -> Floats:
    """Box-smoothed noise, periodic, three times over, to unit deviation."""
    for axis in axes:
        for _ in range(3):
            shifted = [np.roll(noise, k, axis=axis) for k in range(-width, width + 1)]
            noise = np.mean(shifted, axis=0)
    return noise / noise.std()


def _patterns(rng: np.random.Generator, family: Family, count: int) -> tuple[Floats, NDArray[np.int64]]:
    """Samples of a family of templates: each shifted, scaled and drowned in correlated noise."""
    space = family.shape[1:]
    axes = tuple(range(1, 1 + len(space)))
    templates_per_class = int(rng.integers(1, 3))
    templates = _smooth(rng.standard_normal((family.classes * templates_per_class, *space)), 1, axes)
    targets = rng.integers(0, family.classes, count)
    chosen = templates[targets * templates_per_class + rng.integers(0, templates_per_class, count)]
    reach = max(1, int(space[0] * rng.uniform(0.1, 0.35)))
    for axis in axes:
        shift = rng.integers(-reach, reach + 1, count)
        index = (np.arange(space[0])[None, :] + shift[:, None]) % space[0]
        shape = [count, *[1] * len(space)]
        shape[axis] = space[0]
        chosen = np.take_along_axis(chosen, np.broadcast_to(index.reshape(shape), chosen.shape), axis=axis)
    scale = rng.uniform(0.6, 1.4, (count, *[1] * len(space)))
    noise = rng.uniform(0.2, 0.6) * _smooth(rng.standard_normal(chosen.shape), 1, axes)
    return scale * chosen + noise, targets


def make_task(family: Family, seed: int) -> Task:
    """One variant of a family."""
    rng = np.random.default_rng([seed, len(family.shape), family.classes])
    if family.name == "tables":
        width = int(rng.integers(6, 20))
        task = synthetic_task(seed, family.shape[0], family.classes, teacher_width=width, sizes=SIZES)
        splits = [task.train, task.validation, task.test()]
    else:
        inputs, targets = _patterns(rng, family, sum(SIZES))
        inputs = (inputs - inputs.mean()) / inputs.std()
        x = torch.tensor(inputs, dtype=torch.float32).unsqueeze(1)
        y = torch.tensor(targets)
        bounds = np.cumsum((0, *SIZES)).tolist()
        splits = [Split(x[a:b], y[a:b]) for a, b in pairwise(bounds)]
    return Task(
        name=f"{family.name} {seed}",
        topology="mlp" if family.name == "tables" else "cnn",
        input_shape=family.shape,
        num_classes=family.classes,
        train=splits[0],
        validation=splits[1],
        held_out=TestSplit(splits[2]),
        host=family.host,
    )
