"""Our classifier beside scikit-learn's of the same final size and time: python -m benchmarks.sklearn_peers.

Each seed draws a split, and both are fitted on the same three quarters of the samples with one thread. First
`GrowingClassifier` with its defaults; then `MLPClassifier` with one hidden layer of as many parameters as
that ended with, standardised inputs and its own defaults otherwise. It goes on until its own stopping rule
ends it or it has used as much processor time. Both are scored on the quarter that neither has seen.
"""

from __future__ import annotations

import argparse
import time
import warnings
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.datasets import load_breast_cancer, load_digits, load_wine
from sklearn.model_selection import train_test_split
from sklearn.neural_network import MLPClassifier
from sklearn.preprocessing import StandardScaler

from esper import GrowingClassifier
from esper.foundation.statistics import mean_interval
from esper.tasks import load_task

Table = tuple[NDArray[Any], NDArray[Any]]


def load_letter() -> Table:
    """All 20,000 letters."""
    task = load_task("letter")
    splits = (task.train, task.validation, task.test())
    inputs, targets = (torch.cat([getattr(s, name) for s in splits]) for name in ("inputs", "targets"))
    return inputs.numpy(), targets.numpy()


DATA = {
    "digits": lambda: load_digits(return_X_y=True),
    "wine": lambda: load_wine(return_X_y=True),
    "breast cancer": lambda: load_breast_cancer(return_X_y=True),
    "letter": load_letter,
}


@dataclass(frozen=True)
class Fitted:
    """One classifier on one split."""

    score: float
    parameters: int
    seconds: float  # of processor time


def grown(split: list[NDArray[Any]], seed: int, settings: dict[str, Any]) -> Fitted:
    """Ours."""
    x, x_test, y, y_test = split
    start = time.process_time()
    classifier = GrowingClassifier(random_state=seed, **settings).fit(x, y)
    seconds = time.process_time() - start
    size = sum(p.numel() for p in classifier.model_.parameters())
    return Fitted(classifier.score(x_test, y_test), size, seconds)


def peer(split: list[NDArray[Any]], seed: int, parameters: int, seconds: float) -> Fitted:
    """scikit-learn's, with a hidden layer of that size, for at most that long."""
    x, x_test, y, y_test = split
    classes, features = np.unique(y), x.shape[1]
    outputs = 1 if len(classes) == 2 else len(classes)  # it has one output for two classes
    width = max(1, round((parameters - outputs) / (features + 1 + outputs)))
    start = time.process_time()
    scaler = StandardScaler().fit(x)
    inputs = scaler.transform(x)
    classifier = MLPClassifier((width,), random_state=seed)
    best, since = np.inf, 0
    while time.process_time() - start < seconds and since <= classifier.n_iter_no_change:
        classifier.partial_fit(inputs, y, classes=classes)
        since = 0 if classifier.loss_ < best - classifier.tol else since + 1
        best = min(best, classifier.loss_)
    used = time.process_time() - start
    size = sum(part.size for part in (*classifier.coefs_, *classifier.intercepts_))
    return Fitted(classifier.score(scaler.transform(x_test), y_test), size, used)


def main(arguments: list[str] | None = None) -> None:
    """Print a line for each data set."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sklearn_peers", description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--data", nargs="+", choices=list(DATA), default=list(DATA))
    given = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    print(f"test accuracy in %, mean of {given.seeds} splits; difference with its 95 % interval, paired")
    for name in given.data:
        compare(name, DATA[name](), range(given.seeds), {})


def compare(name: str, table: Table, seeds: range, settings: dict[str, Any]) -> None:
    """Both on the same splits of one data set."""
    pairs = []
    for seed in seeds:
        split = train_test_split(*table, test_size=0.25, random_state=seed, stratify=table[1])
        ours = grown(split, seed, settings)
        pairs.append((ours, peer(split, seed, ours.parameters, ours.seconds)))
    gaps = [100 * (ours.score - theirs.score) for ours, theirs in pairs]
    mean, half = mean_interval(gaps)
    ours, theirs = (_told(side) for side in zip(*pairs, strict=True))
    print(f"{name}: grown {ours}, MLPClassifier {theirs}, difference {mean:+.2f} ± {half:.2f}", flush=True)


def _told(side: tuple[Fitted, ...]) -> str:
    score, size, seconds = (np.mean([getattr(fit, f.name) for fit in side]) for f in fields(Fitted))
    return f"{100 * score:.2f} ({size:,.0f} parameters, {seconds:.1f} s)"


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
