"""Searches that are replayed from recorded runs: what they find, and what they pay."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from studies.growth.records import POINTS, Sample
from studies.growth.searches import (
    Runs,
    Search,
    asha,
    halving,
    random_search,
    size_by_budget,
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


def validation(samples: list[Sample], budget: float) -> np.ndarray:
    return Runs.of(samples, "toy", budget).validation  # [K, n]


def test_a_random_search_of_as_many_runs_as_sizes_finds_the_best_of_each_member() -> None:
    samples = recorded()
    best = validation(samples, 4.0).max(axis=0)
    found = random_search(samples, "toy", 4.0, times=SIZES)
    np.testing.assert_allclose(found.validation, best)
    np.testing.assert_allclose(found.test, best - 0.1)
    assert found.events == {"trials": SIZES, "budgets": SIZES}
    assert sum(found.shapes.values()) == MEMBERS


def test_a_size_by_budget_is_the_best_of_the_other_tasks_and_never_looks_at_its_own() -> None:
    def task(name: str, accuracies: list[float]) -> list[Sample]:
        sizes = enumerate(accuracies)
        return [replace(fixed(k, 4.0), task=name, validation=[accuracy] * MEMBERS) for k, accuracy in sizes]

    others = [*task("a", [0.1, 0.5, 0.2, 0.1]), *task("b", [0.1, 0.2, 0.4, 0.1])]
    for own in ([0.9, 0.1, 0.1, 0.1], [0.1, 0.1, 0.1, 0.9]):
        samples = [*others, *task("toy", own)]
        found = size_by_budget(samples, "toy", 4.0)
        assert (found.arm, found.shapes) == ("size by budget", {"fixed 1": MEMBERS})
        assert found.test == fixed(1, 4.0).test


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
