"""The estimators have the manners that scikit-learn asks for."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from sklearn.datasets import load_wine
from sklearn.utils.estimator_checks import check_estimator

from esper import GrowingClassifier, GrowingRegressor


@pytest.mark.parametrize("estimator", [GrowingClassifier(epochs=8), GrowingRegressor(epochs=8)])
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
