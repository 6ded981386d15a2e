"""What a training step on a CPU must do and move: the population beside one module after another, counted.

    python -m benchmarks.traffic --members 4 16

Operations that only look at memory are left out; bytes are what an operation reads and writes. Both ways
multiply the same numbers. Nothing is timed: the counts do not depend on the machine.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.population import BATCH, OneAfterAnother, planted
from esper.population.data import Clock
from studies.command_line import positive

BATCHES = 4  # in an epoch of the population


class Traffic(TorchDispatchMode):
    """Counts operations and the bytes that they read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.operations, self.bytes = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view and not any(word in func.name() for word in ("view", "empty", "detach")):
            tensors = [t for t in tree_leaves((args, kwargs, result)) if isinstance(t, Tensor)]
            self.operations += 1
            self.bytes += sum(t.numel() * t.element_size() for t in tensors)
        return result


def counted(call: Callable[[], object]) -> Traffic:
    """What a second call does: the first one may build tables."""
    call()
    with Traffic() as traffic:
        call()
    return traffic


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--members", type=positive, nargs="+", default=[16])
    given = parser.parse_args()
    args = argparse.Namespace(
        device="cpu", batches=BATCHES, precision="float32", width=16, side=8, channels=1
    )
    table = Table(title="One training step, counted")
    for title in ("work", "members", "way", "operations", "MB moved"):
        table.add_column(title, justify="right")
    for seeds in (False, True):
        for members in given.members:
            population, states, data = planted(args, members, seeds)
            loop = OneAfterAnother(population, states, members)
            x, y = data.inputs[0, :BATCH], data.targets[0, :BATCH]
            ways: dict[str, tuple[int, Callable[[], object]]] = {
                "one after another": (1, partial(loop.step, x, y)),
                "population": (BATCHES, partial(population.train_epoch, states, data, Clock(0, 0, 10))),
            }
            for way, (steps, call) in ways.items():
                found, work = counted(call), "with seeds and shadows" if seeds else "training step"
                figures = f"{found.operations / steps:,.0f}", f"{found.bytes / 1e6 / steps:,.0f}"
                table.add_row(work, str(members), way, *figures)
    Console(width=110).print(table)


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
