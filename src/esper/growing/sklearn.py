"""Growing perceptrons with the manners of scikit-learn.

classifier = GrowingClassifier(epochs=30).fit(X, y)
classifier.score(X_test, y_test)
print(classifier.grown_.report())
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from numbers import Integral
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin, is_regressor
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets, type_of_target
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, column_or_1d, validate_data
from torch import Tensor, nn

from esper.growing.api import grow
from esper.growing.result import Grown
from esper.growing.sklearn_targets import CLASSES, LABELS, NUMBERS, BySample, Kind, TargetScoring

Array = NDArray[Any]
FEWEST_TO_SPLIT = 20  # with fewer samples, validation looks at the training data
_SEEDS = 2**31 - 1


class _Growing(BaseEstimator):  # type: ignore[misc]
    """A perceptron that grows while it is fitted.

    hidden_layer_sizes: units of each hidden layer to begin with; empty begins with a linear model, and what
        grows then sits between the inputs and it.
    epochs, budget, controller, lr, weight_decay, batch_size, device, force: as in `esper.grow`. Without a
        controller the network is trained plainly and does not grow.
    loss: a function (outputs, targets) → one number for each sample; cross-entropy for classes and labels,
        squared error for numbers, if left out. Numbers come standardised.
    members: networks that grow side by side from weights of their own; the one that validates best is kept.
    validation_fraction: the share of the samples that growth is judged by; the network is not trained on it.
    verbose: whether a line is printed after every epoch.

    After `fit`: `model_` is the plain network over standardised inputs, `grown_` the story of it,
    `loss_curve_` the training loss of each epoch and `n_iter_` their number.
    """

    grown_: Grown
    n_outputs_: int
    _kind: Kind
    _optimiser: torch.optim.Optimizer | None  # of `partial_fit`

    def __init__(
        self,
        hidden_layer_sizes: int | Sequence[int] = (64,),
        epochs: int = 30,
        budget: int | None = None,
        controller: Any = None,
        loss: BySample | None = None,
        lr: float = 1e-2,
        weight_decay: float = 1e-2,
        batch_size: int = 64,
        members: int = 1,
        validation_fraction: float = 0.1,
        random_state: Any = None,
        device: str = "cpu",
        verbose: bool = False,
        force: bool = False,
    ):
        self.hidden_layer_sizes = hidden_layer_sizes
        self.epochs = epochs
        self.budget = budget
        self.controller = controller
        self.loss = loss
        self.lr = lr
        self.weight_decay = weight_decay
        self.batch_size = batch_size
        self.members = members
        self.validation_fraction = validation_fraction
        self.random_state = random_state
        self.device = device
        self.verbose = verbose
        self.force = force

    # ---- what an estimator of a kind says --------------------------------------------------------------

    def _checked(self, X: ArrayLike, y: ArrayLike, reset: bool) -> tuple[Array, Array]:
        """Inputs [n, features] and targets as they were given, checked; one column of targets as [n]."""
        least, numeric = 2 if reset else 1, is_regressor(self)
        checks = {"dtype": np.float64, "multi_output": True, "y_numeric": numeric}
        x, targets = validate_data(self, X, y, reset=reset, ensure_min_samples=least, **checks)
        flat = targets.ndim == 2 and targets.shape[1] == 1
        return x, column_or_1d(targets, warn=True) if flat else targets

    def _learn_targets(self, y: Array, classes: ArrayLike | None, weights: Array) -> None:
        """Look at the targets for the first time; sets `_kind` and `n_outputs_`."""
        raise NotImplementedError

    def _encoded(self, y: Array) -> Array:
        """The targets as numbers: codes [n], or [n, outputs]."""
        raise NotImplementedError

    # ---- fitting ---------------------------------------------------------------------------------------

    def fit(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> Self:
        """Begin anew and grow on all of the samples. Raises ValueError for what scikit-learn refuses.

        A sample of weight 0 is left out, and one that is given k times counts as one of weight k: so no copy
        of a sample is trained on while another judges.
        """
        x, given = self._checked(X, y, reset=True)
        x, given, weights = _merged(x, given, self._weights(sample_weight, x))
        self._learn_targets(given, None, weights)
        random = check_random_state(self.random_state)
        self.mean_, self.scale_ = _spread(x, weights)
        order = torch.from_numpy(random.permutation(len(x)))
        held = round(self.validation_fraction * len(x)) if len(x) >= FEWEST_TO_SPLIT else 0
        kept = order[held:]
        shown = order[:held] if held else kept
        inputs, (scoring, targets) = self._scaled(x), self._scoring(given, weights)
        engine: dict[str, Any] = {"engine": "live", "on_epoch": _say if self.verbose else None}
        if self.members > 1:  # several networks are trained as one program
            engine = {"engine": "rows", "members": self.members}
        self.grown_ = grow(
            self._maker(random, x.shape[1]),
            train=(inputs[kept], targets[kept]),
            val=(inputs[shown], targets[shown]),
            slots=None if self._sizes() else ["0"],
            controller=self.controller,
            epochs=self.epochs,
            budget=self.budget,
            force=self.force,
            lr=self.lr,
            weight_decay=self.weight_decay,
            batch_size=self.batch_size,
            seed=int(random.randint(_SEEDS)),
            device=self.device,
            progress=False,
            **engine,
            **scoring.functions(),
        )
        self.model_ = self.grown_.model
        self._optimiser = None
        self.loss_curve_ = [epoch.train_loss for epoch in self.grown_.history]
        self.n_iter_ = len(self.loss_curve_)
        if self.verbose:
            print(self.grown_.report())
        return self

    def _partial_fit(
        self, X: ArrayLike, y: ArrayLike, classes: ArrayLike | None, sample_weight: ArrayLike | None
    ) -> Self:
        """One pass over these samples with the network as it is; the first ever makes an ungrown one."""
        first = not hasattr(self, "model_")
        x, given = self._checked(X, y, reset=first)
        weights = self._weights(sample_weight, x)
        if first or self._optimiser is None:
            self._random = check_random_state(self.random_state)
        if first:
            self._learn_targets(given, classes, weights)
            self.mean_, self.scale_ = _spread(x, weights)
            self.model_ = self._maker(self._random, x.shape[1])()
            self._optimiser, self.loss_curve_, self.n_iter_ = None, [], 0
        if self._optimiser is None:
            own = self.model_.parameters()
            self._optimiser = torch.optim.AdamW(own, self.lr, weight_decay=self.weight_decay)
        inputs, (scoring, targets) = self._scaled(x), self._scoring(given, weights)
        order, total = torch.from_numpy(self._random.permutation(len(x))), 0.0
        self.model_.train()
        for index in order.split(self.batch_size):
            self._optimiser.zero_grad()
            value = scoring.loss(self.model_(inputs[index]), targets[index])
            value.backward()
            self._optimiser.step()
            total += value.item() * len(index)
        self.model_.eval()
        self.loss_curve_.append(total / len(x))
        self.n_iter_ += 1
        if self.verbose:
            print(f"epoch {self.n_iter_}: loss {self.loss_curve_[-1]:.4f}")
        return self

    def _weights(self, sample_weight: ArrayLike | None, x: Array) -> Array:
        """One for each sample, their mean 1."""
        checked: Array = _check_sample_weight(sample_weight, x, dtype=np.float64, ensure_non_negative=True)
        weights: Array = checked / checked.mean()
        return weights

    def _scoring(self, y: Array, weights: Array) -> tuple[TargetScoring, Tensor]:
        """Loss and score, and the targets as these take them."""
        scoring = TargetScoring(self._kind, self.loss, bool((weights != 1.0).any()))
        return scoring, scoring.pack(torch.from_numpy(self._encoded(y)), torch.from_numpy(weights))

    def _sizes(self) -> list[int]:
        sizes = self.hidden_layer_sizes
        return [int(sizes)] if isinstance(sizes, Integral) else list(sizes)  # type: ignore[arg-type]

    def _maker(self, random: np.random.RandomState, features: int) -> Callable[[], nn.Module]:
        """A function that makes a perceptron with first weights of its own at every call."""

        def make() -> nn.Sequential:
            sizes = [features, *self._sizes()]
            layers: list[nn.Module] = [] if sizes[1:] else [nn.Identity()]
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(int(random.randint(_SEEDS)))
                for before, after in pairwise(sizes):
                    layers += [nn.Linear(before, after), nn.ReLU()]
                return nn.Sequential(*layers, nn.Linear(sizes[-1], self.n_outputs_))

        return make

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
    """A classifier over tables of numbers: y [n] of classes, or [n, labels] of 0 and 1.

    The parameters are those of `_Growing`.
    """

    def partial_fit(
        self,
        X: ArrayLike,
        y: ArrayLike,
        classes: ArrayLike | None = None,
        sample_weight: ArrayLike | None = None,
    ) -> Self:
        """One pass over these samples at the rate `lr`, with the network as it is: nothing grows here.

        After `fit` it goes on with the grown network. The first call of all makes an ungrown one, takes the
        scale of its inputs from these samples, and needs `classes`, all that there will ever be.
        """
        if not hasattr(self, "model_") and classes is None and type_of_target(y) != "multilabel-indicator":
            raise ValueError("classes must be passed on the first call to partial_fit")
        return self._partial_fit(X, y, classes, sample_weight)

    def predict_proba(self, X: ArrayLike) -> Array:
        """The probability of each class, or of each label on its own.  # [n, outputs]"""
        outputs = torch.from_numpy(self._outputs(X))
        shares: Array = (outputs.softmax(1) if self._kind == CLASSES else outputs.sigmoid()).numpy()
        return shares

    def predict(self, X: ArrayLike) -> Array:
        """The likeliest class [n], or every label that is likelier than not [n, labels]."""
        outputs = self._outputs(X)
        if self._kind == LABELS:
            return (outputs > 0).astype(int)
        chosen: Array = self.classes_[outputs.argmax(axis=1)]
        return chosen

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.classifier_tags.multi_label = True
        return tags

    def _checked(self, X: ArrayLike, y: ArrayLike, reset: bool) -> tuple[Array, Array]:
        x, targets = super()._checked(X, y, reset)
        check_classification_targets(targets)
        if targets.ndim == 2 and not np.isin(targets, (0, 1)).all():
            kind = type_of_target(targets)
            raise ValueError(f"y is {kind}, not 0 and 1; give classes [n], or 0 and 1 for labels [n, labels]")
        return x, targets

    def _learn_targets(self, y: Array, classes: ArrayLike | None, weights: Array) -> None:
        if y.ndim == 2:
            self._kind, self.classes_ = LABELS, np.arange(y.shape[1])
        else:
            self._kind, self.classes_ = CLASSES, np.unique(y if classes is None else classes)
        if len(self.classes_) < 2:
            raise ValueError(
                f"y holds one class, {self.classes_[0]!r}; a classifier needs samples of at least 2 classes"
            )
        self.n_outputs_ = len(self.classes_)

    def _encoded(self, y: Array) -> Array:
        if self._kind == LABELS:
            return y.astype(np.float64)
        unknown = np.setdiff1d(y, self.classes_)
        if len(unknown):
            raise ValueError(f"y has the class {unknown[0]}, which is not in classes {self.classes_}")
        return np.searchsorted(self.classes_, y)


class GrowingRegressor(RegressorMixin, _Growing):  # type: ignore[misc]
    """A regressor over tables of numbers: y [n], or [n, targets] for several at once.

    The parameters are those of `_Growing`.
    """

    def partial_fit(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> Self:
        """One pass over these samples at the rate `lr`, with the network as it is: nothing grows here.

        After `fit` it goes on with the grown network. The first call of all makes an ungrown one, and takes
        the scale of inputs and targets from these samples.
        """
        return self._partial_fit(X, y, None, sample_weight)

    def predict(self, X: ArrayLike) -> Array:
        """The numbers [n], or [n, targets] where y had two axes."""
        numbers: Array = self._outputs(X) * self.target_scale_ + self.target_mean_
        return numbers[:, 0] if self._flat else numbers

    def _learn_targets(self, y: Array, classes: ArrayLike | None, weights: Array) -> None:
        self._kind, self._flat = NUMBERS, y.ndim == 1
        numbers = y.astype(np.float64).reshape(len(y), -1)
        self.target_mean_, self.target_scale_ = _spread(numbers, weights)
        self.n_outputs_ = numbers.shape[1]

    def _encoded(self, y: Array) -> Array:
        numbers: Array = (y.astype(np.float64).reshape(len(y), -1) - self.target_mean_) / self.target_scale_
        return numbers


def _say(numbers: dict[str, Any]) -> None:
    print(
        f"epoch {numbers['epoch']}: loss {numbers['train_loss']:.4f}, "
        f"score {numbers['score']:.4f} on held-out samples, {numbers['parameters']:,} parameters"
    )


def _merged(x: Array, y: Array, weights: Array) -> tuple[Array, Array, Array]:
    """The different samples that count, in an order of their own, and how much each does.

    x [n, features], y [n] or [n, outputs], weights [n]; those that come back have a mean of 1.
    """
    used = weights > 0
    x, y, weights = x[used], y[used], weights[used]
    codes = np.unique(y, axis=0, return_inverse=True)[1].reshape(-1, 1)
    _, first, which = np.unique(np.hstack((x, codes)), axis=0, return_index=True, return_inverse=True)
    sums = np.bincount(which.ravel(), weights)
    return x[first], y[first], sums / sums.mean()


def _spread(values: Array, weights: Array) -> tuple[Array, Array]:
    """Mean and standard deviation of each column, 1 where it does not vary."""
    mean = np.average(values, axis=0, weights=weights)
    deviation = np.sqrt(np.average((values - mean) ** 2, axis=0, weights=weights))
    return mean, np.where(deviation > 0, deviation, 1.0)
