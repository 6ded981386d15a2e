"""H1, H2 and H3 from the records of cells, in points of test accuracy on cells that were not fitted on.

    H1   the best plan for each cell minus the best function of (budget, host size, data size)
    H2   what a predictor wins over that function, which sees the first 15 % of the curve and all known facts
    H3   what it wins over the better of that function and a reactive rule with two tuned parameters

The best plan for a cell is chosen by the other twins on one half of the test split, and scored by this twin
on the other half: what is best by luck earns nothing. Functions and predictor choose a plan by predicted
scores; they are fitted on other cells, and their form is chosen there too. Cells of a group share budget and
host: where there are groups enough, folds and intervals are over groups, else over cells, which never share a
task. H1 is a lower bound, because few twins choose; what is chosen and scored by all twins together is an
upper one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.ensemble import ExtraTreesRegressor, GradientBoostingRegressor
from sklearn.linear_model import RidgeCV
from sklearn.model_selection import GroupKFold
from sklearn.multioutput import MultiOutputRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import PolynomialFeatures, StandardScaler
from sklearn.tree import DecisionTreeRegressor

from studies.headroom.runs import CHANGE_AT, STOP

Floats = NDArray[np.float64]
FOLDS, INNER_FOLDS = 5, 3
LEAST_GROUPS = 20  # with fewer, a fold of groups would leave out whole ranges of budgets and sizes
DRAWS = 4000  # of the bootstrap
LEAST_HEADROOM = 1.0  # points: under this there is nothing to decide
LEAST_SHARE = 0.3  # of H1 that must be left beyond a reactive rule
KNOTS = np.linspace(0.03, CHANGE_AT, 5)  # shares of the budget at which curves are read

MODELS: dict[str, Callable[[], Any]] = {
    "tree": lambda: DecisionTreeRegressor(max_depth=3, min_samples_leaf=8, random_state=0),
    "ridge": lambda: make_pipeline(StandardScaler(), RidgeCV(np.logspace(0, 4, 9))),
    "quadratic": lambda: make_pipeline(
        StandardScaler(), PolynomialFeatures(2, include_bias=False), RidgeCV(np.logspace(1, 5, 9))
    ),
    "forest": lambda: ExtraTreesRegressor(150, min_samples_leaf=4, random_state=0),
    "boosting": lambda: MultiOutputRegressor(
        GradientBoostingRegressor(
            n_estimators=40, learning_rate=0.1, subsample=0.7, max_features=0.3, random_state=0
        )
    ),
}


@dataclass(frozen=True)
class Table:
    """The records as arrays: C cells, twins, P plans and R rules."""

    plans: tuple[str, ...]
    rules: tuple[str, ...]
    scores: Floats  # [C, twins, 2, P] points, on each half of the test split
    rule_scores: Floats  # [C, twins, R] points
    known: Floats  # [C, 3] log budget, size, log data
    facts: Floats  # [C, facts] what else is known beforehand, the initial rate included
    curves: Floats  # [C, twins, features]
    families: tuple[str, ...]
    groups: NDArray[np.int64]  # [C] cells that stay together in folds and intervals

    @property
    def means(self) -> Floats:
        """Scores over both halves.  # [C, twins, P]"""
        mean: Floats = self.scores.mean(axis=2)
        return mean


def table_of(records: Sequence[Mapping[str, Any]]) -> Table:
    """Arrange records; the plan "stop early" is static with the weights of its best epoch."""
    arms = tuple(records[0]["arms"])
    fixed = tuple(arm for arm in arms if not arm.startswith("rule "))
    rules = tuple(arm for arm in arms if arm.startswith("rule "))

    def scores(names: Sequence[str], column: str) -> Floats:
        found = np.array([[record["arms"][name][column] for name in names] for record in records])
        return 100.0 * np.moveaxis(found, 1, 3)  # [C, P, twins, 2] → [C, twins, 2, P]

    kinds = sorted({record["family"] for record in records})
    known = [[np.log(r["budget"]), r["size"], np.log(r["samples"])] for r in records]
    facts = [
        [
            np.log(r["rate"]),
            np.log(r["updates"]),
            np.log(r["updates"] / r["samples"]),
            np.log(r["host_parameters"]),
            r["classes"],
            *(float(r["family"] == kind) for kind in kinds),
        ]
        for r in records
    ]
    return Table(
        plans=(*fixed, STOP),
        rules=rules,
        scores=np.concatenate([scores(fixed, "final"), scores(fixed[:1], "best")], axis=3),
        rule_scores=scores(rules, "final").mean(axis=2),
        known=np.array(known),
        facts=np.array(facts),
        curves=np.array([curve_features(record["curve"], record["classes"]) for record in records]),
        families=tuple(record["family"] for record in records),
        groups=groups_of(records),
    )


def groups_of(records: Sequence[Mapping[str, Any]]) -> NDArray[np.int64]:
    """Number the groups of cells; every cell is one of its own where there are too few.  # → [C]"""
    names = [(record["family"], record["group"]) for record in records]
    number = {name: k for k, name in enumerate(dict.fromkeys(names))}
    together = len(number) >= LEAST_GROUPS
    return np.array([number[name] for name in names]) if together else np.arange(len(names))


def curve_features(curve: Mapping[str, Any], classes: int) -> list[list[float]]:
    """Describe the curve of every twin until plans part; losses are relative to that of chance."""
    spent = np.asarray(curve["spent"])
    until = spent <= CHANGE_AT + 1e-6 if (spent <= CHANGE_AT + 1e-6).any() else spent <= spent[0]
    found = []
    for training, loss, accuracy in zip(
        curve["training_loss"], curve["loss"], curve["accuracy"], strict=True
    ):
        lines = [np.nan_to_num(np.asarray(x, dtype=np.float64)[until], nan=20.0) for x in (training, loss)]
        lines = [np.log(np.clip(line / np.log(classes), 1e-3, 20.0)) for line in lines]
        lines.append(np.asarray(accuracy)[until])
        read = [np.interp(KNOTS, spent[until], line) for line in lines]
        slopes = [line[-1] - line[len(line) // 2] for line in read]
        rises = [np.diff(line, prepend=line[0]).max() for line in lines[:2]]
        best = [lines[1][-1] - lines[1].min(), lines[1][-1] - lines[0][-1]]  # above its best; the gap
        found.append([float(x) for x in (*np.concatenate(read), *slopes, *rises, *best)])
    return found


# ---- policies: from features to a plan ---------------------------------------------------------------------


def choose(train: Floats, targets: Floats, wanted: Floats, model: str) -> NDArray[np.int64]:
    """Fit a model on the gains of all plans and choose the best plan for other rows.

    train [n, features], targets [n, P], wanted [m, features] → [m]; "one plan" is the best on the mean.
    """
    if model == "one plan":
        return np.full(len(wanted), int(targets.mean(axis=0).argmax()))
    fitted = MODELS[model]().fit(train, targets)
    chosen: NDArray[np.int64] = np.asarray(fitted.predict(wanted)).argmax(axis=1)
    return chosen


def best_model(features: Floats, scores: Floats, groups: NDArray[np.int64]) -> str:
    """Find the form of a policy that wins most on cells left out.

    features [C, twins, F], scores [C, twins, P], groups [C]
    """
    inner = GroupKFold(INNER_FOLDS)
    values = dict.fromkeys(("one plan", *MODELS), 0.0)
    for fitted, left in inner.split(features, groups=groups):
        for model in values:
            chosen = _choose_cells(features, scores, fitted, left, model)
            values[model] += float(_take(scores[left], chosen).sum())
    return max(values, key=lambda name: values[name])


def _choose_cells(
    features: Floats, scores: Floats, fitted: NDArray[np.int64], wanted: NDArray[np.int64], model: str
) -> NDArray[np.int64]:
    """Choose for every twin of some cells from the others.  # → [m, twins]"""
    twins = features.shape[1]
    gains = scores - scores[:, :, :1]  # above static: what tasks have in common drops out
    # The mean over twins is the less noisy target; each twin shows it beside its own curve.
    targets = np.repeat(gains[fitted].mean(axis=1), twins, axis=0)
    rows = features[fitted].reshape(-1, features.shape[2])
    asked = features[wanted].reshape(-1, features.shape[2])
    return choose(rows, targets, asked, model).reshape(len(wanted), twins)


def _take(scores: Floats, chosen: NDArray[np.int64]) -> Floats:
    """The scores of chosen plans.  # [m, twins, P], [m, twins] → [m, twins]"""
    return np.take_along_axis(scores, chosen[..., None], axis=2)[..., 0]


def oracle(scores: Floats) -> Floats:
    """Score the best plan for each cell, chosen by the other twins on the other half.

    # [C, twins, 2, P] → [C]
    """
    cells, twins = scores.shape[:2]
    value = np.zeros(cells)
    for twin in range(twins):
        others = np.delete(scores, twin, axis=1).mean(axis=1)  # [C, 2, P]
        for half in range(2):
            best = others[:, 1 - half].argmax(axis=1)
            value += scores[np.arange(cells), twin, half, best] / (2 * twins)
    return value


# ---- the three figures -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Values:
    """Points of test accuracy of each cell, all chosen without its scores; forms: models by fold."""

    of: dict[str, Floats]  # [C] each
    forms: dict[str, list[str]]


def evaluate(table: Table) -> Values:
    """Score every policy on cells that it was not fitted on."""
    cells, twins = table.means.shape[:2]
    known = np.repeat(table.known[:, None], twins, axis=1)
    facts = np.concatenate([known, np.repeat(table.facts[:, None], twins, axis=1)], axis=2)
    seen = {
        "function": known,
        "facts": facts,
        "predictor": np.concatenate([facts, table.curves], axis=2),
    }
    found = {name: np.zeros(cells) for name in (*seen, "rule")}
    forms: dict[str, list[str]] = {name: [] for name in (*seen, "rule")}
    for fitted, left in GroupKFold(FOLDS).split(known, groups=table.groups):
        for name, features in seen.items():
            model = best_model(features[fitted], table.means[fitted], table.groups[fitted])
            chosen = _choose_cells(features, table.means, fitted, left, model)
            found[name][left] = _take(table.means[left], chosen).mean(axis=1)
            forms[name].append(model)
        rule = int(table.rule_scores[fitted].mean(axis=(0, 1)).argmax())
        found["rule"][left] = table.rule_scores[left, :, rule].mean(axis=1)
        forms["rule"].append(table.rules[rule])
    found["static"] = table.means[:, :, 0].mean(axis=1)
    found["oracle"] = oracle(table.scores)
    found["hindsight"] = table.means.mean(axis=1).max(axis=1)
    return Values(found, forms)


def interval(values: Floats, groups: NDArray[np.int64], seed: int = 0) -> tuple[float, float, float]:
    """Return the mean over cells and its 95 % interval, by bootstrap over groups.  # values, groups [C]"""
    rng = np.random.default_rng(seed)
    _, index = np.unique(groups, return_inverse=True)
    count, total = np.bincount(index), np.bincount(index, weights=values)
    drawn = rng.integers(len(count), size=(DRAWS, len(count)))
    means = total[drawn].sum(axis=1) / count[drawn].sum(axis=1)
    low, high = np.quantile(means, (0.025, 0.975))
    return float(values.mean()), float(low), float(high)


def headroom(values: Values) -> dict[str, Floats]:
    """Return H1, H2 and H3 of every cell.  # [C] each"""
    of = values.of
    # The better on these very cells: chance helps the opponent, never the predictor, so that H3 <= H2.
    opponent = max(of["function"], of["rule"], key=lambda each: float(each.mean()))
    return {
        "H1": of["oracle"] - of["function"],
        "H2": of["predictor"] - of["function"],
        "H3": of["predictor"] - opponent,
    }


def verdict(h1: float, h3: float, lowest_h1: float = np.inf, lowest_h3: float = np.inf) -> str:
    """Say what follows from H1 and H3, and from the lower ends of their intervals."""
    if h1 >= LEAST_HEADROOM > lowest_h1 or (h3 >= LEAST_SHARE * h1 and lowest_h3 < 0):
        return "The intervals are too wide to say whether there is something to decide: run more groups."
    if h1 < LEAST_HEADROOM:
        return "H1 is under one point: this environment has nothing to decide."
    if h3 < LEAST_SHARE * h1:
        return "H3 is under 0.3 of H1: the curve does not tell enough beyond what a simple rule wins."
    return "H1 is at least one point and H3 at least 0.3 of it: this environment has something to decide."


def report(records: Sequence[Mapping[str, Any]], seed: int = 0) -> str:
    """The table, with a sentence on what follows; raises ValueError for too few cells."""
    if len(records) < 2 * FOLDS:
        raise ValueError(
            f"the files hold {len(records)} cells; at least {2 * FOLDS} are needed: run more groups"
        )
    table = table_of(records)
    values = evaluate(table)
    of, found = values.of, headroom(values)
    rows = {
        "H1: best plan for each cell − function of (budget, size, data)": found["H1"],
        "H2: predictor from the curve − that function": found["H2"],
        "H3: predictor − the better of function and reactive rule": found["H3"],
        "best plan in hindsight − that function (upper bound)": of["hindsight"] - of["function"],
        "predictor without the curve − that function": of["facts"] - of["function"],
        "predictor − predictor without the curve": of["predictor"] - of["facts"],
        "reactive rule − that function": of["rule"] - of["function"],
        "that function − static": of["function"] - of["static"],
    }
    shown = [(name, each, np.ones(len(records), dtype=bool)) for name, each in rows.items()]
    for kind in sorted(set(table.families)):
        here = np.array(table.families) == kind
        shown += [(f"{name} on {kind}", each, here) for name, each in found.items()]
    lines = ["| points of test accuracy | mean | 95 % interval | cells |", "| --- | ---: | ---: | ---: |"]
    for name, each, here in shown:
        mean, low, high = interval(each[here], table.groups[here], seed)
        lines.append(f"| {name} | {mean:+.2f} | {low:+.2f} to {high:+.2f} | {here.sum()} |")
    gains = (table.means - table.means[:, :, :1]).mean(axis=(0, 1))
    each_plan = (f"{plan} {gain:+.2f}" for plan, gain in zip(table.plans, gains, strict=True))
    lines += ["", f"mean gain over static: {', '.join(each_plan)}"]
    lines += [f"{name}: {', '.join(form)}" for name, form in values.forms.items()]
    h1, h2, h3 = (float(found[name].mean()) for name in ("H1", "H2", "H3"))
    lowest = {name: interval(each, table.groups, seed)[1] for name, each in found.items()}
    share = f" H2 recovers {h2 / h1:.0%} of H1." if min(h1, h2) > 0 else ""
    return "\n".join([*lines, "", verdict(h1, h3, lowest["H1"], lowest["H3"]) + share])
