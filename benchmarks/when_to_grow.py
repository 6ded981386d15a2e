"""Which controller should `esper.grow` use by default? python -m benchmarks.when_to_grow

Small models as people write them, none of them a host of the presets or of the study, are grown by each
controller. Beside every growth the same model without growth is trained for the training FLOPs that the
growth spent (`baseline=True`). A model in which a schedule can plant nothing is left out. All are scored on
test data that nothing else reads.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

import esper
from esper.tasks import load_task
from esper.utils.errors import UserError
from esper.utils.statistics import mean_interval

CONTROLLERS = ("schedule:widen_full@0.1", "schedule:clone@0.1", "heuristic", "tamiyo")
MOST_SAMPLES = 1000  # of a data set to train on
VALIDATION = 250  # samples: every decision measures on them, which growth pays for


class SmallResidual(nn.Module):
    """Two residual blocks over a stem, for images of one channel."""

    def __init__(self, width: int = 6, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU())
        self.first, self.second = (
            nn.Sequential(
                nn.Conv2d(width, width, 3, padding=1),
                nn.BatchNorm2d(width),
                nn.ReLU(),
                nn.Conv2d(width, width, 3, padding=1),
                nn.BatchNorm2d(width),
            )
            for _ in range(2)
        )
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = torch.relu(x + self.first(x))
        x = torch.relu(x + self.second(x))
        return self.head(x.mean((2, 3)))


def perceptron() -> nn.Module:
    """A plain perceptron for tables of 16 columns and 26 classes."""
    layers = (nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 26))
    return nn.Sequential(*layers)


def signal_network() -> nn.Module:
    """Strided convolutions over signals of 40 samples."""
    return nn.Sequential(
        nn.Conv1d(1, 8, 5, stride=2, padding=2),
        nn.BatchNorm1d(8),
        nn.ReLU(),
        nn.Conv1d(8, 8, 3, stride=2, padding=1),
        nn.BatchNorm1d(8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(80, 10),
    )


MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "residual network, digits": (SmallResidual, "digits"),
    "perceptron, letter": (perceptron, "letter"),
    "convolutions, MNIST-1D": (signal_network, "mnist1d"),
}


@dataclass(frozen=True)
class Measured:
    """One growth and what stands beside it: test accuracies and sizes."""

    model: str
    controller: str
    seed: int
    grown: float
    static: float
    parameters: int
    kept: int
    seconds: float


def measure(name: str, controller: str, seed: int, epochs: int) -> Measured:
    """Grow one model once."""
    make, data = MODELS[name]
    task = load_task(data)
    torch.manual_seed(seed)
    model, start = make(), time.process_time()
    grown = esper.grow(
        model,
        train=(task.train.inputs[:MOST_SAMPLES], task.train.targets[:MOST_SAMPLES]),
        val=(task.validation.inputs[:VALIDATION], task.validation.targets[:VALIDATION]),
        controller=controller,
        epochs=epochs,
        seed=seed,
        baseline=True,
        force=True,
        progress=False,
    )
    test = task.test()
    static = grown.baseline
    assert static is not None
    return Measured(
        model=name,
        controller=controller,
        seed=seed,
        grown=accuracy(grown.model, test.inputs, test.targets),
        static=accuracy(static.model, test.inputs, test.targets),
        parameters=grown.parameters,
        kept=len(grown.added),
        seconds=time.process_time() - start,
    )


@torch.no_grad()
def accuracy(model: nn.Module, inputs: Tensor, targets: Tensor) -> float:
    """In percent."""
    return 100 * float((model(inputs).argmax(1) == targets).float().mean())


def table(rows: Sequence[Measured]) -> str:
    """Means over seeds, with the difference; then each controller over all models."""
    titles = ("model", "controller", "grown", "static", "grown − static", "kept", "parameters")
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for name, controller in dict.fromkeys((row.model, row.controller) for row in rows):
        own = [row for row in rows if (row.model, row.controller) == (name, controller)]
        means = [f"{sum(getattr(r, f) for r in own) / len(own):.1f}" for f in ("grown", "static")]
        sizes = f"{sum(r.parameters for r in own) / len(own):,.0f}"
        kept = f"{sum(r.kept for r in own) / len(own):.1f}"
        cells = [name, controller, *means, _gap(own), kept, sizes]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "| controller, over all models | grown − static |", "|---|---|"]
    for controller in dict.fromkeys(row.controller for row in rows):
        own = [row for row in rows if row.controller == controller]
        lines.append(f"| {controller} | {_gap(own)} |")
    return "\n".join(lines)


def _gap(rows: Sequence[Measured]) -> str:
    mean, half = mean_interval([row.grown - row.static for row in rows])
    return f"{mean:+.2f} ± {half:.2f}"


def main(arguments: list[str] | None = None) -> None:
    """Print a table, and write every run as a line of JSON if a file is given."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.when_to_grow", description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=16)
    parser.add_argument("--controllers", default=",".join(CONTROLLERS))
    parser.add_argument("--out", type=Path, help="a file for the runs, one JSON object on a line")
    given = parser.parse_args(arguments)
    rows = []
    for name in MODELS:
        for seed in range(given.seeds):
            for controller in given.controllers.split(","):
                try:
                    rows.append(measure(name, controller, seed, given.epochs))
                except UserError as error:
                    print(f"{name}: {error}", file=sys.stderr, flush=True)
                else:
                    print(rows[-1], file=sys.stderr, flush=True)
    if given.out is not None:
        given.out.write_text("".join(json.dumps(asdict(row)) + "\n" for row in rows), encoding="utf-8")
    print(table(rows))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
