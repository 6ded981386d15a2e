"""The bias and the GELU behind a product of rows: one kernel each way.

torch adds a bias to a batched product by writing it to all outputs first. At 512 GPTs these copies took a
tenth of a step.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from esper.population.kernels.rows import ceil_div, dense_rows, next_power

# Chosen on an H200: 64 rows of 4,096 vectors of 1,024 take 0.46 ms backward, a copy of as many bytes 0.38.
TILE = 1024  # elements that a program holds at a time
WARPS = 4
WIDEST = 1024  # channels of a tile
STACKED = 16  # tiles that a program takes one after another at most: it stores one share of the gradient of b
LEAST = 4  # programs that share the vectors of a row where there are enough for it


@triton.jit
def _place(spans, C: tl.constexpr, BC: tl.constexpr):  # type: ignore[no-untyped-def]
    """The row of this program, its span of vectors, and its channels."""
    wide: tl.constexpr = (C + BC - 1) // BC
    program = tl.program_id(0)
    row = (program // (wide * spans)).to(tl.int64)
    return row, program // wide % spans, program % wide * BC + tl.arange(0, BC)


@triton.jit
def _normal(z):  # type: ignore[no-untyped-def]
    """The density of a standard normal variable at z, and its probability to lie below; off by 1e-7 at most.

    By formula 26.2.17 of Abramowitz and Stegun: `erf` and `exp` took half of the time of the backward kernel.
    """
    density = 0.3989422804014327 * tl.exp2(-0.7213475204444817 * z * z)  # exp(-z² / 2)
    t = 1.0 / (1.0 + 0.2316419 * tl.abs(z))
    series = 1.781477937 + t * (-1.821255978 + t * 1.330274429)
    beyond = density * t * (0.319381530 + t * (-0.356563782 + t * series))
    return density, tl.where(z > 0, 1.0 - beyond, beyond)


@triton.jit
def _gelu(  # type: ignore[no-untyped-def]
    x, b, out, n, spans, b_row,
    C: tl.constexpr, STACKED: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    row, span, c = _place(spans, C, BC)
    x += row * n * C
    out += row * n * C
    bias = tl.load(b + row * b_row + c, mask=c < C, other=0.0).to(tl.float32)[None, :]
    for tile in range(STACKED):
        i = ((span * STACKED + tile) * BN + tl.arange(0, BN))[:, None]
        offset, inside = i * C + c[None, :], (i < n) & (c < C)[None, :]
        z = tl.load(x + offset, mask=inside, other=0.0).to(tl.float32) + bias
        _, below = _normal(z)
        tl.store(out + offset, (z * below).to(out.dtype.element_ty), mask=inside)  # gelu(z) = z · below(z)


@triton.jit
def _gelu_backward(  # type: ignore[no-untyped-def]
    x, b, g, dx, db, n, spans, b_row,
    C: tl.constexpr, STACKED: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """dx, and this program's share of db [R, spans, C]"""
    row, span, c = _place(spans, C, BC)
    x += row * n * C
    g += row * n * C
    dx += row * n * C
    bias = tl.load(b + row * b_row + c, mask=c < C, other=0.0).to(tl.float32)[None, :]
    total = tl.zeros((BN, BC), dtype=tl.float32)
    for tile in range(STACKED):
        i = ((span * STACKED + tile) * BN + tl.arange(0, BN))[:, None]
        offset, inside = i * C + c[None, :], (i < n) & (c < C)[None, :]
        z = tl.load(x + offset, mask=inside, other=0.0).to(tl.float32) + bias
        grad = tl.load(g + offset, mask=inside, other=0.0).to(tl.float32)
        density, below = _normal(z)
        change = grad * (below + z * density)  # gelu'(z)
        total += change
        tl.store(dx + offset, change.to(dx.dtype.element_ty), mask=inside)
    tl.store(db + (row * spans + span) * C + c, tl.sum(total, axis=0), mask=c < C)


class RowGelu(torch.autograd.Function):
    """gelu(x + b).  # x [R, n, C], b [R, C]"""

    @staticmethod
    def forward(ctx: Any, x: Tensor, b: Tensor) -> Tensor:
        x, b = x.contiguous(), dense_rows(b)
        ctx.save_for_backward(x, b)
        out = torch.empty_like(x)
        programs, spans, tile = _tiling(*x.shape)
        _gelu[(programs,)](x, b, out, x.shape[1], spans, b.stride(0), **tile)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, b = ctx.saved_tensors
        dx = torch.empty_like(x)
        programs, spans, tile = _tiling(*x.shape)
        shares = torch.empty(x.shape[0], spans, x.shape[2], device=x.device)
        _gelu_backward[(programs,)](
            x, b, grad.contiguous(), dx, shares, x.shape[1], spans, b.stride(0), **tile
        )
        return dx, shares.sum(1).to(b.dtype)


@cache
def _tiling(rows: int, vectors: int, channels: int) -> tuple[int, int, dict[str, int]]:
    """Return the number of programs, the spans of vectors in a row, and the launch parameters."""
    wide = min(next_power(channels), WIDEST)
    tall = min(TILE // wide, next_power(vectors))
    stacked = max(min(STACKED, vectors // (LEAST * tall)), 1)
    spans = ceil_div(vectors, tall * stacked)
    sizes = {"C": channels, "STACKED": stacked, "BN": tall, "BC": wide, "num_warps": WARPS}
    return rows * spans * ceil_div(channels, wide), spans, sizes
