"""The estimators have the manners that scikit-learn asks for."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from sklearn.datasets import load_wine
from sklearn.utils.estimator_checks import check_estimator
from torch import Tensor

from esper import GrowingClassifier, GrowingRegressor


@pytest.mark.parametrize("estimator", [GrowingClassifier(epochs=2), GrowingRegressor(epochs=5)])
def test_check_estimator(estimator: GrowingClassifier | GrowingRegressor) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results = check_estimator(estimator, on_fail=None)
    failed = [(r["check_name"], str(r["exception"])) for r in results if r["status"] == "failed"]
    assert not failed
    assert sum(r["status"] == "passed" for r in results) > 40


def test_a_classifier_learns_and_tells_what_grew() -> None:
    x, y = load_wine(return_X_y=True)
    names = np.array(["red", "white", "rose"])[y]
    classifier = GrowingClassifier(epochs=40, random_state=0).fit(x[::2], names[::2])
    assert classifier.score(x[1::2], names[1::2]) > 0.85
    assert classifier.predict_proba(x[:5]).sum(axis=1) == pytest.approx(np.ones(5))
    assert "parameters as given" in classifier.grown_.report()


def test_one_class_is_refused() -> None:
    with pytest.raises(ValueError, match="one class"):
        GrowingClassifier().fit(np.random.default_rng(0).normal(size=(10, 3)), np.zeros(10))


def blobs(n: int = 90) -> tuple[np.ndarray, np.ndarray]:
    """Two classes that a line divides.  # [n, 3], [n]"""
    x = np.random.default_rng(0).normal(size=(n, 3))
    return x, (x[:, 0] + x[:, 1] > 0).astype(int)


def test_labels_and_several_targets_are_learned_together() -> None:
    x, y = blobs()
    labels = np.stack((y, x[:, 2] > 0, np.ones(len(y))), axis=1).astype(int)
    classifier = GrowingClassifier(epochs=20, random_state=0).fit(x, labels)
    assert classifier.predict(x).shape == classifier.predict_proba(x).shape == labels.shape
    assert classifier.score(x, labels) > 0.85  # all three right
    targets = np.stack((x[:, 0], 100.0 + 50.0 * x[:, 1]), axis=1)
    regressor = GrowingRegressor(epochs=20, random_state=0).fit(x, targets)
    assert regressor.predict(x).shape == targets.shape
    assert regressor.score(x, targets) > 0.9
    with pytest.raises(ValueError, match="not 0 and 1; give classes"):
        GrowingClassifier().fit(x, labels * 2 + 1)


def test_a_sample_without_weight_teaches_nothing() -> None:
    x, y = blobs()
    wrong = np.concatenate((y, 1 - y))
    weights = np.repeat([1.0, 0.0], len(y))
    twice = np.concatenate((x, x + 1e-3))
    classifier = GrowingClassifier(epochs=8, random_state=0)
    assert classifier.fit(twice, wrong, weights).score(x, y) > 0.9
    assert classifier.fit(twice, wrong, 1.0 - weights).score(x, y) < 0.1
    with pytest.raises(ValueError, match="at least one non-zero"):
        classifier.fit(x, y, np.zeros(len(y)))


def test_partial_fit_goes_on_with_the_network_as_it_is() -> None:
    x, y = blobs()
    online = GrowingClassifier(random_state=0)
    with pytest.raises(ValueError, match="classes must be passed"):
        online.partial_fit(x, y)
    for _ in range(15):
        online.partial_fit(x, y, classes=[0, 1, 2])
    assert online.n_iter_ == 15
    assert online.loss_curve_[-1] < online.loss_curve_[0]
    assert online.predict_proba(x).shape == (len(x), 3)
    assert online.score(x, y) > 0.9
    with pytest.raises(ValueError, match="the class 7"):
        online.partial_fit(x, y + 7)
    grown = GrowingClassifier(epochs=4, random_state=0).fit(x, y)
    before = grown.model_
    grown.partial_fit(x, y)
    assert grown.model_ is before


def test_a_linear_model_is_a_beginning_too() -> None:
    """A line cannot tell a ring from its middle, and what grows ahead of it can."""
    x = np.random.default_rng(0).normal(size=(400, 2))
    y = (np.square(x).sum(axis=1) > 1.4).astype(int)
    linear = GrowingClassifier(hidden_layer_sizes=(), controller="static", epochs=30, random_state=0)
    assert [type(part).__name__ for part in linear.fit(x, y).model_] == ["Identity", "Linear"]
    grown = GrowingClassifier(hidden_layer_sizes=(), controller="habit", epochs=30, random_state=0).fit(x, y)
    assert grown.grown_.added
    assert grown.score(x, y) > linear.score(x, y) + 0.2


def test_verbose_speaks_after_every_epoch_and_the_loss_and_the_members_are_parameters(
    capsys: pytest.CaptureFixture[str],
) -> None:
    x, y = blobs()
    GrowingClassifier(epochs=2, random_state=0, verbose=True).fit(x, y)
    said = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in said[:2]] == ["epoch 1", "epoch 2"]

    def absolute(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets).abs().mean(-1)

    regressor = GrowingRegressor(epochs=10, random_state=0, loss=absolute, members=2).fit(x, x[:, 0])
    assert len(regressor.grown_.models) == 2
    assert regressor.grown_.engine == "rows"
    outlier = np.where(np.arange(len(x)) == 3, 1000.0, x[:, 0])
    weighed = GrowingRegressor(epochs=10, random_state=0, loss=absolute).fit(
        x, outlier, np.arange(len(x)) + 1
    )
    assert np.isfinite(weighed.predict(x)).all()
    with pytest.raises(ValueError, match="must return one number for each sample"):
        weighed.set_params(loss=lambda o, t: absolute(o, t).mean()).fit(x, outlier, np.arange(len(x)) + 1)
