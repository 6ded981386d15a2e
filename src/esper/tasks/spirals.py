"""Two interleaved spirals in the plane: tiny, and hard for a narrow network."""

from __future__ import annotations

import numpy as np

from esper.tasks.registry import Splits, TaskEntry, as_split, random_splits, register
from esper.tasks.task import HostSpec

TURNS = 3.0
NOISE = 0.02

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


@register(SPIRALS)
def spirals(seed: int, fold: int | None) -> Splits:
    generator = np.random.default_rng(seed)
    _, validation, test = SPIRALS.sizes
    samples = sum(SPIRALS.sizes)
    targets = np.arange(samples) % 2
    radius = np.sqrt(generator.uniform(0.01, 1.0, samples))
    angle = 2 * np.pi * TURNS * radius + np.pi * targets
    points = radius[:, None] * np.stack([np.cos(angle), np.sin(angle)], axis=1)
    points = points + NOISE * generator.standard_normal(points.shape)
    return random_splits(as_split(points, targets), seed, validation, test)
