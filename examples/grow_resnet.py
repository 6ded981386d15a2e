"""Grow a ResNet on augmented pictures: `python examples/grow_resnet.py`.

The network is a class of one's own with residual blocks, and the pictures come from a Dataset that shifts
them anew at every look: both are used as they are. The same network is trained without growth on the same
order of the data for as many training FLOPs, and both are compared on data that neither has seen.
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import esper
from esper.growing.gain import Gain, accuracy, gain_of

EPOCHS = 20


class Block(nn.Module):
    """Two convolutions and a way around them."""

    def __init__(self, before: int, after: int, stride: int = 1) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(before, after, 3, stride, 1, bias=False),
            nn.BatchNorm2d(after),
            nn.ReLU(inplace=True),
            nn.Conv2d(after, after, 3, 1, 1, bias=False),
            nn.BatchNorm2d(after),
        )
        self.around = nn.Identity() if before == after else nn.Conv2d(before, after, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.around(x))


class ResNet(nn.Module):
    """[batch, 1, 8, 8] → [batch, 10]"""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, 1, 1)
        self.layer1 = nn.Sequential(Block(width, width), Block(width, width))
        self.layer2 = nn.Sequential(Block(width, 2 * width, 2), Block(2 * width, 2 * width))
        self.head = nn.Linear(2 * width, 10)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer2(self.layer1(self.stem(x)))
        return self.head(h.mean(dim=(2, 3)))


class Shifted(Dataset[tuple[Tensor, Tensor]]):
    """Pictures moved by up to one pixel in each direction, another way at every look."""

    def __init__(self, pictures: Tensor, labels: Tensor) -> None:
        self.pictures, self.labels = pictures, labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        down, right = torch.randint(-1, 2, (2,)).tolist()
        return self.pictures[index].roll((down, right), (-2, -1)), self.labels[index]


def main(epochs: int = EPOCHS, seeds: int = 4, samples: int = 1000) -> Gain:
    """Train with and without growth and compare on test data; small numbers make a quick trial."""
    digits = load_digits()
    pictures = torch.tensor(digits.images / 16.0, dtype=torch.float32).unsqueeze(1)  # [1797, 1, 8, 8]
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, val, test = order[:samples], order[1000:1300], order[1300:]
    scores: tuple[list[float], list[float]] = ([], [])
    for seed in range(seeds):
        torch.manual_seed(seed)
        grown = esper.grow(
            ResNet(),
            train=DataLoader(Shifted(pictures[train], labels[train]), batch_size=50, shuffle=True),
            val=DataLoader(TensorDataset(pictures[val], labels[val]), batch_size=100),
            epochs=epochs,
            controller="schedule:widen_full@0.3",  # twice the channels between two convolutions, at 30 %
            baseline=True,
            lr=1e-2,
            seed=seed,
            progress=False,
        )
        assert grown.baseline is not None
        for run, found in zip((grown, grown.baseline), scores, strict=True):
            found.append(float(accuracy(run.model(pictures[test]), labels[test])))
        print(f"seed {seed}: {scores[1][-1]:.3f} without growth, {scores[0][-1]:.3f} with")
    print(grown.report())
    gain = gain_of(*scores)
    print(f"\n{gain}")
    return gain


if __name__ == "__main__":
    main()
