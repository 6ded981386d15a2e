"""What the live engine costs while nothing grows: `python -m benchmarks.live`, and `--loader` on 2 GB of data

The same network, in the shape of a ResNet-18 with 11.7 million parameters, is trained for the same steps by
a plain loop and by `esper.grow(controller="static")`, each in a process of its own, both with
one validation after every epoch. On a CPU, seconds of the processor and the peak of memory are printed; on a
GPU (`--device cuda`), seconds of the clock and the peak of what torch allocated there. The import of the
libraries and one warm pass do not count in the time. What an epoch takes is the median of those that another
one follows, and a step is its share of that; what is left of the whole is fixed: it does not grow with the
length of a run.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset
from torch.utils.flop_counter import FlopCounterMode

WAYS = ("plain", "live")
Batch = tuple[Tensor, Tensor]
Loader = Iterable[Batch]


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


class Timed:
    """Batches that remember when each reading of them began."""

    def __init__(self, batches: list[Batch], clock: Callable[[], float]):
        self.batches, self.clock = batches, clock
        self.applied: list[float] = []

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Batch]:
        self.applied.append(self.clock())
        return iter(self.batches)


def data(given: argparse.Namespace) -> tuple[list[Batch], list[Batch]]:
    """Batches to train on, and one to validate on."""
    batches = [
        (torch.randn(given.batch, 3, given.side, given.side), torch.randint(0, 1000, (given.batch,)))
        for _ in range(given.steps + 1)
    ]
    return batches[:-1], batches[-1:]


def train_plainly(given: argparse.Namespace, train: Loader, val: Loader) -> None:
    """A loop as anyone would write it."""
    device, halved = given.device, given.precision == "bfloat16"
    model = ResNet().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(given.epochs):
        model.train()
        for k, (x, y) in enumerate(train):
            if k % given.accumulate == 0:
                optimizer.zero_grad()
            with torch.autocast(device, torch.bfloat16, enabled=halved):
                loss = F.cross_entropy(model(x.to(device)), y.to(device))
            (loss / given.accumulate).backward()
            if (k + 1) % given.accumulate == 0:
                optimizer.step()
        model.eval()
        with torch.no_grad(), torch.autocast(device, torch.bfloat16, enabled=halved):
            for x, y in val:
                F.cross_entropy(model(x.to(device)), y.to(device)).item()


def train_live(given: argparse.Namespace, train: Loader, val: Loader) -> None:
    """The same by the live engine."""
    import esper

    names = ("epochs", "device", "precision", "accumulate")
    settings = {name: getattr(given, name) for name in names}
    esper.grow(ResNet(), train, val, controller="static", lr=1e-3, progress=False, **settings)


def measure(given: argparse.Namespace) -> dict[str, float]:
    """One way in this process."""
    import esper.growing.api  # noqa: F401 (before the clock starts)

    with FlopCounterMode(display=False):  # imports what it needs when it is first used
        torch.zeros(1)
    torch.manual_seed(0)
    batches, on_gpu = data(given), given.device != "cpu"
    clock = time.perf_counter if on_gpu else time.process_time
    train = Timed(batches[0], clock)
    if on_gpu:  # libraries are loaded and kernels chosen
        train_plainly(argparse.Namespace(**{**vars(given), "epochs": 1}), batches[0][:1], batches[1])
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    start = clock()
    {"plain": train_plainly, "live": train_live}[given.way](given, train, batches[1])
    if on_gpu:
        torch.cuda.synchronize()
    seconds = clock() - start
    peak = torch.cuda.max_memory_allocated() / 2**20 if on_gpu else _resident_mb()
    epochs = train.applied[-given.epochs :]  # whoever looks at a first batch does so before them
    epoch = statistics.median(after - before for before, after in pairwise(epochs))
    fixed = max(0.0, seconds - given.epochs * epoch)
    return {"seconds": seconds, "fixed": fixed, "step": epoch / given.steps, "peak_mb": peak}


def _resident_mb() -> float:
    """The most memory that this process ever held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


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
    before = _resident_mb()
    recipe = Schedule.parse("widen_full@0+conv_light@0.4")
    grown = api.grow(model, train, val, controller=recipe, epochs=2, progress=False)
    assert grown.record.germinated.any(), "nothing was planted"
    return _resident_mb() - before


def main() -> None:
    """Both ways, and their ratio."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.live", description=__doc__)
    parser.add_argument("--way", choices=WAYS, help="this way alone, as JSON")
    parser.add_argument("--epochs", type=int, default=3, help="at least 2")
    parser.add_argument("--steps", type=int, default=4, help="batches in an epoch")
    parser.add_argument("--batch", type=int, default=16, help="pictures in a batch")
    parser.add_argument("--side", type=int, default=112, help="of a picture, in points")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--precision", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--accumulate", type=int, default=1, help="batches that make one step")
    parser.add_argument("--loader", action="store_true", help="what growing on 2 GB of data takes in memory")
    given = parser.parse_args()
    if given.loader:
        print(f"2 GB of data, 2 epochs: {measure_loader():.0f} MB more than before")
        return
    if given.way:
        print(json.dumps(measure(given)))
        return
    found = {}
    for way in WAYS:
        arguments = [sys.executable, "-m", "benchmarks.live", "--way", way, *sys.argv[1:]]
        told = subprocess.run(arguments, capture_output=True, text=True, check=True).stdout
        found[way] = json.loads(told.splitlines()[-1])
        seconds, fixed, step, peak = found[way].values()
        parts = f"{fixed:5.2f} s fixed and {1000 * step:7.1f} ms a step"
        print(f"{way:6} {seconds:6.1f} s ({parts})   peak {peak:6.0f} MB", flush=True)
    ratio = {key: found["live"][key] / found["plain"][key] for key in ("seconds", "step", "peak_mb")}
    whole, steps, memory = ratio.values()
    print(f"live / plain: {whole:.2f} of the time, {steps:.2f} of a step's, {memory:.2f} of the memory")


if __name__ == "__main__":
    main()
