"""Group norms of rows with the SiLUs around them: one kernel each way.

out = post(unit(pre(x)) · w + b), where pre and post are SiLUs or nothing and unit brings each group of a
sample's channels to mean 0 and deviation 1. A group is all channels, or a power of two of them.
x [R, B, C, *spatial] with a sample's channels last in memory, as P pixels of C; w and b [R, C]
"""

from __future__ import annotations

from functools import cache
from math import prod
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from esper.population.kernels.rows import ceil_div, dense_rows, next_power

# Chosen on an H200, like the elements of a warp: 2,048 of whole samples, 256 of a span.
TILE = 8192  # elements of several samples that a program holds at a time
SPAN = 2048  # elements of a span of a larger sample
BACK_TILE = 1024  # of the backward kernel: within one warp the sums for dw and db need no shared memory
WIDEST = 16384  # a sample up to this size is read once and kept


@triton.jit
def _act(x, SILU: tl.constexpr):  # type: ignore[no-untyped-def]
    if SILU:
        return x * tl.sigmoid(x)
    else:
        return x


@triton.jit
def _slope(x, SILU: tl.constexpr):  # type: ignore[no-untyped-def]
    """The derivative of the activation at x."""
    if SILU:
        s = tl.sigmoid(x)
        return s * (1.0 + x * (1.0 - s))
    else:
        return tl.full(x.shape, 1.0, tl.float32)


@triton.jit
def _over_group(x, BS: tl.constexpr, BC: tl.constexpr, G: tl.constexpr):  # type: ignore[no-untyped-def]
    """Sum over the pixels and the channels of a group; G channels in a group, 0 for all of them.

    [S, P, C] → [S, 1, 1], or [S, 1, C] with the sum of a group at each of its channels
    """
    if G == 0:
        return tl.expand_dims(tl.expand_dims(tl.sum(tl.sum(x, axis=2), axis=1), 1), 2)
    else:
        sums = tl.sum(tl.reshape(tl.sum(x, axis=1), (BS, BC // G, G)), axis=2)  # [S, groups]
        wide = tl.broadcast_to(tl.expand_dims(sums, 2), (BS, BC // G, G))
        return tl.expand_dims(tl.reshape(wide, (BS, BC)), 1)


@triton.jit
def _statistics(row, B, tile, C, BS: tl.constexpr, BC: tl.constexpr, G: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where the statistics of each group lie (with several groups, at each channel), and which exist."""
    s = (tile * BS + tl.arange(0, BS))[:, None, None]
    if G == 0:
        return row * B + s, s < B
    else:
        c = tl.arange(0, BC)[None, None, :]
        return (row * B + s) * C + c, (s < B) & (c < C)


@triton.jit
def _tile(B, P, C, tile, first, BS: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where the elements of some samples from pixel `first` on lie within a row, and which exist."""
    s = (tile * BS + tl.arange(0, BS))[:, None, None]
    p = (first + tl.arange(0, BP))[None, :, None]
    c = tl.arange(0, BC)[None, None, :]
    return (s * P + p) * C + c, (s < B) & (p < P) & (c < C)


@triton.jit
def _weights(w, b, C: tl.constexpr, AFFINE: tl.constexpr, BC: tl.constexpr):  # type: ignore[no-untyped-def]
    """The weights and biases of a row; 1 and 0 for a norm that has none."""
    if AFFINE:
        c = tl.arange(0, BC)[None, None, :]
        weight = tl.load(w + c, mask=c < C, other=0.0).to(tl.float32)
        bias = tl.load(b + c, mask=c < C, other=0.0).to(tl.float32)
    else:
        weight = 1.0
        bias = 0.0
    return weight, bias


@triton.jit
def _norm(  # type: ignore[no-untyped-def]
    x, w, b, out, mean_out, rstd_out, B, P, tiles, w_row, b_row, eps,
    C: tl.constexpr, G: tl.constexpr, AFFINE: tl.constexpr, PRE: tl.constexpr, POST: tl.constexpr,
    WHOLE: tl.constexpr, BS: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) // tiles).to(tl.int64)
    tile = tl.program_id(0) % tiles
    x += row * B * P * C
    out += row * B * P * C
    weight, bias = _weights(w + row * w_row, b + row * b_row, C, AFFINE, BC)
    size = P * (C if G == 0 else G)
    if WHOLE:
        offset, inside = _tile(B, P, C, tile, 0, BS, BP, BC)
        value = tl.load(x + offset, mask=inside, other=0.0).to(tl.float32)
        seen = _act(value, PRE)  # 0 stays 0
        mean = _over_group(seen, BS, BC, G) / size
        centred = tl.where(inside, seen - mean, 0.0)
        rstd = 1.0 / tl.sqrt(_over_group(centred * centred, BS, BC, G) / size + eps)
        result = _act(centred * rstd * weight + bias, POST)
        tl.store(out + offset, result.to(out.dtype.element_ty), mask=inside)
    else:
        total = tl.zeros((BS, BP, BC), dtype=tl.float32)
        for first in range(0, P, BP):
            offset, inside = _tile(B, P, C, tile, first, BS, BP, BC)
            total += _act(tl.load(x + offset, mask=inside, other=0.0).to(tl.float32), PRE)
        # The variance takes a second pass: E[x²] - E[x]² would cancel in float32.
        mean = _over_group(total, BS, BC, G) / size
        square = tl.zeros((BS, BP, BC), dtype=tl.float32)
        for first in range(0, P, BP):
            offset, inside = _tile(B, P, C, tile, first, BS, BP, BC)
            value = _act(tl.load(x + offset, mask=inside, other=0.0).to(tl.float32), PRE)
            centred = tl.where(inside, value - mean, 0.0)
            square += centred * centred
        rstd = 1.0 / tl.sqrt(_over_group(square, BS, BC, G) / size + eps)
        for first in range(0, P, BP):
            offset, inside = _tile(B, P, C, tile, first, BS, BP, BC)
            value = tl.load(x + offset, mask=inside, other=0.0).to(tl.float32)
            result = _act((_act(value, PRE) - mean) * rstd * weight + bias, POST)
            tl.store(out + offset, result.to(out.dtype.element_ty), mask=inside)
    where, known = _statistics(row, B, tile, C, BS, BC, G)
    tl.store(mean_out + where, mean, mask=known)
    tl.store(rstd_out + where, rstd, mask=known)


@triton.jit
def _inner(value, grad, mean, rstd, weight, bias, PRE: tl.constexpr, POST: tl.constexpr):  # type: ignore[no-untyped-def]
    """u = unit(pre(x)), and the gradient of u · w + b"""
    unit = (_act(value, PRE) - mean) * rstd
    return unit, grad * _slope(unit * weight + bias, POST)


@triton.jit
def _norm_backward(  # type: ignore[no-untyped-def]
    x, w, b, g, residual, mean_in, rstd_in, dx, dw, db, B, P, tiles, w_row, b_row,
    C: tl.constexpr, G: tl.constexpr, AFFINE: tl.constexpr, PRE: tl.constexpr, POST: tl.constexpr,
    RESIDUAL: tl.constexpr, WHOLE: tl.constexpr, BS: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """dx, and with AFFINE this program's shares of dw and db [R, tiles, C]

    RESIDUAL: whether dx includes `residual`, the gradient of x that does not come through the norm
    """
    row = (tl.program_id(0) // tiles).to(tl.int64)
    tile = tl.program_id(0) % tiles
    x += row * B * P * C
    g += row * B * P * C
    residual += row * B * P * C
    dx += row * B * P * C
    where, known = _statistics(row, B, tile, C, BS, BC, G)
    mean = tl.load(mean_in + where, mask=known, other=0.0)
    rstd = tl.load(rstd_in + where, mask=known, other=0.0)
    weight, bias = _weights(w + row * w_row, b + row * b_row, C, AFFINE, BC)
    offset, inside = _tile(B, P, C, tile, 0, BS, BP, BC)
    value = tl.load(x + offset, mask=inside, other=0.0).to(tl.float32)
    grad = tl.load(g + offset, mask=inside, other=0.0).to(tl.float32)
    unit, levels = _inner(value, grad, mean, rstd, weight, bias, PRE, POST)
    slopes = levels * unit
    if not WHOLE:
        for first in range(BP, P, BP):
            offset, inside = _tile(B, P, C, tile, first, BS, BP, BC)
            value = tl.load(x + offset, mask=inside, other=0.0).to(tl.float32)
            grad = tl.load(g + offset, mask=inside, other=0.0).to(tl.float32)
            unit, inner = _inner(value, grad, mean, rstd, weight, bias, PRE, POST)
            levels += inner
            slopes += inner * unit
    if AFFINE:
        share, c = row * tiles + tile, tl.arange(0, BC)
        tl.store(db + share * C + c, tl.sum(tl.sum(levels, axis=1), axis=0), mask=c < C)
        tl.store(dw + share * C + c, tl.sum(tl.sum(slopes, axis=1), axis=0), mask=c < C)
    size = P * (C if G == 0 else G)
    # With u = unit(pre(x)) and g = post'(u w + b) · grad · w, over each group:
    # dx = rstd · (g - mean(g) - u · mean(g · u)) · pre'(x)
    level = _over_group(levels * weight, BS, BC, G) / size
    slope = _over_group(slopes * weight, BS, BC, G) / size
    if WHOLE:
        result = rstd * (levels * weight - level - unit * slope) * _slope(value, PRE)
        if RESIDUAL:
            result += tl.load(residual + offset, mask=inside, other=0.0).to(tl.float32)
        tl.store(dx + offset, result.to(dx.dtype.element_ty), mask=inside)
    else:
        for first in range(0, P, BP):
            offset, inside = _tile(B, P, C, tile, first, BS, BP, BC)
            value = tl.load(x + offset, mask=inside, other=0.0).to(tl.float32)
            grad = tl.load(g + offset, mask=inside, other=0.0).to(tl.float32)
            unit, inner = _inner(value, grad, mean, rstd, weight, bias, PRE, POST)
            result = rstd * (inner * weight - level - unit * slope) * _slope(value, PRE)
            if RESIDUAL:
                result += tl.load(residual + offset, mask=inside, other=0.0).to(tl.float32)
            tl.store(dx + offset, result.to(dx.dtype.element_ty), mask=inside)


class RowNorm(torch.autograd.Function):
    """x, and its norm: see the top of this file; `pre` and `post` say where there is a SiLU.

    x is returned as well, so that the gradients of both uses are added in the pass over the norm's.
    w and b are None for a norm without weights. With several groups each has a power of two of channels.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w: Tensor | None, b: Tensor | None,
        eps: float, pre: bool, post: bool, groups: int,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        last = x.movedim(2, -1).contiguous()
        weight, bias = (last, last) if w is None or b is None else (dense_rows(w), dense_rows(b))
        rows, images, *spatial, channels = last.shape
        pixels = prod(spatial)
        out = torch.empty_like(last)
        group = 0 if groups == 1 else channels // groups
        mean = torch.empty(rows, images, channels if group else 1, device=x.device)
        rstd = torch.empty_like(mean)
        whole, tile = _tiling(images, pixels, channels, TILE)
        kinds = {"AFFINE": w is not None, "PRE": pre, "POST": post, "G": group}
        tiles = ceil_div(images, tile["BS"])
        _norm[(tiles * rows,)](
            last, weight, bias, out, mean, rstd, images, pixels, tiles, weight.stride(0), bias.stride(0), eps,
            C=channels, WHOLE=whole, **kinds, **tile,
        )  # fmt: skip
        ctx.save_for_backward(last, weight, bias, mean, rstd)
        ctx.set_materialize_grads(False)
        ctx.kinds = kinds
        return x, out.movedim(-1, 2)

    @staticmethod
    def backward(ctx: Any, residual: Tensor | None, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return residual, None, None, None, None, None, None
        last, w, b, mean, rstd = ctx.saved_tensors
        rows, images, *spatial, channels = last.shape
        pixels = prod(spatial)
        whole, tile = _tiling(images, pixels, channels, BACK_TILE)
        tiles = ceil_div(images, tile["BS"])
        dx, affine = torch.empty_like(last), ctx.kinds["AFFINE"]
        shares = torch.empty(2, rows, tiles if affine else 0, channels, device=last.device)
        _norm_backward[(tiles * rows,)](
            last, w, b, grad.movedim(2, -1).contiguous(),
            last if residual is None else residual.movedim(2, -1).contiguous(),
            mean, rstd, dx, shares[0], shares[1], images, pixels, tiles, w.stride(0), b.stride(0),
            C=channels, RESIDUAL=residual is not None, WHOLE=whole, **ctx.kinds, **tile,
        )  # fmt: skip
        dw, db = shares.sum(2).to(w.dtype) if affine else (None, None)
        return dx.movedim(-1, 2), dw, db, None, None, None, None


@cache
def _tiling(images: int, pixels: int, channels: int, size: int) -> tuple[bool, dict[str, int]]:
    """Return whether a program holds whole samples, and the launch parameters.

    size: elements of a tile of several samples
    """
    wide, long = next_power(channels), next_power(pixels)
    whole = wide * long <= WIDEST
    tall = long if whole else max(SPAN // wide, 1)
    several = min(max(size // (wide * tall), 1), next_power(images)) if whole else 1
    warps = min(max(wide * tall * several // (2048 if whole else 256), 1), 16)
    return whole, {"BS": several, "BP": tall, "BC": wide, "num_warps": warps}
