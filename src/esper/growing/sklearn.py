"""Growing perceptrons with the manners of scikit-learn.

classifier = GrowingClassifier(epochs=30).fit(X, y)
classifier.score(X_test, y_test)
print(classifier.grown_.report())
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, column_or_1d, validate_data
from torch import Tensor, nn

from esper.growing.api import grow
from esper.growing.result import Grown

Array = NDArray[Any]
FEWEST_TO_SPLIT = 20  # with fewer samples, validation looks at the training data
_SEEDS = 2**31 - 1


class _Growing(BaseEstimator):  # type: ignore[misc]
    """A perceptron that grows while it is fitted."""

    grown_: Grown

    def __init__(
        self,
        hidden_layer_sizes: Sequence[int] = (16, 16),
        epochs: int = 30,
        budget: int | None = None,
        controller: Any = "heuristic",
        lr: float = 1e-2,
        batch_size: int = 32,
        validation_fraction: float = 0.2,
        random_state: Any = None,
        device: str = "cpu",
    ):
        self.hidden_layer_sizes = hidden_layer_sizes
        self.epochs = epochs
        self.budget = budget
        self.controller = controller
        self.lr = lr
        self.batch_size = batch_size
        self.validation_fraction = validation_fraction
        self.random_state = random_state
        self.device = device

    def _grow(self, x: Array, targets: Tensor, outputs: int) -> None:
        """Fit on standardised inputs; x [n, features], targets [n] or [n, 1]."""
        random = check_random_state(self.random_state)
        self.mean_ = x.mean(axis=0)
        deviation = x.std(axis=0)
        self.scale_ = np.where(deviation > 0, deviation, 1.0)
        inputs = self._scaled(x)
        order = torch.from_numpy(random.permutation(len(x)))
        held = round(self.validation_fraction * len(x)) if len(x) >= FEWEST_TO_SPLIT else 0
        kept = order[held:]
        shown = order[:held] if held else kept
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(random.randint(_SEEDS)))
            model = self._perceptron(x.shape[1], outputs)
        self.grown_ = grow(
            model,
            train=(inputs[kept], targets[kept]),
            val=(inputs[shown], targets[shown]),
            controller=self.controller,
            epochs=self.epochs,
            budget=self.budget,
            lr=self.lr,
            batch_size=self.batch_size,
            seed=int(random.randint(_SEEDS)),
            device=self.device,
            progress=False,
        )
        self.model_ = self.grown_.model

    def _perceptron(self, features: int, outputs: int) -> nn.Sequential:
        sizes = [features, *self.hidden_layer_sizes]
        layers: list[nn.Module] = []
        for before, after in pairwise(sizes):
            layers += [nn.Linear(before, after), nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(sizes[-1], outputs))

    def _scaled(self, x: Array) -> Tensor:
        return torch.from_numpy(((x - self.mean_) / self.scale_).astype(np.float32))

    @torch.no_grad()
    def _outputs(self, x: ArrayLike) -> Array:
        """What the grown model says about new inputs.  # [n, outputs] float64"""
        check_is_fitted(self)
        checked = validate_data(self, x, reset=False, dtype=np.float64)
        outputs: Array = self.model_(self._scaled(checked)).double().numpy()
        return outputs


class GrowingClassifier(ClassifierMixin, _Growing):  # type: ignore[misc]
    """A classifier over tables of numbers."""

    def fit(self, X: ArrayLike, y: ArrayLike) -> Self:
        x, y = validate_data(self, X, y, dtype=np.float64, ensure_min_samples=2)
        check_classification_targets(y)
        self.classes_, codes = np.unique(column_or_1d(y, warn=True), return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(
                f"y holds one class, {self.classes_[0]!r}; a classifier needs samples of at least 2 classes"
            )
        self._grow(x, torch.from_numpy(codes.astype(np.int64)), len(self.classes_))
        return self

    def predict_proba(self, X: ArrayLike) -> Array:
        outputs = self._outputs(X)
        shifted = np.exp(outputs - outputs.max(axis=1, keepdims=True))
        shares: Array = shifted / shifted.sum(axis=1, keepdims=True)
        return shares

    def predict(self, X: ArrayLike) -> Array:
        picked = self._outputs(X).argmax(axis=1)
        chosen: Array = self.classes_[picked]
        return chosen


class GrowingRegressor(RegressorMixin, _Growing):  # type: ignore[misc]
    """A regressor over tables of numbers, for one target."""

    def fit(self, X: ArrayLike, y: ArrayLike) -> Self:
        x, y = validate_data(self, X, y, dtype=np.float64, y_numeric=True, ensure_min_samples=2)
        numbers = column_or_1d(y, warn=True).astype(np.float64)
        self.target_mean_ = float(numbers.mean())
        self.target_scale_ = float(numbers.std()) or 1.0
        standard = (numbers - self.target_mean_) / self.target_scale_
        self._grow(x, torch.from_numpy(standard.astype(np.float32)).unsqueeze(1), 1)
        return self

    def predict(self, X: ArrayLike) -> Array:
        numbers: Array = self._outputs(X)[:, 0] * self.target_scale_ + self.target_mean_
        return numbers
