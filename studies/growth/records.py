"""What is kept of every arm: one line of JSON for each task, arm and budget, compressed."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from esper.runs.files import write_atomically

POINTS = 8  # of a curve: after each eighth of the budget


@dataclass(frozen=True)
class Sample:
    """The n networks of one arm on one task at one budget, member by member."""

    task: str
    arm: str
    budget: float  # a multiple of the least one
    rate: float  # the learning rate's scale
    validation: list[float]  # [n] accuracy at the end
    test: list[float]  # [n]
    parameters: list[int]  # [n]
    cost: list[float]  # [n] of a training sample at the end, over that of the host that growth begins with
    curves: list[list[float]] = field(default_factory=list)  # [n][POINTS] validation accuracy on the way
    events: dict[str, float] = field(default_factory=dict)  # of growth: means over members, by name
    shapes: dict[str, int] = field(default_factory=dict)  # of growth: how many members ended with each


def path_of(folder: Path, task: str, program: str) -> Path:
    """Where a program leaves what it found on a task."""
    return folder / f"{task}-{program}.jsonl.gz"


def write(samples: Iterable[Sample], path: Path) -> None:
    """Write samples; the same ones give the same bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(asdict(sample), separators=(",", ":")) + "\n" for sample in samples)
    write_atomically(path, gzip.compress(lines.encode(), mtime=0))


def read(path: Path) -> list[Sample]:
    """What `write` wrote."""
    lines = gzip.decompress(path.read_bytes()).decode().splitlines()
    return [Sample(**json.loads(line)) for line in lines]


def rounded(values: NDArray[Any] | Sequence[float], digits: int = 4) -> list[float]:
    """Short numbers: files are committed."""
    return [round(float(value), digits) for value in np.asarray(values)]


def on_the_way(spent: NDArray[Any], accuracy: NDArray[Any]) -> list[list[float]]:
    """Each member's accuracy after each of POINTS equal shares of its budget.

    spent [T + 1, N] shares 0..1, rising; accuracy [T + 1, N]. Each point is the latest measurement by then.
    """
    shares = np.arange(1, POINTS + 1) / POINTS - 1e-6
    found = []
    for member in range(spent.shape[1]):
        at = np.searchsorted(spent[:, member], shares, side="left").clip(max=len(spent) - 1)
        found.append(rounded(accuracy[at, member]))
    return found
