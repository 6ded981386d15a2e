"""Grow a perceptron on a table of numbers: `python -m examples.grow_mlp`.

The task is to tell 26 letters apart by 16 measurements (KEEL's "letter"; pip install 'esper-lite[data]').
After a tenth of the epochs both hidden layers get twice their units. Beside it the same network is trained
without growth, for the same training FLOPs, which is about twice the epochs: 8 hidden units are too few for
16,200 samples, and no length of training makes up for that.
"""

from __future__ import annotations

import torch
from torch import nn

import esper
from esper.tasks import load_task
from esper.utils.statistics import mean_interval

EPOCHS = 8


def make_model() -> nn.Sequential:
    """[batch, 16] → [batch, 26]"""
    return nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 26))


def main(epochs: int = EPOCHS, seeds: int = 5) -> tuple[float, float]:
    """Train with and without growth and compare on test data; small numbers make a quick trial.

    Returns the mean gain of growth and the half-width of its 95 % interval.
    """
    letters = load_task("letter")
    train, val, test = letters.train, letters.validation, letters.test()
    scores: dict[str, list[float]] = {"grown": [], "ungrown": []}
    for seed in range(seeds):
        torch.manual_seed(seed)
        grown = esper.grow(
            make_model(),
            train=(train.inputs, train.targets),
            val=(val.inputs, val.targets),
            controller="schedule:widen_full@0.1",
            epochs=epochs,
            batch_size=128,
            lr=1e-2,
            seed=seed,
            baseline=True,
        )
        assert grown.baseline is not None
        for name, run in (("grown", grown), ("ungrown", grown.baseline)):
            hits = run.model(test.inputs).argmax(-1) == test.targets
            scores[name].append(float(hits.float().mean()))
    print(grown.report())
    mean, half = mean_interval([a - b for a, b in zip(*scores.values(), strict=True)])
    print(f"\nGrowth: {100 * mean:+.2f} ± {100 * half:.2f} points of test accuracy over {seeds} pairs.")
    return mean, half


if __name__ == "__main__":
    torch.set_num_threads(1)  # networks this small lose more than they gain by sharing work
    main()
