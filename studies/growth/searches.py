"""What searches over the size would have found, replayed from the recorded runs of the fixed sizes.

A replay is one search: whenever it trains a network of some size, it is given a run that was recorded, as in
a tabular benchmark. Replay i meets a size first as member i of that size, later as other members, none of
them twice: so the replays of a search of few runs share nothing with each other, and replay i pairs
with member i of every other arm.

    random search ×4                   four whole runs of sizes drawn at random, best on validation data
    ASHA ×4                            trials for the compute of four whole runs, halved by Optuna
    random search ×1 (quarter runs)    the same compute in runs of a quarter of the budget; so for ASHA
    best of 4 restarts                 four quarter runs of the host that growth begins with
    best of 4 oracle restarts          of the size that is best for a quarter of the budget
    best of 4 oracle runs ×4           four whole runs of the best size for this budget, which cost four
    oracle                             the size with the best mean validation accuracy at this budget
    size by budget                     one run of the size that was best on the other tasks at this budget
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count, islice

import numpy as np
import optuna
from numpy.typing import NDArray
from optuna.trial import Trial, TrialState

from studies.growth.records import POINTS, Sample

TIMES = (1, 4, 8)  # the compute of a search, in whole runs
QUARTERS = 4  # quarter runs in a whole one
RESTARTS = 4
REDUCTION = 2  # of ASHA: one in so many trials goes on at each rung
FIXED = "fixed "  # and a number: the arms that are searched
SIZE_BY_BUDGET = "size by budget"

optuna.logging.set_verbosity(optuna.logging.ERROR)


def is_fixed(sample: Sample, task: str, budget: float) -> bool:
    """Whether a sample is a fixed size on this task at this budget."""
    return sample.task == task and sample.arm.startswith(FIXED) and math.isclose(sample.budget, budget)


@dataclass(frozen=True)
class Run:
    """One recorded run."""

    size: int
    member: int


@dataclass(frozen=True)
class Runs:
    """The runs of all K fixed sizes on one task at one budget, from the least size to the greatest."""

    sizes: tuple[Sample, ...]

    @staticmethod
    def of(samples: Sequence[Sample], task: str, budget: float) -> Runs:
        """Raises ValueError where no fixed size was recorded, or not as many members of each."""
        found = [sample for sample in samples if is_fixed(sample, task, budget)]
        members = {len(sample.validation) for sample in found}
        if len(members) != 1:
            raise ValueError(
                f"the fixed sizes on {task} at budget {budget:g} have {sorted(members)} members; record at "
                "least one size, and as many members of each"
            )
        return Runs(tuple(sorted(found, key=lambda sample: int(sample.arm.removeprefix(FIXED)))))

    @cached_property
    def validation(self) -> NDArray[np.float64]:
        """Accuracy at the end.  # [K, n]"""
        return np.array([size.validation for size in self.sizes])

    @property
    def members(self) -> int:
        """Recorded runs of each size."""
        return int(self.validation.shape[1])

    @property
    def oracle(self) -> int:
        """The size with the best mean validation accuracy; of equals the least."""
        return int(self.validation.mean(axis=1).argmax())

    def best(self, runs: Sequence[Run]) -> Run:
        """The run with the best validation accuracy; of equals the first."""
        return max(runs, key=lambda run: self.validation[run.size, run.member])

    def drawn(self, replay: int) -> Iterator[Run]:
        """Runs without end, in the order of a replay: every size once, then every size again."""
        random = np.random.default_rng(replay)
        others = random.permutation(np.delete(np.arange(self.members), replay))
        order = [replay, *others.tolist()]
        for visit in count():
            for size in random.permutation(len(self.sizes)).tolist():
                yield Run(size, order[visit % self.members])


@dataclass(frozen=True)
class Search:
    """What one replay found, and what it paid."""

    best: Run
    trials: int
    eighths: int  # of a run, over all trials


# ---- the arms ----------------------------------------------------------------------------------------------


def oracle(samples: Sequence[Sample], task: str, budget: float) -> Sample:
    """The best size, known beforehand; member by member."""
    runs = Runs.of(samples, task, budget)
    best = runs.sizes[runs.oracle]
    return replace(best, arm="oracle", shapes={best.arm: runs.members})


def size_by_budget(samples: Sequence[Sample], task: str, budget: float) -> Sample:
    """Choose a size for this budget without the task: the best mean validation accuracy on all others.

    This is the baseline of somebody who knows the budget and has never seen the task; it costs one run.
    """
    others = sorted({sample.task for sample in samples} - {task})
    means = [Runs.of(samples, other, budget).validation.mean(axis=1) for other in others]  # [tasks][K]
    chosen = Runs.of(samples, task, budget).sizes[int(np.mean(means, axis=0).argmax())]
    return replace(chosen, arm=SIZE_BY_BUDGET, shapes={chosen.arm: len(chosen.test)})


def random_search(
    samples: Sequence[Sample], task: str, budget: float, times: int, quarters: bool = False
) -> Sample:
    """Runs of sizes drawn at random for the compute of `times` whole ones; the best on validation data."""
    runs, each = _runs_of_search(samples, task, budget, quarters)
    number = times * each
    found = []
    for replay in range(runs.members):
        tried = list(islice(runs.drawn(replay), number))
        found.append(Search(runs.best(tried), number, number * POINTS))
    return _as_sample(_named("random search", times, quarters), budget, runs, found, each)


def asha(
    samples: Sequence[Sample],
    task: str,
    budget: float,
    times: int,
    quarters: bool = False,
    reduction: int = REDUCTION,
) -> Sample:
    """Asynchronous successive halving for the compute of `times` whole runs.

    A pruned trial pays for the eighths that it ran. Trials go on until all is spent; one that cannot be paid
    to its end is no candidate.
    """
    runs, each = _runs_of_search(samples, task, budget, quarters)
    curves = np.array([size.curves for size in runs.sizes])  # [K, n, POINTS]
    if curves.shape != (*runs.validation.shape, POINTS):
        raise ValueError(
            f"the fixed sizes on {task} have no whole curves; record {POINTS} points of each run"
        )
    found = [
        halving(runs, curves, replay, times * each * POINTS, reduction) for replay in range(runs.members)
    ]
    return _as_sample(_named("ASHA", times, quarters), budget, runs, found, each)


def best_of_restarts(
    samples: Sequence[Sample],
    task: str,
    budget: float,
    restarts: int = RESTARTS,
    of_oracle: bool = False,
    whole: bool = False,
) -> Sample:
    """The best of `restarts` runs of one size that share the budget, or of whole ones.

    The size is the least, or the one with the best mean validation accuracy at the budget of a restart.
    """
    runs = Runs.of(samples, task, budget if whole else budget / restarts)
    size = runs.oracle if of_oracle else 0
    found = []
    for replay in range(runs.members):
        mine = (run for run in runs.drawn(replay) if run.size == size)
        found.append(Search(runs.best(list(islice(mine, restarts))), restarts, restarts * POINTS))
    kind = f"runs ×{restarts}" if whole else "restarts"
    arm = f"best of {restarts} {'oracle ' if of_oracle else ''}{kind}"
    return _as_sample(arm, budget, runs, found, 1 if whole else restarts)


def all_searches(samples: Sequence[Sample], task: str, budget: float) -> list[Sample]:
    """Every arm of this file; those of quarter runs where the fixed sizes have a quarter of the budget."""
    found = [oracle(samples, task, budget)]
    found.append(best_of_restarts(samples, task, budget, of_oracle=True, whole=True))
    for search in (random_search, asha):
        found += [search(samples, task, budget, times) for times in TIMES]
    if any(is_fixed(sample, task, budget / QUARTERS) for sample in samples):
        found += [search(samples, task, budget, 1, quarters=True) for search in (random_search, asha)]
        found += [best_of_restarts(samples, task, budget, of_oracle=better) for better in (False, True)]
    return found


# ---- one replay of ASHA ------------------------------------------------------------------------------------


def halving(
    runs: Runs, curves: NDArray[np.float64], replay: int, eighths: int, reduction: int = REDUCTION
) -> Search:
    """One search by Optuna's pruner for the compute of `eighths` eighths of a run, at least one whole run.

    The first trial has nobody to compete with and always ends, so that there is something to choose. Which
    size a trial has is drawn here: the pruner asks for its scores alone.
    """
    study = optuna.create_study(
        direction="maximize",
        sampler=optuna.samplers.RandomSampler(seed=replay),
        pruner=optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=reduction),
    )
    finished, trials, left = [], 0, eighths
    for run in runs.drawn(replay):
        if not left:
            break
        trial = study.ask()
        ran, state = _play(trial, curves[run.size, run.member], left)
        whole = state is TrialState.COMPLETE
        study.tell(trial, float(runs.validation[run.size, run.member]) if whole else None, state=state)
        if whole:
            finished.append(run)
        trials += 1
        left -= ran
    return Search(runs.best(finished), trials, eighths - left)


def _play(trial: Trial, curve: NDArray[np.float64], left: int) -> tuple[int, TrialState]:
    """Report a run eighth by eighth, while it can be paid; how many there were, and how it ended."""
    for ran in range(1, min(left, POINTS) + 1):
        if ran == POINTS:
            return ran, TrialState.COMPLETE
        trial.report(float(curve[ran - 1]), ran)
        if trial.should_prune():
            return ran, TrialState.PRUNED
    return left, TrialState.FAIL


# ---- records -----------------------------------------------------------------------------------------------


def _runs_of_search(samples: Sequence[Sample], task: str, budget: float, quarters: bool) -> tuple[Runs, int]:
    """The runs that a search draws from, and how many of them cost one budget."""
    each = QUARTERS if quarters else 1
    return Runs.of(samples, task, budget / each), each


def _named(search: str, times: int, quarters: bool) -> str:
    return f"{search} ×{times}{' (quarter runs)' if quarters else ''}"


def _as_sample(arm: str, budget: float, runs: Runs, found: Sequence[Search], each: int) -> Sample:
    """What n replays found; `each` runs cost one budget. The mean price, in budgets, is among the events."""
    chosen = [(runs.sizes[search.best.size], search.best.member) for search in found]
    return Sample(
        task=runs.sizes[0].task,
        arm=arm,
        budget=budget,
        rate=round(float(np.mean([size.rate for size, _ in chosen])), 4),
        validation=[size.validation[member] for size, member in chosen],
        test=[size.test[member] for size, member in chosen],
        parameters=[size.parameters[member] for size, member in chosen],
        cost=[size.cost[member] for size, member in chosen],
        events={
            "trials": round(float(np.mean([search.trials for search in found])), 3),
            "budgets": round(float(np.mean([search.eighths for search in found])) / (POINTS * each), 4),
        },
        shapes=dict(Counter(size.arm for size, _ in chosen).most_common()),
    )
