"""Grow a small convolutional network on handwritten digits: `python examples/grow_cnn.py`.

The network is an ordinary nn.Sequential with BatchNorm and dropout. Eight copies with weights of their own
are trained with and without growth, on the same batches, and compared on data that neither has seen. Both
train for the same epochs, so that growth spends more FLOPs: this shows the calls, not that growth pays.
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import nn

import esper
from esper.growing.gain import Gain, gain_on_test

EPOCHS = 24


def make_model() -> nn.Sequential:
    """[batch, 1, 8, 8] → [batch, 10]"""
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 6, 3, padding=1),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Dropout(0.05),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(6, 10),
    )


def main(epochs: int = EPOCHS, members: int = 8) -> Gain:
    """Train with and without growth and compare on test data; small numbers make a quick trial."""
    digits = load_digits()
    images = torch.tensor(digits.images / 16.0, dtype=torch.float32).unsqueeze(1)  # [1797, 1, 8, 8]
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, val, test = order.tensor_split([1100, 1400])

    runs = {
        controller: esper.grow(
            make_model,
            train=(images[train], labels[train]),
            val=(images[val], labels[val]),
            controller=controller,
            epochs=epochs,
            members=members,
            lr=1e-2,
        )
        for controller in ("static", "heuristic")
    }
    grown = runs["heuristic"]
    print(grown.report())
    gain = gain_on_test(grown, runs["static"], images[test], labels[test])
    print(f"\n{gain}")
    return gain


if __name__ == "__main__":
    torch.set_num_threads(1)  # networks this small lose more than they gain by sharing work
    main()
