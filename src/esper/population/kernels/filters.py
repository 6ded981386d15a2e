"""Filters of convolutions from weights of rows: standardized, scaled and transposed in one kernel each way.

The weights of a row lie in memory as [O, C, taps], its filters as [taps, C, O].
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from esper.population.blocks import RELU_GAIN
from esper.population.kernels.rows import ceil_div, next_power


@triton.jit
def _load(x, o, d, O, D):  # type: ignore[no-untyped-def]
    """Elements d of filters o of x [O, D] in float32; 0 outside."""
    return tl.load(x + o * D + d, mask=(o < O) & (d < D), other=0.0).to(tl.float32)


@triton.jit
def _statistics(w, o, O, D, BO: tl.constexpr, BD: tl.constexpr):  # type: ignore[no-untyped-def]
    """The mean of each filter of w [O, D] and 1 / |w - mean|.  # [BO, 1]"""
    d = tl.arange(0, BD)[None, :]
    total = tl.zeros((BO, BD), dtype=tl.float32)
    for first in range(0, D, BD):
        total += _load(w, o, first + d, O, D)
    mean = tl.sum(total, axis=1, keep_dims=True) / D
    # The squares take a second pass: E[w²] - E[w]² would cancel in float32.
    square = tl.zeros((BO, BD), dtype=tl.float32)
    for first in range(0, D, BD):
        centred = tl.where(first + d < D, _load(w, o, first + d, O, D) - mean, 0.0)
        square += centred * centred
    return mean, tl.rsqrt(tl.sum(square, axis=1, keep_dims=True) + 1e-12)


@triton.jit
def _filters(  # type: ignore[no-untyped-def]
    w, out, w_row, gain, O, C,
    TAPS: tl.constexpr, STANDARDIZE: tl.constexpr, BO: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """out [R, TAPS, C, O] = gain · w [R, O, C, TAPS], or gain · (w - mean) / |w - mean| of each filter"""
    D = C * TAPS
    row = tl.program_id(0).to(tl.int64)
    o = tl.program_id(1) * BO + tl.arange(0, BO)[:, None]
    w += row * w_row
    mean, scale = 0.0, 1.0
    if STANDARDIZE:
        mean, scale = _statistics(w, o, O, D, BO, BD)
    for first in range(0, D, BD):
        d = first + tl.arange(0, BD)[None, :]
        result = (_load(w, o, d, O, D) - mean) * (gain * scale)
        there = out + row * O * D + ((d % TAPS) * C + d // TAPS) * O + o
        tl.store(there, result.to(out.dtype.element_ty), mask=(o < O) & (d < D))


@triton.jit
def _standardize_backward(w, g, dw, w_row, gain, O, D, BO: tl.constexpr, BD: tl.constexpr):  # type: ignore[no-untyped-def]
    """dw [R, O, D] from the gradient of the filters, g [R, O, D]"""
    row = tl.program_id(0).to(tl.int64)
    o = tl.program_id(1) * BO + tl.arange(0, BO)[:, None]
    d = tl.arange(0, BD)[None, :]
    w += row * w_row
    g += row * O * D
    mean, scale = _statistics(w, o, O, D, BO, BD)
    levels = tl.zeros((BO, BD), dtype=tl.float32)
    slopes = tl.zeros((BO, BD), dtype=tl.float32)
    for first in range(0, D, BD):
        grad = _load(g, o, first + d, O, D)
        levels += grad
        slopes += grad * (_load(w, o, first + d, O, D) - mean) * scale
    # With u = (w - mean) · scale: dw = gain · scale · (g - mean(g) - u · sum(g · u))
    level = tl.sum(levels, axis=1, keep_dims=True) / D
    slope = tl.sum(slopes, axis=1, keep_dims=True)
    for first in range(0, D, BD):
        unit = (_load(w, o, first + d, O, D) - mean) * scale
        result = gain * scale * (_load(g, o, first + d, O, D) - level - unit * slope)
        there = dw + row * O * D + o * D + first + d
        tl.store(there, result.to(dw.dtype.element_ty), mask=(o < O) & (first + d < D))


class RowFilters(torch.autograd.Function):
    """Standardize weights if asked, and scale them.  # w [R, O, C, *kernel] → [R, taps, C, O]

    The gradient of the filters is read without a copy where it lies in memory as [R, O, C, taps].
    """

    @staticmethod
    def forward(ctx: Any, w: Tensor, standardize: bool, scale: float) -> Tensor:
        w = w if w[0].is_contiguous() else w.contiguous()
        rows, outputs, channels = w.shape[:3]
        taps = w.shape[3:].numel()
        out = w.new_empty(rows, taps, channels, outputs)
        ctx.gain, ctx.shape = float(RELU_GAIN * scale if standardize else scale), w.shape
        ctx.save_for_backward(w if standardize else None)
        blocks, tile = _tiling(outputs, channels * taps)
        _filters[(rows, blocks)](w, out, w.stride(0), ctx.gain, outputs, channels, taps, standardize, **tile)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        grad = grad.permute(0, 3, 2, 1).contiguous().flatten(2)  # [R, O, D]
        (w,) = ctx.saved_tensors
        if w is None:
            dw = grad if ctx.gain == 1 else ctx.gain * grad
        else:
            dw = torch.empty_like(grad)
            rows, outputs, depth = grad.shape
            blocks, tile = _tiling(outputs, depth)
            _standardize_backward[(rows, blocks)](w, grad, dw, w.stride(0), ctx.gain, outputs, depth, **tile)
        return dw.view(ctx.shape), None, None


@cache
def _tiling(outputs: int, depth: int) -> tuple[int, dict[str, int]]:
    """Return the number of programs for a row, and the launch parameters."""
    # At most 8,192 elements; at least 16 filters, which are neighbours in the result.
    deep = min(next_power(depth, 16), 512)
    wide = min(next_power(outputs, 16), 8192 // deep, 64)
    return ceil_div(outputs, wide), {"BO": wide, "BD": deep, "num_warps": max(wide * deep // 512, 1)}
