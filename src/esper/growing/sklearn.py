"""scikit-learn estimators: eight residual perceptrons trained at once, whose predictions are averaged.

classifier = GrowingClassifier(random_state=0).fit(X, y)
classifier.predict_proba(X_test)
"""

from __future__ import annotations

from typing import Any, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin, is_regressor
from sklearn.preprocessing import StandardScaler
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, column_or_1d, validate_data
from torch import Tensor, nn

from esper.lifecycle.slot_states import SlotStates
from esper.population.config import PopulationConfig
from esper.population.data import Clock, MemberData
from esper.population.extract import extract
from esper.population.hosts import Host, resmlp
from esper.population.population import Population

Array = NDArray[Any]
_SEEDS = 2**31 - 1
_INITIAL_WEIGHTS = 1 << 20  # so many that two members hardly ever begin with the same weights


class PerceptronEnsemble(BaseEstimator):  # type: ignore[misc]
    """Residual perceptrons that are trained together and averaged.

    Nothing grows during `fit` (the controller is static), because no measurement shows yet that growth pays
    on tables.

    Args:
        width: features of the residual stream of each network.
        hidden: hidden units of each block.
        depth: number of blocks.
        members: number of networks; each has initial weights and an order of the samples of its own.
        epochs: passes over the training samples; the learning rate follows one cycle over all of them.
        batch_size: samples in a minibatch, at most all of them.
        lr: peak learning rate of AdamW.
        weight_decay: decoupled weight decay.
        validation_fraction: share of the samples that is held out; each network then keeps the weights of
            its epoch with the lowest held-out loss. 0 trains on all samples and keeps the last epoch.
        random_state: as everywhere in scikit-learn.
        verbose: whether to print a line after every epoch.

    Attributes:
        models_: the trained networks, plain modules over standardised inputs.
        loss_curve_: training loss of each epoch, the mean over members.
        n_iter_: number of epochs.
    """

    n_outputs_: int

    def __init__(
        self,
        width: int = 32,
        hidden: int = 64,
        depth: int = 1,
        members: int = 8,
        epochs: int = 40,
        batch_size: int = 64,
        lr: float = 1e-2,
        weight_decay: float = 1e-2,
        validation_fraction: float = 0.0,
        random_state: Any = None,
        verbose: bool = False,
    ):
        self.width = width
        self.hidden = hidden
        self.depth = depth
        self.members = members
        self.epochs = epochs
        self.batch_size = batch_size
        self.lr = lr
        self.weight_decay = weight_decay
        self.validation_fraction = validation_fraction
        self.random_state = random_state
        self.verbose = verbose

    def fit(self, X: ArrayLike, y: ArrayLike) -> Self:
        """Train all networks from new weights.

        Args:
            X: numbers [n, features].
            y: targets [n], for regression also [n, targets].

        Raises:
            ValueError: for data that scikit-learn refuses, and for fewer than two classes.
        """
        for name in ("width", "hidden", "depth", "members", "epochs", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; give a whole number of at least 1")
        share = self.validation_fraction
        if not 0 <= share < 1:
            raise ValueError(f"validation_fraction is {share}; give a share of at least 0 and less than 1")
        checks = {"dtype": np.float64, "multi_output": True, "y_numeric": is_regressor(self)}
        x, given = validate_data(self, X, y, ensure_min_samples=2, **checks)
        targets = self._encode(given)
        self.scaler_ = StandardScaler().fit(x)
        random = check_random_state(self.random_state)
        order = torch.from_numpy(random.permutation(len(x)))
        held = min(round(share * len(x)), len(x) - 1)
        self._train(self._inputs(x).float(), targets, order[held:], order[:held], int(random.randint(_SEEDS)))
        return self

    def _encode(self, y: Array) -> Tensor:
        """Learn the kind of the targets, set `n_outputs_`, and return them as the loss takes them."""
        raise NotImplementedError

    def _train(self, inputs: Tensor, targets: Tensor, train: Tensor, held: Tensor, seed: int) -> None:
        """Train the members as rows of one population on the samples `train`.

        inputs [n, features]; train, held: indices of samples
        """
        batch = min(self.batch_size, len(train))
        config = PopulationConfig(
            batch_size=batch,
            batches_per_epoch=len(train) // batch,
            validation_samples=max(1, len(held)),
            host_lr=self.lr,
            weight_decay=self.weight_decay,
            initial_weights=_INITIAL_WEIGHTS,
        )
        objective = "regression" if is_regressor(self) else "classification"
        population = Population(
            lambda: self._host(inputs), config, torch.arange(self.members), seed, objective=objective
        )
        states = SlotStates.empty(self.members, population.num_slots)
        data = MemberData.shared(inputs[train], targets[train], self.members)
        best = torch.full((self.members,), torch.inf)
        saved = population.snapshot()
        self.loss_curve_: list[float] = []
        for epoch in range(self.epochs):
            loss = population.train_epoch(states, data, Clock(0, epoch, self.epochs)).loss
            self.loss_curve_.append(float(loss.mean()))
            line = f"epoch {epoch + 1}: loss {self.loss_curve_[-1]:.4f}"
            if len(held):
                shown = MemberData.shared(inputs[held], targets[held], self.members)
                validation = population.validate(states, shown, ablate=False).loss
                population.keep(saved, validation < best)
                best = torch.minimum(best, validation)
                line += f", {float(validation.mean()):.4f} on held-out samples"
            if self.verbose:
                print(line)
        if len(held):
            population.restore(saved)
        self.n_iter_ = self.epochs
        # Predictions in float64 do not depend on which other samples are predicted with them.
        self.models_: list[nn.Module] = [extract(population, states, k).double() for k in range(self.members)]

    def _host(self, inputs: Tensor) -> Host:
        features = inputs.shape[1]
        host = resmlp((features,), self.n_outputs_, width=self.width, hidden=self.hidden, depth=self.depth)
        return host.validate(inputs[:2])

    def _inputs(self, x: Array) -> Tensor:
        """Standardise.  # [n, features] float64"""
        return torch.from_numpy(self.scaler_.transform(x))

    @torch.no_grad()
    def _outputs(self, X: ArrayLike) -> Tensor:
        """Compute the outputs of every network for new inputs.  # → [members, n, outputs] float64"""
        check_is_fitted(self)
        inputs = self._inputs(validate_data(self, X, reset=False, dtype=np.float64))
        return torch.stack([model(inputs) for model in self.models_])


class GrowingClassifier(ClassifierMixin, PerceptronEnsemble):  # type: ignore[misc]
    """Classify rows of a table by the mean probability of the networks; classes may be of any type.

    Several labels for each sample, `sample_weight` and `partial_fit` are not supported. The parameters are
    those of `PerceptronEnsemble`.
    """

    def predict_proba(self, X: ArrayLike) -> Array:
        """Return the probability of each class, the mean over the networks.  # [n, classes]"""
        shares: Array = self._outputs(X).softmax(-1).mean(0).numpy()
        return shares

    def predict(self, X: ArrayLike) -> Array:
        """Return the most probable class.  # [n]"""
        best = self.predict_proba(X).argmax(axis=1)
        chosen: Array = self.classes_[best]
        return chosen

    def _encode(self, y: Array) -> Tensor:
        y = column_or_1d(y, warn=True)
        check_classification_targets(y)
        self.classes_, codes = np.unique(y, return_inverse=True)
        self.n_outputs_ = len(self.classes_)
        if self.n_outputs_ < 2:
            raise ValueError(f"y holds one class, {self.classes_[0]!r}; give samples of at least 2 classes")
        return torch.from_numpy(codes.astype(np.int64))


class GrowingRegressor(RegressorMixin, PerceptronEnsemble):  # type: ignore[misc]
    """Predict one or more numbers for each row of a table by the mean of the networks.

    Targets are standardised for training. `sample_weight` and `partial_fit` are not supported. The
    parameters are those of `PerceptronEnsemble`.
    """

    def predict(self, X: ArrayLike) -> Array:
        """Return the mean of the networks' predictions.  # [n], or [n, targets] where y had two axes"""
        outputs = self._outputs(X).mean(0).numpy()
        numbers: Array = self.target_scaler_.inverse_transform(outputs)
        return numbers[:, 0] if self._flat else numbers

    def _encode(self, y: Array) -> Tensor:
        if y.ndim == 2 and y.shape[1] == 1:
            y = column_or_1d(y, warn=True)
        self._flat = y.ndim == 1
        numbers = y.astype(np.float64).reshape(len(y), -1)
        self.target_scaler_ = StandardScaler().fit(numbers)
        self.n_outputs_ = numbers.shape[1]
        return torch.from_numpy(self.target_scaler_.transform(numbers).astype(np.float32))
