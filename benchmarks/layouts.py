"""Convolutions of many networks on a CPU in three layouts, alone and with the norm and SiLU behind them.

    python -m benchmarks.layouts

Forward and backward, thread CPU time on one thread, the least of several turns: grouped with channels first,
grouped with channels last, and im2col with one product for each network. A grouped convolution is what
`population.row_layers` runs.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.common import machine_name, one_thread
from esper.population.blocks import norm_groups
from studies.command_line import positive

# networks, batch, channels, side
SHAPES = [
    (16, 64, 8, 8),
    (16, 64, 16, 8),
    (8, 64, 32, 8),
    (8, 128, 8, 16),
    (8, 128, 16, 16),
    (4, 128, 32, 16),
]


def grouped(x: Tensor, w: Tensor) -> Tensor:
    """x [B, R·C, H, W], w [R, C, C, 3, 3] → [B, R·C, H, W]"""
    return F.conv2d(x, w.flatten(0, 1), padding=1, groups=w.shape[0])


def im2col(x: Tensor, w: Tensor) -> Tensor:
    """The same as a product of patches and filters."""
    rows, channels, side = w.shape[0], w.shape[1], x.shape[-1]
    patches = F.unfold(x, 3, padding=1).unflatten(1, (rows, -1))  # [B, R, 9·C, P]
    out = w.flatten(2).unsqueeze(0) @ patches  # [B, R, C, P]
    return out.view(-1, rows * channels, side, side)


def with_norm(convolve: Callable[[Tensor, Tensor], Tensor], x: Tensor, w: Tensor) -> Tensor:
    """A convolution, the group norm of all networks and SiLU."""
    return F.silu(F.group_norm(convolve(x, w), w.shape[0] * norm_groups(w.shape[1])))


def measure(shape: tuple[int, int, int, int], turns: int) -> dict[str, float]:
    """Milliseconds by layout."""
    rows, batch, channels, side = shape
    w = torch.randn(rows, channels, channels, 3, 3)
    first = torch.randn(batch, rows * channels, side, side)
    last = first.contiguous(memory_format=torch.channels_last)
    ways = {"channels first": (grouped, first), "channels last": (grouped, last), "im2col": (im2col, first)}
    best: dict[str, float] = {}
    for _ in range(turns):
        for name, (convolve, x) in ways.items():
            for norm in (False, True):
                inputs, filters = x.detach().requires_grad_(), w.detach().requires_grad_()
                start = time.thread_time()
                out = with_norm(convolve, inputs, filters) if norm else convolve(inputs, filters)
                out.backward(out.detach())
                took = 1e3 * (time.thread_time() - start)
                key = f"{name}, norm" if norm else name
                best[key] = min(best.get(key, took), took)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=positive, default=5)
    args = parser.parse_args()
    table = Table(title=f"A convolution forward and backward, ms ({machine_name('cpu')})")
    with one_thread():
        for shape in SHAPES:
            found = measure(shape, args.turns)
            if not table.columns:
                for name in ("networks, batch, channels, side", *found):
                    table.add_column(name, justify="right")
            table.add_row(str(shape)[1:-1], *(f"{value:.1f}" for value in found.values()))
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
