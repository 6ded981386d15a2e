"""What the live engine costs while nothing grows: `python -m benchmarks.live`, and `--loader` on 2 GB of data

The same network, in the shape of a ResNet-18 with 11.7 million parameters, is trained for the same steps by
a plain loop and by `esper.grow(engine="live", controller="static")`, each in a process of its own, both with
one validation after every epoch. Printed are seconds of the processor and the peak of memory; the import of
the libraries does not count in the time.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset
from torch.utils.flop_counter import FlopCounterMode

WAYS = ("plain", "live")


class Block(nn.Module):
    """Two convolutions with a skip around them, and in-place activations."""

    def __init__(self, before: int, after: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(after)
        self.relu = nn.ReLU(inplace=True)
        self.skip: nn.Module = nn.Identity()
        if stride > 1 or before != after:
            self.skip = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))

    def forward(self, x: Tensor) -> Tensor:
        """x [B, before, H, W] → [B, after, H / stride, W / stride]"""
        h = self.relu(self.bn1(self.conv1(x)))
        return self.relu(self.bn2(self.conv2(h)) + self.skip(x))


class ResNet(nn.Module):
    """A ResNet-18."""

    def __init__(self, classes: int = 1000):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 64, 7, 2, 3, bias=False),
            nn.BatchNorm2d(64),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, 1),
        )
        widths = (64, 64, 128, 256, 512)
        for k in range(1, 5):
            stage = nn.Sequential(
                Block(widths[k - 1], widths[k], 1 if k == 1 else 2), Block(widths[k], widths[k], 1)
            )
            self.add_module(f"layer{k}", stage)
        self.fc = nn.Linear(512, classes)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, 3, H, W] → [B, classes]"""
        x = self.stem(x)
        for k in range(1, 5):
            x = self.get_submodule(f"layer{k}")(x)
        return self.fc(x.mean((2, 3)))


def data(steps: int, batch: int, side: int) -> tuple[DataLoader[tuple[Tensor, ...]], ...]:
    """A loader of `steps` batches to train on, and one of a single batch to validate on."""
    x, y = torch.randn((steps + 1) * batch, 3, side, side), torch.randint(0, 1000, ((steps + 1) * batch,))
    cut = steps * batch
    return tuple(
        DataLoader(TensorDataset(x[part], y[part]), batch) for part in (slice(cut), slice(cut, None))
    )


def train_plainly(
    epochs: int, train: DataLoader[tuple[Tensor, ...]], val: DataLoader[tuple[Tensor, ...]]
) -> None:
    """A loop as anyone would write it."""
    model = ResNet()
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(epochs):
        model.train()
        for x, y in train:
            optimiser.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimiser.step()
        model.eval()
        with torch.no_grad():
            for x, y in val:
                F.cross_entropy(model(x), y).item()


def measure(way: str, epochs: int, steps: int, batch: int, side: int) -> dict[str, float]:
    """One way in this process."""
    import esper.growing.api as api  # before the clock starts

    with FlopCounterMode(display=False):  # imports what it needs when it is first used
        torch.zeros(1)
    torch.manual_seed(0)
    loaders = data(steps, batch, side)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.process_time()
    if way == "plain":
        train_plainly(epochs, *loaders)
    else:
        api.grow(
            ResNet(), *loaders, controller="static", epochs=epochs, engine="live", lr=1e-3, progress=False
        )
    seconds = time.process_time() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"seconds": seconds, "peak_mb": peak / 1024, "extra_mb": (peak - before) / 1024}


class Pictures(Dataset[tuple[Tensor, Tensor]]):
    """512 pictures of 4 MB each, made when they are asked for: 2 GB that are nowhere."""

    def __len__(self) -> int:
        return 512

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """index → [1, 1024, 1024], []"""
        draw = torch.Generator().manual_seed(index)
        return torch.randn(1, 1024, 1024, generator=draw) + index % 2, torch.tensor(index % 2)


def measure_loader() -> float:
    """MB that growing on 2 GB of data takes beyond what was there before."""
    import esper.growing.api as api  # before memory is looked at
    from esper.tamiyo.schedule import Schedule

    layers = [nn.Conv2d(1, 4, 7, 16), nn.ReLU(), nn.Conv2d(4, 8, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(1)]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(8, 2))
    train = DataLoader(Pictures(), batch_size=4, shuffle=True)
    val = DataLoader(Subset(Pictures(), range(16)), batch_size=4)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    recipe = Schedule([(0.0, "widen_full", "all"), (0.4, "conv_light", "all")])
    grown = api.grow(model, train, val, controller=recipe, epochs=2, engine="live", progress=False)
    assert grown.record.germinated.any(), "nothing was planted"
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


def main() -> None:
    """Both ways, and their ratio."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.live", description=__doc__)
    parser.add_argument("--way", choices=WAYS, help="this way alone, as JSON")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4, help="batches in an epoch")
    parser.add_argument("--batch", type=int, default=16, help="pictures in a batch")
    parser.add_argument("--side", type=int, default=112, help="of a picture, in points")
    parser.add_argument("--loader", action="store_true", help="what growing on 2 GB of data takes in memory")
    given = parser.parse_args()
    if given.loader:
        print(f"2 GB of data, 2 epochs: {measure_loader():.0f} MB more than before")
        return
    sizes = (given.epochs, given.steps, given.batch, given.side)
    if given.way:
        print(json.dumps(measure(given.way, *sizes)))
        return
    found = {}
    for way in WAYS:
        arguments = [sys.executable, "-m", "benchmarks.live", "--way", way]
        for name, size in zip(("epochs", "steps", "batch", "side"), sizes, strict=True):
            arguments += [f"--{name}", str(size)]
        told = subprocess.run(arguments, capture_output=True, text=True, check=True).stdout
        found[way] = json.loads(told.splitlines()[-1])
        print(f"{way:6} {found[way]['seconds']:6.1f} s   peak {found[way]['peak_mb']:6.0f} MB", flush=True)
    ratio = {key: found["live"][key] / found["plain"][key] for key in ("seconds", "peak_mb")}
    print(f"live / plain: {ratio['seconds']:.2f} of the time, {ratio['peak_mb']:.2f} of the memory")


if __name__ == "__main__":
    main()
