"""Tasks generated from a seed: two spirals, and random inputs labelled by a random teacher network."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from esper.tasks.task import HostSpec, Splits, Task, TaskEntry, as_split, build_task, random_splits, register

TURNS = 3.0
NOISE = 0.02  # deviation of the points from their spiral
TEACHER_WIDTH = 8
TABLES = 48  # tasks of `tables`
TEACHER_GAIN = 2.0  # steep enough that classes have curved borders

SPIRALS = TaskEntry(
    name="spirals",
    topology="mlp",
    input_shape=(2,),
    num_classes=2,
    sizes=(1000, 500, 500),
    host=HostSpec("resmlp", {"width": 32, "hidden": 8, "depth": 2}),
    description="Two interleaved spirals in the plane (generated)",
    scaling="feature",
)
SYNTHETIC = replace(
    SPIRALS,
    name="synthetic",
    input_shape=(8,),
    num_classes=4,
    sizes=(4000, 1000, 1000),
    description="Random points labelled by a random network of two hidden layers (generated)",
)


@register(SPIRALS)
def spirals(seed: int) -> Splits:
    generator = np.random.default_rng(seed)
    samples = sum(SPIRALS.sizes)
    targets = np.arange(samples) % 2
    # The root spreads points evenly over the disc; else most would lie in the middle.
    radius = np.sqrt(generator.uniform(0.01, 1.0, samples))
    angle = 2 * np.pi * TURNS * radius + np.pi * targets
    points = radius[:, None] * np.stack([np.cos(angle), np.sin(angle)], axis=1)
    points = points + NOISE * generator.standard_normal(points.shape)
    return random_splits(as_split(points, targets), seed, *SPIRALS.sizes[1:])


@register(SYNTHETIC)
def synthetic(seed: int) -> Splits:
    generator = np.random.default_rng(seed)
    inputs = generator.standard_normal((sum(SYNTHETIC.sizes), *SYNTHETIC.input_shape))
    targets = _label(generator, inputs, SYNTHETIC.num_classes)
    return random_splits(as_split(inputs, targets), seed, *SYNTHETIC.sizes[1:])


def tables(seed: int) -> list[Task]:
    """Make tasks of one shape, each with a labelling network of its own: task=esper.tasks.synthetic:tables"""
    return [build_task(SYNTHETIC, synthetic(TABLES * (seed + 1) + k)) for k in range(TABLES)]


def _label(generator: np.random.Generator, inputs: NDArray[np.float64], classes: int) -> NDArray[np.int64]:
    """Return the class whose standardized logit is largest, so that no class is rare."""
    h = inputs
    for _ in range(2):
        weights = generator.standard_normal((h.shape[1], TEACHER_WIDTH)) * TEACHER_GAIN / np.sqrt(h.shape[1])
        h = np.tanh(h @ weights + generator.standard_normal(TEACHER_WIDTH))
    logits = h @ generator.standard_normal((TEACHER_WIDTH, classes))
    return ((logits - logits.mean(0)) / logits.std(0)).argmax(1)
