"""The predictor: what to do from what was seen of a stream, learned on streams whose shifts are known.

It begins as an imitation of the oracle that is told the shifts: a classifier names the response that the
oracle gave to a shift in the last minibatches. Then regression on branches, in which each action was tried at
one decision, may replace what it does by what promises more. After each fit the best policy on the streams to
tune on goes on, the reactive rule among them, so that a fit that does not help does no harm.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.ensemble import ExtraTreesClassifier, ExtraTreesRegressor, HistGradientBoostingClassifier

from studies.command_line import with_progress
from studies.streams.data import Bank, Floats
from studies.streams.networks import train
from studies.streams.policies import (
    ACTIONS,
    EVERY,
    RESPONSES,
    SINCE,
    Chooser,
    Controlled,
    Settings,
    mean_score,
    oracle_plans,
)  # fmt: skip

Ints = NDArray[np.int64]
KEEP, RESPOND = 1, len(ACTIONS) - len(RESPONSES)  # actions: RESPOND + k is response k
THRESHOLDS = (0.3, 0.5, 0.7)  # of the probability that a response is due
MARGINS = (0.1, 0.2, 0.4)  # points that another action must promise
CLASSIFIERS: dict[str, Callable[[], Any]] = {
    "boosting": lambda: HistGradientBoostingClassifier(
        max_iter=150, learning_rate=0.06, max_leaf_nodes=15, early_stopping=False, random_state=0
    ),
    "forest": lambda: ExtraTreesClassifier(150, min_samples_leaf=10, max_features=0.5, random_state=0),
}
REGRESSORS: dict[str, Callable[[], Any]] = {
    f"forest {leaf}": lambda leaf=leaf: ExtraTreesRegressor(  # type: ignore[misc]
        100, min_samples_leaf=leaf, max_features=0.5, random_state=0
    )
    for leaf in (10, 40)
}


def respond_chooser(model: Any, threshold: float) -> Chooser:
    """Give the likeliest response where some response is likely, else keep."""

    def chooser(features: Floats) -> Ints:
        likely = np.asarray(model.predict_proba(features))
        due = 1.0 - likely[:, list(model.classes_).index(0)]
        responses = np.where(model.classes_ == 0, 0.0, likely).argmax(1)
        return np.where(due > threshold, RESPOND + model.classes_[responses], KEEP)

    return chooser


def gain_chooser(model: Any, margin: float, otherwise: Chooser | None) -> Chooser:
    """Take the action that promises most, if that is more than a margin over what is done otherwise."""

    def chooser(features: Floats) -> Ints:
        gains = np.pad(np.asarray(model.predict(features)), ((0, 0), (1, 0)))  # over the rule's own action
        usual = otherwise(features) if otherwise else np.zeros(len(features), dtype=np.int64)
        more = gains.max(1) - gains[np.arange(len(gains)), usual] > margin
        return np.where(more, gains.argmax(1), usual)

    return chooser


def imitate(bank: Bank, rule: Settings, oracle: Settings, chooser: Chooser | None) -> tuple[Floats, Ints]:
    """Let a policy act; return its features at every decision, and the response that was due there.

    A response is due at the first decision after a shift, and at the second if it was not given at the first.
    """
    responses = oracle_plans(bank, oracle)[:, :, 2]
    found, due = [], np.zeros((bank.length // EVERY + 2, bank.rows), dtype=np.int64)
    for row, stream in enumerate(bank.stream_of.tolist()):
        for index, (place, _, _) in enumerate(bank.streams[stream].shifts, start=1):
            due[place // EVERY + 1, row] = responses[row, index]

    at_once = due > 0

    def recorder(features: Floats) -> Ints:
        found.append(features)
        decision, unanswered = len(found), features[:, SINCE] > 0
        late = at_once[decision - 1] & unanswered & (due[decision] == 0)
        due[decision] = np.where(late, due[decision - 1], due[decision])
        return chooser(features) if chooser else np.zeros(bank.rows, dtype=np.int64)

    train(bank, Controlled(bank, torch.tensor([rule]), recorder), 1)
    return np.concatenate(found), due[1 : len(found) + 1].ravel()


def branch(
    bank: Bank, rule: Settings, chooser: Chooser | None, rng: np.random.Generator
) -> tuple[Floats, Floats, Floats]:
    """Take every action at one random decision of each network, then go on with a policy.

    Half of the decisions are one or two after a shift, where most is at stake; weights undo this. Returns
    features [rows, ...], gains over the rule's action [rows, actions - 1] in points, and weights [rows].
    """
    last = (bank.length - 1) // EVERY  # decisions
    at, weights = np.zeros(bank.rows, dtype=np.int64), np.ones(bank.rows)
    for row, stream in enumerate(bank.stream_of.tolist()):
        shifts = [place for place, _, _ in bank.streams[stream].shifts]
        soon = sorted({d for place in shifts for d in (place // EVERY + 1, place // EVERY + 2) if d <= last})
        at[row] = rng.choice(soon) if soon and rng.random() < 0.5 else rng.integers(1, last + 1)
        if soon:
            weights[row] = (1 / last) / (0.5 / last + 0.5 * (at[row] in soon) / len(soon))
    actions = torch.arange(len(ACTIONS)).repeat_interleave(bank.rows)
    forced = torch.from_numpy(EVERY * at).repeat(len(ACTIONS)), actions
    policy = Controlled(bank, torch.tensor([rule] * len(ACTIONS)), chooser, forced)
    scores = train(bank, policy, len(ACTIONS)).mean(2).double().numpy()
    return policy.noted[: bank.rows].double().numpy(), (scores[1:] - scores[0]).T, weights


def fit_predictor(
    banks: Sequence[Bank], tuned: Sequence[Bank], settings: tuple[Settings, Settings], repeats: int
) -> tuple[Chooser | None, list[tuple[str, float]]]:
    """Fit on banks and choose on those to tune on; return the policy and the mean scores of all tried.

    settings: of the rule and of the oracle. repeats: branches of each network.
    """
    rule, oracle = settings
    best: Chooser | None = None

    def value(chooser: Chooser | None) -> float:
        return float(
            mean_score([train(b, Controlled(b, torch.tensor([rule]), chooser), 1) for b in tuned])[0]
        )

    log = [("rule", value(None))]

    def consider(name: str, chooser: Chooser) -> None:
        nonlocal best
        found = value(chooser)
        best = chooser if found > max(each for _, each in log) else best
        log.append((name, found))

    shown: list[tuple[Floats, Ints]] = []
    for turn in range(2):  # of the rule's decisions, then of the best so far
        shown += [imitate(bank, rule, oracle, best) for bank in with_progress("imitation", banks)]
        features, due = (np.concatenate(part) for part in zip(*shown, strict=True))
        for name, make in CLASSIFIERS.items():
            model = make().fit(features, due)
            for threshold in THRESHOLDS:
                consider(f"imitation {turn + 1}, {name}, {threshold:g}", respond_chooser(model, threshold))
    rng, tried = np.random.default_rng(0), []
    for turn in range(2):
        stage = [bank for bank in banks for _ in range(repeats)]
        tried += [branch(bank, rule, best, rng) for bank in with_progress("branches", stage)]
        features, gains, weights = (np.concatenate(part) for part in zip(*tried, strict=True))
        otherwise = best
        for name, make in REGRESSORS.items():
            model = make().fit(features, gains, sample_weight=weights)
            for margin in MARGINS:
                consider(f"branches {turn + 1}, {name}, {margin:g}", gain_chooser(model, margin, otherwise))
    return best, log
