"""Grow a perceptron on a table of numbers: `python examples/grow_mlp.py`.

The task is to tell 26 letters apart by 16 measurements (KEEL's "letter"; pip install 'esper-lite[data]').
Slots and blueprints are named by hand, and a budget keeps the network small. The ungrown networks train for
the same epochs, so that growth spends more FLOPs: this shows the calls, not that growth pays.
"""

from __future__ import annotations

import torch
from torch import nn

import esper
from esper.growing.gain import Gain, gain_on_test
from esper.tasks import load_task

EPOCHS = 24
BUDGET = 1500  # parameters that growth may add


def make_model() -> nn.Sequential:
    """[batch, 16] → [batch, 26]"""
    return nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 26))


def main(epochs: int = EPOCHS, members: int = 8) -> Gain:
    """Train with and without growth and compare on test data; small numbers make a quick trial."""
    letters = load_task("letter")
    train, val, test = letters.train, letters.validation, letters.test()
    runs = {
        controller: esper.grow(
            make_model,
            train=(train.inputs[:4000], train.targets[:4000]),
            val=(val.inputs, val.targets),
            slots=["1", "3"],  # after each ReLU
            controller=controller,
            epochs=epochs,
            budget=BUDGET,
            blueprints=["MLP_SMALL", "MLP"],
            members=members,
            lr=1e-2,
        )
        for controller in ("static", "heuristic")
    }
    grown = runs["heuristic"]
    print(grown.report())
    gain = gain_on_test(grown, runs["static"], test.inputs, test.targets)
    print(f"\n{gain}")
    return gain


if __name__ == "__main__":
    torch.set_num_threads(1)  # networks this small lose more than they gain by sharing work
    main()
