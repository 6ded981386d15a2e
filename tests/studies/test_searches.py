"""Searches that are replayed from recorded runs: what they find, and what they pay."""

from __future__ import annotations

import numpy as np
import pytest

from studies.growth.records import POINTS, Sample
from studies.growth.searches import (
    Runs,
    Search,
    asha,
    halving,
)

SIZES, MEMBERS = 4, 6


def fixed(size: int, budget: float, seed: int = 0) -> Sample:
    """Accuracies that nobody else has; the test accuracy is the validation accuracy less .1."""
    random = np.random.default_rng([seed, size, int(budget)])
    curves = np.sort(random.random((MEMBERS, POINTS)), axis=1)
    return Sample(
        task="toy",
        arm=f"fixed {size}",
        budget=budget,
        rate=1.0,
        validation=curves[:, -1].tolist(),
        test=(curves[:, -1] - 0.1).tolist(),
        parameters=[10 * (size + 1)] * MEMBERS,
        cost=[float(size + 1)] * MEMBERS,
        curves=curves.tolist(),
    )


def recorded(seed: int = 0) -> list[Sample]:
    """Given in no order."""
    return [fixed(size, budget, seed) for budget in (1.0, 4.0) for size in reversed(range(SIZES))]


def slow_halving(runs: Runs, curves: np.ndarray, replay: int, eighths: int, reduction: int) -> Search:
    """The rule of the pruner: at each rung the best one in `reduction` of those so far goes on."""
    rungs: dict[int, list[float]] = {reduction**k: [] for k in range(4)}
    finished, spent = [], 0
    for trials, run in enumerate(runs.drawn(replay)):
        if spent == eighths:
            return Search(runs.best(finished), trials, spent)
        for ran in range(1, POINTS + 1):
            spent += 1
            if ran == POINTS:
                finished.append(run)
                break
            value = curves[run.size, run.member, ran - 1]
            if ran in rungs:
                rungs[ran].append(value)
                ahead = sum(other > value for other in rungs[ran])
                if ahead >= max(1, len(rungs[ran]) // reduction):
                    break
            if spent == eighths:
                break
    raise AssertionError("runs are drawn without end")


@pytest.mark.parametrize("reduction", [2, 4])
@pytest.mark.parametrize("times", [2, 5])
def test_asha_is_its_rule_played_by_hand_and_spends_all_that_it_has(times: int, reduction: int) -> None:
    samples = recorded(seed=1)
    runs = Runs.of(samples, "toy", 4.0)
    curves = np.array([size.curves for size in runs.sizes])
    for replay in range(MEMBERS):
        found = halving(runs, curves, replay, times * POINTS, reduction)
        assert found == slow_halving(runs, curves, replay, times * POINTS, reduction)
    paid = asha(samples, "toy", 4.0, times, reduction=reduction).events
    assert paid["budgets"] == times
    assert paid["trials"] > times
