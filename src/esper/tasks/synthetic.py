"""Tasks made from a seed: a random teacher network labels random inputs.

Any number of different tasks of one shape, for training distributions: `synthetic_task(seed=17)`.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

import numpy as np
from numpy.typing import NDArray

from esper.tasks.registry import Splits, TaskEntry, as_split, build_task, random_splits, register
from esper.tasks.task import HostSpec, Task

SYNTHETIC = TaskEntry(
    name="synthetic",
    topology="mlp",
    input_shape=(8,),
    num_classes=4,
    sizes=(4000, 1000, 1000),
    host=HostSpec("resmlp", {"width": 32, "hidden": 8, "depth": 2}),
    description="Random points labelled by a random network of two hidden layers (generated)",
    scaling="feature",
)
TEACHER_WIDTH = 8
TEACHER_GAIN = 2.0  # steep enough that classes have curved borders


@register(SYNTHETIC)
def synthetic(seed: int, fold: int | None) -> Splits:
    return _splits(seed, SYNTHETIC, TEACHER_WIDTH)


def synthetic_task(
    seed: int,
    features: int = SYNTHETIC.input_shape[0],
    num_classes: int = SYNTHETIC.num_classes,
    teacher_width: int = TEACHER_WIDTH,
    sizes: tuple[int, int, int] = SYNTHETIC.sizes,
) -> Task:
    """A task whose teacher and data follow from the seed; a wider teacher is harder to imitate."""
    given = {"features": features, "num_classes - 1": num_classes - 1, "teacher_width": teacher_width}
    small = [f"{name} = {value}" for name, value in given.items() if value < 1]
    if small:
        raise ValueError(f"a synthetic task with {', '.join(small)}; each must be at least 1")
    entry = replace(SYNTHETIC, input_shape=(features,), num_classes=num_classes, sizes=sizes)
    return build_task(entry, _splits(seed, entry, teacher_width))


def _splits(seed: int, entry: TaskEntry, teacher_width: int) -> Splits:
    generator = np.random.default_rng(seed)
    _, validation, test = entry.sizes
    inputs = generator.standard_normal((sum(entry.sizes), prod(entry.input_shape)))
    targets = _teach(generator, inputs, entry.num_classes, teacher_width)
    return random_splits(as_split(inputs, targets), seed, validation, test)


def _teach(
    generator: np.random.Generator, inputs: NDArray[np.float64], classes: int, width: int
) -> NDArray[np.int64]:
    """The class whose standardised logit is largest, so that no class is rare."""
    h = inputs
    for _ in range(2):
        weights = generator.standard_normal((h.shape[1], width)) * TEACHER_GAIN / np.sqrt(h.shape[1])
        h = np.tanh(h @ weights + generator.standard_normal(width))
    logits = h @ generator.standard_normal((width, classes))
    targets: NDArray[np.int64] = ((logits - logits.mean(0)) / logits.std(0)).argmax(1)
    return targets
