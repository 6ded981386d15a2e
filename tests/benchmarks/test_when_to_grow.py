"""The table that the default controller is chosen by."""

from __future__ import annotations

import pytest
import torch

from benchmarks.when_to_grow import MODELS, Measured, table


def test_controllers_are_judged_by_their_distance_to_the_model_without_growth() -> None:
    rows = [
        Measured("m", controller, seed, grown, 60.0 + seed, 200, 1, 1.0)
        for controller, grown in (("timid", 61.0), ("bold", 64.0))
        for seed in (0, 1)
    ]
    told = table(rows)
    assert "| m | bold | 64.0 | 60.5 | +3.50 ± 6.35 | 1.0 | 200 |" in told
    assert told.splitlines()[-2] == "| timid | +0.50 ± 6.35 |"


@pytest.mark.parametrize("name", MODELS)
def test_the_models_take_the_data_they_are_named_after(name: str) -> None:
    make, data = MODELS[name]
    shape = {"digits": (1, 8, 8), "letter": (16,), "mnist1d": (1, 40)}[data]
    classes = {"digits": 10, "letter": 26, "mnist1d": 10}[data]
    assert make()(torch.zeros(2, *shape)).shape == (2, classes)
