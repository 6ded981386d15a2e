"""Could a learned allocator win that divides one budget among runs, with stopping and forking?

    python -m studies.allocation --out FILE      40 minutes of a core; extras searches and rates
    python -m studies.allocation --read FILE     the tables, in some minutes

Somebody has the compute of 2, 4 or 8 runs of the perceptron of `studies.held_out` and does not know the
learning rate. Plans that stop networks are replayed from learning curves: the compute of a network counts
until it is stopped. All arms have the same training FLOPs and read validations for free; where several
networks reach the end, the one with the best score on the whole validation split counts.

    H1   the best plan for each task minus the best function of known facts (samples, columns, classes)
    H2   what a predictor wins over that function, which stops networks by 12 or 19 % of their curves
    H3   what it wins over the better of that function and successive halving with two tuned parameters

The best plan for a task is chosen by the other twin on one half of the test split. All else is fitted and
chosen on tasks of other shapes. Intervals are over shapes, which share no task.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any

import numpy as np
from sklearn.ensemble import HistGradientBoostingRegressor
from sklearn.linear_model import RidgeCV
from sklearn.model_selection import GroupKFold
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import PolynomialFeatures, StandardScaler

from studies import command_line
from studies.allocation_runs import (
    EARLY,
    FORKS,
    NETWORKS,
    RATES,
    RUNGS,
    STEPS,
    TIMES,
    TWINS,
    Floats,
    Ints,
    judge,
)
from studies.headroom.analysis import LEAST_HEADROOM, LEAST_SHARE, choose, interval

FOLDS, INNER_FOLDS = 5, 3
SHARES = (0.0, 0.05, 0.1, 0.2, 0.4, 0.7, 1.0)  # by which a task's own scores choose the best plan for it
FORMS = ("one plan", "tree", "ridge", "quadratic")  # of functions of facts
PROBE = 7  # the number of the rate 0.036, about the best for all tables
REPLAYS = 8  # drawn orders of candidates, for each twin of a task
WIDTHS = (1, 2, len(RATES))  # candidates are drawn so many rates around the one by facts; the last: anywhere
MEASURED, LEARNED = ("accuracy", "loss"), ("ridge", "boosting")  # what candidates are ranked by
MODELS: dict[str, Callable[[], Any]] = {
    "ridge": lambda: make_pipeline(
        StandardScaler(), PolynomialFeatures(2, include_bias=False), RidgeCV(np.logspace(0, 4, 5))
    ),
    "boosting": lambda: HistGradientBoostingRegressor(
        max_iter=50, max_leaf_nodes=15, min_samples_leaf=40, random_state=0
    ),
}


# ---- replaying what stops ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Schedule:
    """Successive halving: one in `eta` candidates goes on at each rung. Without rungs it is random search."""

    rungs: tuple[int, ...] = ()
    eta: int = 1

    def counts(self, times: int, most: int) -> list[int]:
        """Return how many candidates start, `most` or fewer, and go on from each rung, for that compute.

        What is left lets more of them go on from the last rung.
        """
        lengths = np.diff((0, *self.rungs, STEPS)).tolist()
        found, spare = [0], 0
        for start in range(1, most + 1):
            kept = [max(1, start // self.eta**k) for k in range(len(lengths))]
            left = times * STEPS - sum(n * length for n, length in zip(kept, lengths, strict=True))
            if left < 0:
                break
            found, spare = kept, left
        if self.rungs:
            found[-1] = min(found[-2], found[-1] + spare // lengths[-1])
        return found


def halvings() -> list[Schedule]:
    """Return the two-parameter family: first rung and eta."""
    found = []
    for first, eta in product((1, 2, 4, 8), (2, 4)):
        rungs = [first * eta**k for k in range(4) if first * eta**k < STEPS]
        found.append(Schedule(tuple(rungs), eta))
    return found


ONCE = [Schedule((rung,), eta) for rung in EARLY for eta in (2, 4, 8)]  # one decision, after 12 or 19 %
SCHEDULES = [*halvings(), *ONCE]
SEARCH = Schedule()
Ranking = Callable[[int, Ints], Floats]  # of a rung and candidates [C, replays, n], higher is better


@dataclass(frozen=True)
class Config:
    """A way to allocate: when to stop, how far around the rate by facts to draw, what to rank by."""

    schedule: Schedule
    width: int
    ranking: str

    def __str__(self) -> str:
        rungs = ", ".join(map(str, self.schedule.rungs))
        return f"1 in {self.schedule.eta} after {rungs}; width {self.width}; by {self.ranking}"


@dataclass(frozen=True)
class Table:
    """The records as arrays: T tasks, 2 twins of each, and C candidates of each twin, rate by rate."""

    facts: Floats  # [T, 3] logarithms
    shapes: Ints  # [T]
    validation: Floats  # [T, 2, C] points
    test: Floats  # [T, 2, 2, C] points, on each half of the test split
    curves: dict[str, Floats]  # [rungs, T, 2, C]: accuracy, loss, training_loss
    forked: Floats  # [T, twins, 2, forks, times] points
    longer: dict[int, Floats]  # [T, twins, 2, rates] points

    @staticmethod
    def of(records: Sequence[Mapping[str, Any]]) -> Table:
        """Arrange records."""

        def grid(name: str) -> Floats:  # [T, ..., rates, twins · networks] → [..., T, twins, C]
            found = np.array([record["grid"][name] for record in records], dtype=np.float64)
            found = found.reshape(*found.shape[:-1], TWINS, NETWORKS)
            found = np.moveaxis(found, -2, 1)  # [T, twins, ..., rates, networks]
            return found.reshape(*found.shape[:-2], -1)

        def others(name: str) -> Floats:  # [T, 2, ...]
            return np.array([record[name]["test"] for record in records]) / 10.0

        curves = {name: np.moveaxis(grid(name), 2, 0) for name in ("accuracy", "loss", "training_loss")}
        return Table(
            facts=np.log([record["facts"] for record in records]),
            shapes=np.array([record["shape"] for record in records]),
            validation=grid("validation") / 10.0,
            test=grid("test") / 10.0,
            curves=curves,
            forked=np.moveaxis(others("forked"), 3, 1),
            longer={times: np.moveaxis(others(f"longer {times}"), 3, 1) for times in TIMES},
        )

    @cached_property
    def keys(self) -> Floats:
        """Random keys that order candidates, the same for all arms.  # [T, 2, replays, C]"""
        shape = (*self.validation.shape[:2], REPLAYS, self.validation.shape[2])
        return np.random.default_rng(0).random(shape)


RATE_OF = np.arange(len(RATES)).repeat(NETWORKS)  # [C] the number of each candidate's rate


def draw(keys: Floats, centre: Ints, width: int) -> tuple[Ints, int]:
    """Order candidates at random, those near a rate first; return the order and how many are near.

    keys [m, 2, replays, C], centre [m] → [m, 2, replays, C]
    """
    if width >= len(RATES):
        return keys.argsort(axis=-1), keys.shape[-1]
    inside = np.clip(centre, width, len(RATES) - 1 - width)[:, None]  # as many for every centre
    far = np.abs(RATE_OF - inside) > width
    return (keys + far[:, None, None]).argsort(axis=-1), (2 * width + 1) * NETWORKS


def take(values: Floats, chosen: Ints) -> Floats:
    """Take values of candidates.  # [m, 2, C], [m, 2, replays, n] → [m, 2, replays, n]"""
    return np.take_along_axis(values[:, :, None], chosen, axis=-1)


def replay(
    table: Table, tasks: Ints, drawn: tuple[Ints, int], times: int, schedule: Schedule, rank: Ranking
) -> Floats:
    """Return the test score of what an allocator finds, mean over replays.  # → [m, 2 twins, 2 halves]"""
    order, most = drawn
    start, *going = schedule.counts(times, most)
    alive = order[..., :start]
    for rung, kept in zip(schedule.rungs, going, strict=True):
        best = np.argsort(-rank(rung, alive), axis=-1, kind="stable")[..., :kept]
        alive = np.take_along_axis(alive, best, axis=-1)
    last = take(table.validation[tasks], alive).argmax(axis=-1)[..., None]
    found = np.take_along_axis(alive, last, axis=-1)  # [m, 2, replays, 1]
    halves = [take(table.test[tasks, :, half], found).mean(axis=(2, 3)) for half in range(2)]
    return np.stack(halves, axis=2)


def by_measure(table: Table, tasks: Ints, name: str) -> Ranking:
    """Rank by the accuracy or the loss on validation data at a rung."""
    sign, curves = (1.0 if name == "accuracy" else -1.0), table.curves[name]
    return lambda rung, alive: sign * take(curves[RUNGS.index(rung), tasks], alive)


def plans(table: Table, times: int) -> Floats:
    """Score allocation plans that are the same for all tasks.  # → [T, twins, 2, P]

    `times` networks at each rate; random search and halving over all rates; halving around each rate.
    """
    tasks = np.arange(len(table.facts))
    rank, found = by_measure(table, tasks, "accuracy"), []
    around = [(rate, 0, SEARCH) for rate in range(len(RATES))]
    around += [(rate, 1, SCHEDULES[2]) for rate in range(1, len(RATES) - 1)]
    for rate, width, schedule in around:
        drawn = draw(table.keys, np.full(len(tasks), rate), width)
        found.append(replay(table, tasks, drawn, times, schedule, rank))
    everywhere = draw(table.keys, tasks, len(RATES))
    found += [replay(table, tasks, everywhere, times, one, rank) for one in (SEARCH, *SCHEDULES)]
    return np.stack(found, axis=3)


# ---- what is fitted ----------------------------------------------------------------------------------------


def choose_by_facts(table: Table, scores: Floats, fitted: Ints, form: str = "") -> Ints:
    """Choose a plan for every task by its facts, from the scores of some; so is the form, unless given.

    scores [T, twins, P] → [T]
    """
    # Gains are counted from the first plan: the best of the fitted tasks is the least noisy reference.
    order = np.argsort(-scores[fitted].mean(axis=(0, 1)), kind="stable")
    known = scores[fitted][..., order]
    form = form or best_form(table, known, fitted)
    gains = (known - known[..., :1]).mean(axis=1)
    found: Ints = order[choose(table.facts[fitted], gains, table.facts, form)]
    return found


def best_form(table: Table, known: Floats, fitted: Ints) -> str:
    """Return the form of a function of facts that wins most on tasks left out.  # known [m, twins, P]"""
    facts, means, values = table.facts[fitted], known.mean(axis=1), dict.fromkeys(FORMS, 0.0)
    for own, left in GroupKFold(INNER_FOLDS).split(facts, groups=table.shapes[fitted]):
        for form in FORMS:
            chosen = choose(facts[own], means[own] - means[own][:, :1], facts[left], form)
            values[form] += float(means[left, chosen].sum())
    return max(values, key=lambda form: values[form])


def with_curves(table: Table, twin: int) -> Table:
    """Return the table with the early curve of a twin's first network at one rate among the facts."""
    first = PROBE * NETWORKS
    curves = [table.curves[name][RUNGS.index(rung), :, twin, first] for name in MEASURED for rung in EARLY]
    return replace(
        table,
        facts=np.column_stack([table.facts, *curves, *table.curves["training_loss"][:, :, twin, first]]),
    )


def best_for_each(scores: Floats, fitted: Ints) -> Floats:
    """Score the best plan for each task, chosen by the other twin on the other half of the test split.

    The scores that choose are noisy: each is drawn towards its plan's mean over the fitted tasks, by the
    share that wins most there. Share 1 is `oracle` of `studies.headroom`.  # [T, twins, 2, P] → [T]
    """
    gains, tasks = scores - scores.mean(axis=3, keepdims=True), np.arange(len(scores))
    usual, found = gains[fitted].mean(axis=(0, 1, 2)), []
    for share in SHARES:
        value = np.zeros(len(scores))
        for twin, half in product(range(TWINS), range(2)):
            best = (usual + share * (gains[:, 1 - twin, 1 - half] - usual)).argmax(axis=1)
            value += scores[tasks, twin, half, best] / (2 * TWINS)
        found.append(value)
    return max(found, key=lambda value: float(value[fitted].mean()))


class Fitted:
    """What is learned from some tasks: the rate by facts, and the score of a candidate at the end."""

    def __init__(self, table: Table, tasks: Ints, rates: Floats, form: str):
        """rates [T, twins, rates]: scores of networks at each; form: of the function of facts"""
        self.table, self.tasks = table, tasks
        self.rate = choose_by_facts(table, rates, tasks, form)  # [T] the number of the rate by facts
        self._models: dict[tuple[str, int], Any] = {}

    def ranking(self, name: str, tasks: Ints) -> Ranking:
        """Rank by a measurement, or by the score that a model predicts for the end."""
        if name in MEASURED:
            return by_measure(self.table, tasks, name)

        def rank(rung: int, alive: Ints) -> Floats:
            rows = describe(self.table, tasks, rung, alive)
            predicted = self._model(name, rung).predict(rows.reshape(-1, rows.shape[-1]))
            return np.asarray(predicted, dtype=np.float64).reshape(alive.shape)

        return rank

    def _model(self, name: str, rung: int) -> Any:
        """Return the model for a rung, fitted on candidates that were drawn anywhere and near a rate."""
        if (name, rung) not in self._models:
            table, centre, rows, gains = self.table, self.rate[self.tasks], [], []
            for width, count in ((WIDTHS[-1], 16), (WIDTHS[1], 8)):
                drawn = draw(table.keys[self.tasks][:, :, :4], centre, width)[0][..., :count]
                ends = take(table.test[self.tasks].mean(axis=2), drawn)
                rows.append(describe(table, self.tasks, rung, drawn))
                gains.append(ends - ends.mean(axis=-1, keepdims=True))  # what a task has in common drops out
            inputs = np.concatenate([one.reshape(-1, one.shape[-1]) for one in rows])
            targets = np.concatenate([one.ravel() for one in gains])
            self._models[name, rung] = MODELS[name]().fit(inputs, targets)
        return self._models[name, rung]


def describe(table: Table, tasks: Ints, rung: int, alive: Ints) -> Floats:
    """Describe candidates by their rate, the task's facts, and their curves until a rung.

    alive [m, 2, replays, n] → [m, 2, replays, n, features]
    """
    seen, early = (
        [k for k, at in enumerate(RUNGS) if at <= rung],
        [k for k, at in enumerate(EARLY) if at <= rung],
    )
    facts = [np.broadcast_to(fact[:, None, None, None], alive.shape) for fact in table.facts[tasks].T]
    curves = [take(table.curves[name][k, tasks], alive) for name in MEASURED for k in seen]
    training = [take(table.curves["training_loss"][k, tasks], alive) for k in early]
    latest = [curves[len(seen) - 1], curves[-1]]
    # Beside the others at this rung: an accuracy says little without the difficulty of the task.
    beside = [curve - curve.mean(axis=-1, keepdims=True) for curve in latest]
    columns = [RATE_OF[alive].astype(np.float64), *facts, *curves, *training, *beside]
    return np.stack(columns, axis=-1)


RULES = [Config(*one) for one in product(SCHEDULES, WIDTHS, MEASURED)]
PREDICTORS = [Config(*one) for one in product(SCHEDULES, WIDTHS, LEARNED)]
ANYWHERE = WIDTHS[-1]
ARMS: dict[str, list[Config]] = {
    "halving, rates anywhere": [one for one in RULES if one.width == ANYWHERE],
    "halving": RULES,
    "predictor, rates anywhere": [o for o in PREDICTORS if o.width == ANYWHERE and o.schedule in ONCE],
    "predictor": [one for one in PREDICTORS if one.schedule in ONCE],
    "predictor at every rung": PREDICTORS,
}


def score_configs(
    table: Table, fitted: Fitted, tasks: Ints, times: int, configs: Sequence[Config]
) -> dict[Config, Floats]:
    """Return the test score of ways to allocate on tasks, mean over twins.  # [m] each"""
    drawn = {
        width: draw(table.keys[tasks], fitted.rate[tasks], width) for width in {one.width for one in configs}
    }
    return {
        one: replay(
            table, tasks, drawn[one.width], times, one.schedule, fitted.ranking(one.ranking, tasks)
        ).mean(axis=(1, 2))
        for one in configs
    }


def evaluate(table: Table) -> tuple[dict[int, dict[str, Floats]], list[str]]:
    """Score every arm at every budget on tasks that it was not fitted on.  # [T] each; and what was chosen"""
    everything = {times: plans(table, times) for times in TIMES}
    whole = {times: scores.mean(axis=2) for times, scores in everything.items()}  # [T, twins, P]
    rates = np.mean([scores[..., : len(RATES)] for scores in whole.values()], axis=0)
    longer = {times: scores.mean(axis=2) for times, scores in table.longer.items()}
    both = {times: np.concatenate([whole[times], longer[times]], axis=2) for times in TIMES}
    forked = table.forked.mean(axis=(1, 2))  # [T, forks, times]
    near = np.array([near for _, _, near in FORKS])
    values: dict[int, dict[str, Floats]] = {times: {} for times in TIMES}
    chosen: list[str] = []

    def put(times: int, name: str, left: Ints, found: Floats) -> None:
        values[times].setdefault(name, np.zeros(len(table.facts)))[left] = found

    for fit, left in GroupKFold(FOLDS).split(table.facts, groups=table.shapes):
        form = best_form(table, rates[fit][..., ::-1], fit)
        final = Fitted(table, fit, rates, form)
        inner = [
            (Fitted(table, fit[a], rates, form), fit[b])
            for a, b in GroupKFold(INNER_FOLDS).split(fit, groups=table.shapes[fit])
        ]
        for k, times in enumerate(TIMES):
            put(times, "rate by facts", left, whole[times][left, :, final.rate[left]].mean(axis=1))
            for name, scores in {"function": whole, "longer": longer, "function or longer": both}.items():
                own = choose_by_facts(table, scores[times], fit)
                put(times, name, left, scores[times][left, :, own[left]].mean(axis=1))
            put(times, "oracle", left, best_for_each(everything[times], fit)[left])
            free = np.concatenate([everything[times], table.longer[times]], axis=3)
            put(times, "free oracle", left, best_for_each(free, fit)[left])
            told = [choose_by_facts(with_curves(table, twin), both[times], fit) for twin in range(TWINS)]
            ends = [both[times][left, twin, own[left]] for twin, own in enumerate(told)]
            put(times, "free predictor", left, np.mean(ends, axis=0))
            for name, some in {"forks, rates anywhere": ~near, "forks": near | ~near}.items():
                best = np.where(some, forked[fit, :, k].mean(axis=0), -np.inf).argmax()
                put(times, name, left, forked[left, best, k])
            configs = list(dict.fromkeys(one for several in ARMS.values() for one in several))
            tried = [score_configs(table, one, tasks, times, configs) for one, tasks in inner]
            for name, several in ARMS.items():
                pick = max(several, key=lambda one: float(np.mean(np.concatenate([t[one] for t in tried]))))
                put(times, name, left, score_configs(table, final, left, times, [pick])[pick])
                chosen.append(f"×{times} {name}: {pick}")
    for times in TIMES:
        of, hindsight = values[times], whole[times].mean(axis=1)
        of["random search"] = hindsight[:, 2 * len(RATES) - 2]
        of["hindsight"] = hindsight.max(axis=1)
    return values, chosen


# ---- the report --------------------------------------------------------------------------------------------


def headroom(of: Mapping[str, Floats]) -> dict[str, Floats]:
    """Return H1, H2 and H3 of every task, and what else is told.  # [T] each"""
    # The better on these very tasks: chance helps the opponent, never the predictor.
    rival = max((of["function"], of["halving"]), key=lambda each: float(each.mean()))
    base = "rate by facts"
    others = [n for n in of if n not in (base, "oracle", "hindsight", "free oracle", "free predictor")]
    return {
        "H1: best plan for each task − function of facts": of["oracle"] - of["function"],
        "H2: predictor − function of facts": of["predictor"] - of["function"],
        "H3: predictor − the better of function and halving": of["predictor"] - rival,
        "best plan in hindsight − function of facts (upper bound)": of["hindsight"] - of["function"],
        "predictor at every rung − the better of both": of["predictor at every rung"] - rival,
        "predictor − halving, rates anywhere": of["predictor, rates anywhere"]
        - of["halving, rates anywhere"],
        "H1 with longer runs among the plans": of["free oracle"] - of["function or longer"],
        "H2 with longer runs, the curve for free": of["free predictor"] - of["function or longer"],
        **{f"{name} − as many whole runs at the rate by facts": of[name] - of[base] for name in others},
    }


def report(records: Sequence[Mapping[str, Any]]) -> str:
    """Return the table for every budget, in points, and what follows."""
    table = Table.of(records)
    values, chosen = evaluate(table)
    found = {times: headroom(of) for times, of in values.items()}
    lines = [f"{len(records)} tasks of {len(set(table.shapes))} shapes; 95 % intervals", ""]
    lines += [f"| points of test accuracy | {' | '.join(f'×{t}' for t in TIMES)} |", "|---" * 4 + "|"]
    for name in found[TIMES[0]]:
        each = [interval(found[times][name], table.shapes) for times in TIMES]
        lines.append(f"| {name} | {' | '.join(f'{m:+.2f} ({a:+.2f} to {b:+.2f})' for m, a, b in each)} |")
    levels = " ".join(f"×{times} {of['rate by facts'].mean():.2f}" for times, of in values.items())
    lines += ["", f"test accuracy of whole runs at the rate by facts: {levels}", "", "chosen, in folds:"]
    lines += [f"{count} {name}" for name, count in sorted(Counter(chosen).items())]
    means = {times: [float(each.mean()) for each in rows.values()] for times, rows in found.items()}
    lines += ["", *(f"×{times}: {verdict(own[0], own[2])}" for times, own in means.items())]
    return "\n".join(lines)


def verdict(h1: float, h3: float) -> str:
    """Say whether both bars are met."""
    if h1 > LEAST_HEADROOM and h3 > LEAST_SHARE * h1:
        return "there is something for a learned allocator to win"
    return f"nothing to win: H1 {h1:+.2f} of more than {LEAST_HEADROOM:g}, H3 {h3:+.2f} of {LEAST_SHARE} H1"


def main(arguments: Sequence[str] | None = None) -> None:
    """Train all networks, or print the tables of files."""
    command_line.run_trainings(arguments, __doc__, 0, judge, report)


if __name__ == "__main__":
    command_line.run(main)
