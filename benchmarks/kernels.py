"""The kernels one by one: time, and the share of the memory's speed that they reach.

    python -m benchmarks.kernels                        as they are
    python -m benchmarks.kernels --sweep                other tiles of the convolutions too

A kernel that reads and writes every activation once, at the speed of a plain copy, has a share of 1. Needs a
GPU with Triton, which is imported late: a machine without it can still look at this folder.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from itertools import product
from typing import Any

import torch

Shape = tuple[tuple[int, int], tuple[int, int], tuple[int, int]]  # kernel, stride and padding
SAME: Shape = ((3, 3), (1, 1), (1, 1))
HALF: Shape = ((3, 3), (2, 2), (1, 1))
POINT: Shape = ((1, 1), (1, 1), (0, 0))
# rows, side, channels in and out, shape of the convolution; the batch is 64
WORKS: dict[str, tuple[int, int, int, int, Shape]] = {
    "8x8, 16": (2048, 8, 16, 16, SAME),
    "8x8, 8": (2048, 8, 8, 8, SAME),
    "8x8, 4": (2048, 8, 4, 4, SAME),
    "8x8, 16, 1x1": (2048, 8, 16, 16, POINT),
    "32x32, 8": (256, 32, 8, 8, SAME),
    "32x32, 8 to 16, halved": (256, 32, 8, 16, HALF),
    "16x16, 16": (256, 16, 16, 16, SAME),
    "8x8, 32": (512, 8, 32, 32, SAME),
}
BATCH = 64
FORWARD_TILES = [
    {"BM": m, "BK": k, "num_warps": w, "num_stages": 2}
    for m, k, w in ((64, 32, 2), (256, 32, 4), (256, 64, 8))
]
WEIGHT_TILES = [
    {"BM": m, "BK": k, "num_warps": w, "num_stages": s}
    for m, k, w, s in ((128, 32, 4, 2), (64, 32, 2, 3), (64, 128, 4, 3))
]


def bytes_per_ms() -> float:
    """What a plain copy moves."""
    from triton.testing import do_bench

    x = torch.empty(2**28, device="cuda", dtype=torch.bfloat16)
    y = torch.empty_like(x)
    return 2 * x.nbytes / float(do_bench(lambda: y.copy_(x)))


def calls(name: str, dtype: torch.dtype) -> dict[str, tuple[Callable[[], Any], int]]:
    """Each kernel on one work, with the bytes that it must move."""
    from esper.population.kernels import Geometry, convolution
    from esper.population.kernels.rows import _pick_rows

    rows, side, channels, outputs, sizes = WORKS[name]
    shape = Geometry(*sizes)
    x = torch.randn(rows, BATCH, side, side, channels, device="cuda").to(dtype)
    taps = shape.kernel[0] * shape.kernel[1]
    w = torch.randn(rows, taps, channels, outputs, device="cuda").to(dtype)
    size = shape.out(side, side)
    g = torch.randn(rows, BATCH, *size, outputs, device="cuda").to(dtype)
    both = x.nbytes + g.nbytes
    return {
        "forward": (lambda: convolution._convolve(x, w, size, shape), both),
        "back": (lambda: convolution._convolve(g, w, (side, side), shape, back=True), both),
        "weights": (lambda: convolution._weight_gradient(x, g, w, shape), both),
        **norm_calls(x),
        "take": (lambda: _pick_rows(x, torch.arange(rows, device="cuda")), 2 * x.nbytes),
    }


def norm_calls(x: torch.Tensor) -> dict[str, tuple[Callable[[], Any], int]]:
    from esper.population.kernels import RowNorm

    samples = x.movedim(-1, 2).detach().requires_grad_()
    scale = torch.ones(x.shape[0], x.shape[-1], device="cuda", dtype=x.dtype, requires_grad=True)
    out = RowNorm.apply(samples, scale, scale, None, 1e-5, "silu", "none")  # type: ignore[no-untyped-call]
    grad = torch.randn_like(out)

    def forward() -> Any:
        with torch.no_grad():
            return RowNorm.apply(samples, scale, scale, None, 1e-5, "silu", "none")  # type: ignore[no-untyped-call]

    def back() -> Any:
        return torch.autograd.grad(out, (samples, scale), grad, retain_graph=True)

    return {"norm": (forward, 2 * x.nbytes), "norm back": (back, 3 * x.nbytes)}


def measure(name: str, dtype: torch.dtype, speed: float, sweep: bool) -> Iterator[dict[str, Any]]:
    from triton.testing import do_bench

    from esper.population.kernels import convolution

    for kernel, (call, moved) in calls(name, dtype).items():
        line = {"work": name, "dtype": str(dtype).removeprefix("torch."), "kernel": kernel}
        tiles = {"forward": FORWARD_TILES, "back": FORWARD_TILES, "weights": WEIGHT_TILES}.get(kernel, [])
        table = convolution.WEIGHT_TILE if kernel == "weights" else convolution.FORWARD_TILE
        for tile in [dict(table), *(tiles if sweep else [])]:
            kept = dict(table)
            table.update(tile)
            try:
                ms = float(do_bench(call, warmup=2, rep=8))
            except Exception as error:  # a tile that does not fit the device
                print(json.dumps({**line, "tile": tile, "error": str(error)[:80]}), flush=True)
                continue
            finally:
                table.update(kept)
            yield {**line, "tile": tile, "ms": round(ms, 4), "share": round(moved / speed / ms, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--works", nargs="+", choices=WORKS, default=list(WORKS))
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--sweep", action="store_true", help="other tiles too, best last")
    args = parser.parse_args()
    if not torch.cuda.is_available() or find_spec("triton") is None:
        parser.error("the kernels need a GPU that torch sees, and Triton; look with 'esper doctor'")
    speed = bytes_per_ms()
    print(json.dumps({"device": torch.cuda.get_device_name(), "copy_tb_per_s": round(speed / 1e9, 3)}))
    for name, dtype in product(args.works, args.dtypes):
        by_kernel: dict[str, list[dict[str, Any]]] = {}
        for line in measure(name, getattr(torch, dtype), speed, args.sweep):
            by_kernel.setdefault(line["kernel"], []).append(line)
        for lines in by_kernel.values():
            best = sorted(lines[1:], key=lambda line: float(line["ms"]))[:3] if args.sweep else []
            for line in (lines[0], *best):
                print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
