"""The scikit-learn estimators."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from sklearn.datasets import load_wine
from sklearn.utils.estimator_checks import check_estimator

from esper import GrowingClassifier, GrowingRegressor


@pytest.mark.parametrize(
    "estimator", [GrowingClassifier(epochs=6, members=2), GrowingRegressor(epochs=8, members=2)]
)
def test_check_estimator(estimator: GrowingClassifier | GrowingRegressor) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results = check_estimator(estimator, on_fail=None)
    failed = [(r["check_name"], str(r["exception"])) for r in results if r["status"] == "failed"]
    assert not failed
    assert sum(r["status"] == "passed" for r in results) > 40


def test_a_classifier_averages_the_probabilities_of_its_networks() -> None:
    x, y = load_wine(return_X_y=True)
    names = np.array(["red", "white", "rose"])[y]
    classifier = GrowingClassifier(epochs=20, random_state=0).fit(x[::2], names[::2])
    assert classifier.score(x[1::2], names[1::2]) > 0.9
    each = [model(classifier._inputs(x[:5])).softmax(-1).detach().numpy() for model in classifier.models_]
    assert len(each) == 8
    assert np.std(each, axis=0).max() > 1e-4  # the networks differ
    assert classifier.predict_proba(x[:5]) == pytest.approx(np.mean(each, axis=0))


def test_a_regressor_learns_several_targets_on_their_own_scales() -> None:
    x = np.random.default_rng(0).normal(size=(200, 3))
    targets = np.stack((x[:, 0], 100.0 + 50.0 * x[:, 1]), axis=1)
    regressor = GrowingRegressor(epochs=20, members=2, random_state=0).fit(x, targets)
    assert regressor.predict(x).shape == targets.shape
    assert regressor.score(x, targets) > 0.9
    assert regressor.fit(x, targets[:, 1]).predict(x).shape == (200,)


def test_held_out_samples_choose_the_epoch(capsys: pytest.CaptureFixture[str]) -> None:
    """Labels without any relation to the inputs: later epochs only overfit."""
    random = np.random.default_rng(0)
    x, y = random.normal(size=(120, 5)), random.integers(2, size=120)
    settings = {"epochs": 20, "members": 2, "random_state": 0}
    held = GrowingClassifier(validation_fraction=0.25, verbose=True, **settings).fit(x, y)
    assert "epoch 20: loss" in (said := capsys.readouterr().out)
    assert "on held-out samples" in said
    assert held.score(x, y) < GrowingClassifier(**settings).fit(x, y).score(x, y)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "one class"),
        ({"members": 0}, "members is 0; give a whole number of at least 1"),
        ({"validation_fraction": 1.0}, "validation_fraction is 1.0; give a share"),
    ],
)
def test_bad_input_is_refused(settings: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GrowingClassifier(**settings).fit(np.eye(10), np.zeros(10))
