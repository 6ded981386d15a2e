"""Random search over sizes: who tries what, and who chooses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from esper.tasks.task import HostSpec
from studies.alternatives import CANDIDATES, Candidate, best_by_validation, draw, widths_for


def candidate(validation: list[float], test: list[float]) -> Candidate:
    """A size that members 7 and 8 tried; its test accuracies are there to mislead."""
    record: Any = SimpleNamespace(accuracy=np.array([[0.0, 0.0], validation]))
    world: Any = SimpleNamespace(test=test)
    return Candidate(world, record, rows={7: 0, 8: 1})


def test_validation_chooses_and_the_test_does_not() -> None:
    tried = {0: candidate([0.9, 0.2], test=[0.0, 1.0]), 1: candidate([0.3, 0.8], test=[1.0, 0.0])}
    assert best_by_validation(7, tried) == 0
    assert best_by_validation(8, tried) == 1


def test_a_member_tries_different_sizes_and_always_the_same() -> None:
    drawn = draw(5000, 15, seed=77)
    assert len(set(drawn)) == CANDIDATES
    assert drawn == draw(5000, 15, seed=77)
    assert drawn != draw(5001, 15, seed=77)
    assert draw(1, 2, seed=0) in {(0, 1), (1, 0)}


def test_heads_divide_the_widths() -> None:
    assert widths_for(HostSpec("gpt", {"width": 8, "heads": 2})) == (4, 6, 8, 12)
    assert widths_for(HostSpec("mlp", {"width": 8})) == (4, 5, 6, 8, 12)
