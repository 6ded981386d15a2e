"""Small images and signals: scikit-learn's digits and MNIST-1D.

MNIST-1D has signals of 40 samples, made from ten templates by shifting, scaling, shearing and noise. Training
and test data are those of the published data set (its seed is 42; ours is added to it). Validation data are
1,000 further signals, so that training keeps the published 4,000.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from esper.tasks.task import HostSpec, Splits, TaskEntry, as_split, random_splits, register
from esper.utils.errors import require
from esper.utils.streams import seeded_globals

DIGITS = TaskEntry(
    name="digits",
    topology="cnn",
    input_shape=(1, 8, 8),
    num_classes=10,
    sizes=(1197, 300, 300),
    host=HostSpec("resnet", {"width": 8, "hidden": 4, "stages": 2}),
    description="Handwritten digits, 8×8 pixels (scikit-learn)",
)


@register(DIGITS)
def digits(seed: int) -> Splits:
    from sklearn.datasets import load_digits

    images, targets = load_digits(return_X_y=True)
    return random_splits(as_split(images.reshape(-1, 1, 8, 8), targets), seed, *DIGITS.sizes[1:])


PUBLISHED_SEED = 42
VALIDATION_SEED_OFFSET = 1_000_000  # so that no seed of a run draws the test signals of another

MNIST1D = TaskEntry(
    name="mnist1d",
    topology="cnn",
    input_shape=(1, 40),
    num_classes=10,
    sizes=(4000, 1000, 1000),
    host=HostSpec("resnet", {"width": 8, "hidden": 4, "stages": 2, "kernel": 5}),
    description="Signals of 40 samples that leave room between sizes of network (mnist1d)",
    package="mnist1d",
)


@register(MNIST1D)
@lru_cache(maxsize=4)
def mnist1d(seed: int) -> Splits:
    train_size, validation_size, test_size = MNIST1D.sizes
    inputs, targets, _ = generate(PUBLISHED_SEED + seed, train_size + test_size)
    extra = generate(PUBLISHED_SEED + VALIDATION_SEED_OFFSET + seed, validation_size)
    return Splits(
        as_split(inputs[:train_size], targets[:train_size]),
        as_split(*extra[:2]),
        as_split(inputs[train_size:], targets[train_size:]),
    )


def generate(seed: int, samples: int) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.int64]]:
    """Generate signals as the package does, without its scaling by statistics of the test data."""
    data = require("mnist1d.data", "data", f"task {MNIST1D.name}")
    arguments = data.get_dataset_args()
    templates = data.get_templates()
    per_class = samples // len(templates["y"])
    targets = np.repeat(templates["y"], per_class)
    # The same draws in the same order as the package, so that the data are the published ones.
    with seeded_globals(seed):
        signals = np.stack(
            [data.transform(templates["x"][label], templates["t"], arguments)[0] for label in targets]
        )
        shuffle = np.random.permutation(len(targets))  # noqa: NPY002 - the package draws from the global state
        order = np.random.permutation(arguments.final_seq_length)  # noqa: NPY002
    return signals[shuffle][:, None, :], targets[shuffle], order
