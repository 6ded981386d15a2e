"""Searches that are replayed from recorded runs: what they find, and what they pay."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import numpy as np
import pytest

from studies.growth.records import POINTS, Sample
from studies.growth.searches import (
    Runs,
    Search,
    all_searches,
    asha,
    best_of_restarts,
    halving,
    oracle,
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


def test_a_search_of_all_recorded_runs_finds_the_best_of_them_in_every_replay() -> None:
    samples = recorded()
    found = random_search(samples, "toy", 4.0, times=SIZES * MEMBERS)
    assert set(found.validation) == {validation(samples, 4.0).max()}


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


def test_a_replay_meets_its_own_member_of_every_size_first_and_no_run_twice() -> None:
    runs = Runs.of(recorded(), "toy", 4.0)
    met = list(islice(runs.drawn(3), SIZES * MEMBERS))
    assert len(set(met)) == SIZES * MEMBERS
    assert [run.member for run in met[:SIZES]] == [3] * SIZES
    assert sorted(run.size for run in met[:SIZES]) == list(range(SIZES))


def test_one_whole_run_cannot_be_halved_so_that_asha_is_random_search() -> None:
    samples = recorded()
    halved, drawn = asha(samples, "toy", 4.0, times=1), random_search(samples, "toy", 4.0, times=1)
    assert halved.test == drawn.test
    assert halved.events == drawn.events == {"trials": 1.0, "budgets": 1.0}
    assert (halved.arm, drawn.arm) == ("ASHA ×1", "random search ×1")


def test_quarter_runs_are_drawn_from_a_quarter_of_the_budget_and_cost_a_quarter() -> None:
    samples = recorded()
    found = random_search(samples, "toy", 4.0, times=1, quarters=True)
    np.testing.assert_allclose(
        found.validation, validation(samples, 1.0).max(axis=0)
    )  # four sizes, four runs
    assert found.events == {"trials": 4.0, "budgets": 1.0}
    assert (found.arm, found.budget) == ("random search ×1 (quarter runs)", 4.0)


def test_a_pruned_trial_pays_for_the_eighths_that_it_ran() -> None:
    """One size that rises and three that are worse from the first eighth on.

    Whoever comes first ends (8 eighths). If it is the good one, all others are pruned after one eighth each:
    with 8 + 3 eighths to spend there are four trials, and nothing is left.
    """
    curves = np.full((SIZES, 1, POINTS), 0.1)
    curves[2] = 0.9
    samples = [
        Sample(
            "toy", f"fixed {size}", 1.0, 1.0, [curves[size, 0, -1]], [0.5], [1], [1.0], curves[size].tolist()
        )
        for size in range(SIZES)
    ]
    runs = Runs.of(samples, "toy", 1.0)
    assert next(runs.drawn(0)).size == 2  # of this replay
    found = halving(runs, curves, replay=0, eighths=POINTS + 3)
    assert (found.best.size, found.trials, found.eighths) == (2, 4, POINTS + 3)


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


def test_restarts_share_a_budget_and_the_best_on_validation_data_counts() -> None:
    samples = recorded()
    quarter = validation(samples, 1.0)
    best = best_of_restarts(samples, "toy", 4.0)
    assert best.shapes == {"fixed 0": MEMBERS}
    assert np.greater_equal(best.validation, quarter[0]).all()  # replay i has member i among its restarts
    assert best.events == {"trials": 4.0, "budgets": 1.0}
    better = best_of_restarts(samples, "toy", 4.0, of_oracle=True)
    assert better.shapes == {f"fixed {quarter.mean(axis=1).argmax()}": MEMBERS}
    assert better.arm == "best of 4 oracle restarts"
    whole = best_of_restarts(samples, "toy", 4.0, of_oracle=True, whole=True)
    best_size = validation(samples, 4.0).mean(axis=1).argmax()
    assert (whole.arm, whole.shapes) == ("best of 4 oracle runs ×4", {f"fixed {best_size}": MEMBERS})
    assert np.greater_equal(whole.validation, validation(samples, 4.0)[best_size]).all()
    assert whole.events == {"trials": 4.0, "budgets": 4.0}


def test_the_oracle_is_the_size_with_the_best_mean_whatever_its_test_accuracy() -> None:
    samples = recorded()
    size = int(validation(samples, 4.0).mean(axis=1).argmax())
    best = next(sample for sample in samples if sample.arm == f"fixed {size}" and sample.budget == 4.0)
    found = oracle(samples, "toy", 4.0)
    assert (found.arm, found.test, found.cost) == ("oracle", best.test, best.cost)


def test_all_searches_have_names_of_their_own_and_quarters_only_where_they_were_recorded() -> None:
    least, most = (all_searches(recorded(), "toy", budget) for budget in (1.0, 4.0))
    for found in (least, most):
        assert len({sample.arm for sample in found}) == len(found)
        assert {len(sample.test) for sample in found} == {MEMBERS}
    assert {sample.arm for sample in most} - {sample.arm for sample in least} == {
        "random search ×1 (quarter runs)",
        "ASHA ×1 (quarter runs)",
        "best of 4 restarts",
        "best of 4 oracle restarts",
    }


def test_sizes_that_were_not_recorded_alike_are_refused() -> None:
    with pytest.raises(ValueError, match=r"toy at budget 9 have \[\] members"):
        oracle(recorded(), "toy", 9.0)
    with pytest.raises(ValueError, match="no whole curves"):
        asha([Sample("toy", "fixed 0", 1.0, 1.0, [0.5], [0.5], [1], [1.0])], "toy", 1.0, 1)
