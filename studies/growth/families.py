"""The tasks that a controller is trained on: made from seeds, none of them a task that it is judged on.

A family is a shape of data with one host; its variants are of several kinds, dealt in turn, so that a
controller meets neighbours that belong together and shuffled ones, tasks on which growth pays much, little
or nothing at all. Every variant draws its own templates, teachers and noise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from esper.tasks.task import HostSpec, Split, Task, TestSplit
from studies.growth.variants import class_subset, permuted_inputs

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Samples = tuple[NDArray[np.float64] | Ints, Ints]  # inputs [M, *shape] and targets [M] or [M, T]
TASKS_PER_FAMILY = 32
SIZES = (6144, 512, 512)  # training, validation, test


@dataclass(frozen=True)
class Family:
    """Tasks of one shape with one host. `kinds` are dealt to the variants in turn."""

    name: str
    host: HostSpec
    shape: tuple[int, ...]
    classes: int
    kinds: tuple[str, ...]
    topology: str
    sizes: tuple[int, int, int] = SIZES  # samples to train on, to validate, to test


# ---- signals and images: templates, shifted, scaled and drowned in noise -------------------------------


def _smooth(noise: Floats, width: int, axes: tuple[int, ...]) -> Floats:
    """Box-smoothed noise, periodic, three times over, to unit deviation."""
    for axis in axes:
        for _ in range(3):
            shifted = [np.roll(noise, k, axis=axis) for k in range(-width, width + 1)]
            noise = np.mean(shifted, axis=0)
    smooth: Floats = noise / noise.std()
    return smooth


def patterns(rng: np.random.Generator, family: Family) -> Samples:
    """One or two random smooth templates per class: each shifted, scaled and drowned in correlated noise."""
    count, space = sum(family.sizes), family.shape[1:]
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
    inputs = scale * chosen + noise
    return ((inputs - inputs.mean()) / inputs.std())[:, None], targets


def hopeless(rng: np.random.Generator, family: Family) -> Samples:
    """Patterns whose classes mean nothing: whatever grows only costs."""
    inputs, targets = patterns(rng, family)
    return inputs, rng.permutation(targets)


# ---- tables: points with labels ------------------------------------------------------------------------


def _likeliest(logits: Floats) -> Ints:
    """The class whose standardised logit is largest, so that no class is rare.  # [M, C] → [M]"""
    labels: Ints = ((logits - logits.mean(0)) / logits.std(0)).argmax(1)
    return labels


def waves(rng: np.random.Generator, family: Family) -> Samples:
    """Classes that fold over and over along two or three hidden directions: depth helps."""
    points = rng.standard_normal((sum(family.sizes), family.shape[0]))
    directions = rng.standard_normal((family.shape[0], int(rng.integers(2, 4)))) / np.sqrt(family.shape[0])
    hidden = points @ directions
    mixing = rng.uniform(1.5, 3.0) * rng.standard_normal((hidden.shape[1], 12))
    folded = np.sin(hidden @ mixing + rng.uniform(0, 2 * np.pi, 12))
    return points, _likeliest(folded @ rng.standard_normal((12, family.classes)))


def clusters(rng: np.random.Generator, family: Family) -> Samples:
    """Several clouds of points per class."""
    count, clouds = sum(family.sizes), int(rng.integers(2, 6))
    centres = rng.standard_normal((family.classes * clouds, family.shape[0]))
    targets = rng.integers(0, family.classes, count)
    spread = rng.uniform(0.4, 0.8) * rng.standard_normal((count, family.shape[0]))
    points = centres[targets * clouds + rng.integers(0, clouds, count)] + spread
    return (points - points.mean(0)) / points.std(0), targets


def teacher(rng: np.random.Generator, family: Family) -> Samples:
    """Points labelled by a random network of two hidden layers: hosts of any depth imitate it alike."""
    points = rng.standard_normal((sum(family.sizes), family.shape[0]))
    hidden, width = points, int(rng.integers(6, 20))
    for _ in range(2):
        weights = rng.standard_normal((hidden.shape[1], width)) * 2.0 / np.sqrt(hidden.shape[1])
        hidden = np.tanh(hidden @ weights + rng.standard_normal(width))
    return points, _likeliest(hidden @ rng.standard_normal((width, family.classes)))


# ---- tokens: the next one follows from two before it ---------------------------------------------------


def grammar(rng: np.random.Generator, family: Family) -> Samples:
    """Sequences whose next token follows, mostly, from the last token and one further back."""
    count, (time,), vocabulary = sum(family.sizes), family.shape, family.classes
    lag = int(rng.integers(1, 6))  # 1: the last token tells everything that can be told
    follows = rng.integers(0, vocabulary, (vocabulary, vocabulary))
    tokens = rng.integers(0, vocabulary, (count, time + 1))
    obeys = rng.random(tokens.shape) < rng.uniform(0.7, 0.95)
    for t in range(lag, time + 1):
        told = follows[tokens[:, t - 1], tokens[:, t - lag]]
        tokens[:, t] = np.where(obeys[:, t], told, tokens[:, t])
    return tokens[:, :-1], tokens[:, 1:]


KINDS: dict[str, Callable[[np.random.Generator, Family], Samples]] = {
    "patterns": patterns,
    "shuffled": patterns,  # then the positions of every sample in one random order
    "few classes": patterns,  # then three of them: less is left to gain
    "hopeless": hopeless,
    "waves": waves,
    "clusters": clusters,
    "teacher": teacher,
    "grammar": grammar,
}
AFTERWARDS: dict[str, Callable[[Task, int], Task]] = {
    "shuffled": permuted_inputs,
    "few classes": lambda task, seed: class_subset(task, 3, seed),
}

_PATTERNS = ("patterns", "shuffled", "patterns", "few classes", "patterns", "hopeless")
_HOSTS = {
    "resnet": {"width": 8, "hidden": 4, "stages": 2},
    "resmlp": {"width": 32, "hidden": 8, "depth": 2},
    "gpt": {"width": 32, "heads": 4, "expansion": 2},
}
FAMILIES = (  # neither a shape nor a number of classes is that of a task on which controllers are judged
    Family("signals", HostSpec("resnet", {**_HOSTS["resnet"], "kernel": 5}), (1, 32), 8, _PATTERNS, "cnn"),
    Family("images", HostSpec("resnet", _HOSTS["resnet"]), (1, 7, 7), 8, _PATTERNS, "cnn"),
    Family(
        "tables",
        HostSpec("resmlp", _HOSTS["resmlp"]),
        (12,),
        9,
        ("waves", "clusters", "waves", "teacher"),
        "mlp",
    ),
    Family("tokens", HostSpec("gpt", _HOSTS["gpt"]), (20,), 12, ("grammar",), "transformer"),
)


def make_tasks(family: Family, seed: int = 0, count: int = TASKS_PER_FAMILY) -> list[Task]:
    """The variants that the members of an environment share; another seed makes others."""
    return [make_task(family, seed * count + k) for k in range(count)]


signals, images, tables, tokens = (partial(make_tasks, family) for family in FAMILIES)  # for `task:` of a run


def make_task(family: Family, seed: int) -> Task:
    """One variant of a family."""
    kind = family.kinds[seed % len(family.kinds)]
    rng = np.random.default_rng([seed, len(family.shape), family.classes])
    inputs, targets = KINDS[kind](rng, family)
    x = torch.from_numpy(inputs) if inputs.dtype == np.int64 else torch.tensor(inputs, dtype=torch.float32)
    y = torch.from_numpy(targets)
    bounds = np.cumsum((0, *family.sizes)).tolist()
    train, validation, test = (Split(x[a:b], y[a:b]) for a, b in pairwise(bounds))
    task = Task(
        name=f"{family.name} {seed} ({kind})",
        topology=family.topology,
        input_shape=family.shape,
        num_classes=family.classes,
        train=train,
        validation=validation,
        held_out=TestSplit(test),
        host=family.host,
    )
    return AFTERWARDS[kind](task, seed) if kind in AFTERWARDS else task
