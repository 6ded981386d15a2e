"""A residual branch of two Linear layers, second(gelu(first(unit(x)))): one kernel each way.

unit brings each vector to mean 0 and deviation 1. Nothing but x is kept for the way back: the hidden units
are computed again, which costs less than writing and reading them.
x [R, n, D]; first [R, H, D], bias [R, H], second [R, D, H], each row dense and any stride apart
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from esper.population.kernels.rows import ceil_div, next_power

WIDEST = 64  # of a vector: a program holds the weights of its row
LARGEST = 8192  # elements of a layer
LEAST = 16  # of each side of a product
PROGRAMS = 1024  # that keep a GPU busy


def perceptron_fits(width: int, hidden: int) -> bool:
    """Whether the weights of a row are small enough for one program."""
    return (
        next_power(width, LEAST) <= WIDEST and next_power(width, LEAST) * next_power(hidden, LEAST) <= LARGEST
    )


@triton.jit
def _unit(x, there, eps, D: tl.constexpr):  # type: ignore[no-untyped-def]
    """Each vector at mean 0 and deviation 1, and by how much it was multiplied.  # [BN, BD], [BN, 1]"""
    centred = tl.where(there, x - tl.sum(x, axis=1)[:, None] / D, 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(centred * centred, axis=1)[:, None] / D + eps)
    return centred * rstd, rstd


@triton.jit
def _normal_share(a):  # type: ignore[no-untyped-def]
    """How likely a standard normal number is to be less than a: gelu(a) is a times that."""
    return 0.5 * (1.0 + tl.erf(a * 0.7071067811865476))


@triton.jit
def _vectors(n, start, D: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where the elements of some vectors lie within a row, and which exist.  # [BN, BD]"""
    i = (start + tl.arange(0, BN))[:, None]
    d = tl.arange(0, BD)[None, :]
    return i * D + d, (i < n) & (d < D)


@triton.jit
def _layers(  # type: ignore[no-untyped-def]
    first, bias, second, row, first_row, bias_row, second_row,
    D: tl.constexpr, H: tl.constexpr, BD: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    """The weights of a row, 0 beyond their sizes.  # first turned round [BD, BH], [BH], second [BD, BH]"""
    d = tl.arange(0, BD)[:, None]
    h = tl.arange(0, BH)[None, :]
    known = (d < D) & (h < H)
    one = tl.load(first + row * first_row + h * D + d, mask=known, other=0.0)
    two = tl.load(second + row * second_row + d * H + h, mask=known, other=0.0)
    units = tl.arange(0, BH)
    level = tl.load(bias + row * bias_row + units, mask=units < H, other=0.0).to(tl.float32)
    return one, level, two


@triton.jit
def _perceptron(  # type: ignore[no-untyped-def]
    x, first, bias, second, out, n, tiles, first_row, bias_row, second_row, eps,
    D: tl.constexpr, H: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) // tiles).to(tl.int64)
    offset, there = _vectors(n, (tl.program_id(0) % tiles) * BN, D, BN, BD)
    one, level, two = _layers(first, bias, second, row, first_row, bias_row, second_row, D, H, BD, BH)
    value = tl.load(x + row * n * D + offset, mask=there, other=0.0)
    unit, _ = _unit(value.to(tl.float32), there, eps, D)
    hidden = tl.dot(unit.to(value.dtype), one, input_precision="tf32") + level[None, :]
    said = (hidden * _normal_share(hidden)).to(value.dtype)
    result = tl.dot(said, tl.trans(two), input_precision="tf32")
    tl.store(out + row * n * D + offset, result.to(out.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["splits", "span"])  # they follow the number of rows
def _perceptron_backward(  # type: ignore[no-untyped-def]
    x, g, first, bias, second, dx, dfirst, dbias, dsecond, n, splits, span,
    first_row, bias_row, second_row, eps,
    D: tl.constexpr, H: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    """dx, and this program's shares of dfirst [R, splits, H, D], dbias [.., H] and dsecond [.., D, H]"""
    row = (tl.program_id(0) // splits).to(tl.int64)
    split = tl.program_id(0) % splits
    one, level, two = _layers(first, bias, second, row, first_row, bias_row, second_row, D, H, BD, BH)
    x += row * n * D
    g += row * n * D
    dx += row * n * D
    total_one = tl.zeros((BD, BH), dtype=tl.float32)
    total_two = tl.zeros((BD, BH), dtype=tl.float32)
    total_level = tl.zeros((BH,), dtype=tl.float32)
    for start in range(split * span, tl.minimum((split + 1) * span, n), BN):
        offset, there = _vectors(n, start, D, BN, BD)
        value = tl.load(x + offset, mask=there, other=0.0)
        grad = tl.load(g + offset, mask=there, other=0.0).to(value.dtype)
        unit, rstd = _unit(value.to(tl.float32), there, eps, D)
        rounded = unit.to(value.dtype)
        hidden = tl.dot(rounded, one, input_precision="tf32") + level[None, :]
        share = _normal_share(hidden)
        # gelu(a) = a Φ(a), so gelu'(a) = Φ(a) + a φ(a), with φ(a) = exp(-a² / 2) / sqrt(2π).
        slope = share + hidden * tl.exp(-0.5 * hidden * hidden) * 0.3989422804014327
        change = tl.dot(grad, two, input_precision="tf32") * slope
        down = tl.dot(change.to(value.dtype), tl.trans(one), input_precision="tf32")
        # Through the norm: dx = rstd · (g - mean(g) - unit · mean(g · unit)).
        mean = tl.sum(down, axis=1)[:, None] / D
        along = tl.sum(down * unit, axis=1)[:, None] / D
        tl.store(dx + offset, (rstd * (down - mean - unit * along)).to(dx.dtype.element_ty), mask=there)
        said = (hidden * share).to(value.dtype)
        total_one = tl.dot(tl.trans(rounded), change.to(value.dtype), total_one, input_precision="tf32")
        total_two = tl.dot(tl.trans(grad), said, total_two, input_precision="tf32")
        total_level += tl.sum(change, axis=0)
    d = tl.arange(0, BD)[:, None]
    h = tl.arange(0, BH)[None, :]
    known = (d < D) & (h < H)
    share_of = row * splits + split
    kind = dfirst.dtype.element_ty
    tl.store(dfirst + share_of * H * D + h * D + d, total_one.to(kind), mask=known)
    tl.store(dsecond + share_of * H * D + d * H + h, total_two.to(kind), mask=known)
    units = tl.arange(0, BH)
    tl.store(dbias + share_of * H + units, total_level.to(kind), mask=units < H)


class RowPerceptron(torch.autograd.Function):
    """See the top of this file; for sizes that `perceptron_fits` allows.  # x [R, ..., D] → same"""

    @staticmethod
    def forward(ctx: Any, x: Tensor, first: Tensor, bias: Tensor, second: Tensor, eps: float) -> Tensor:
        x = x.contiguous()
        out = torch.empty_like(x)
        sizes, vectors = _sizes(x, first)
        tiles = ceil_div(vectors, sizes["BN"])
        strides = (first.stride(0), bias.stride(0), second.stride(0))
        grid = (tiles * x.shape[0],)
        _perceptron[grid](x, first, bias, second, out, vectors, tiles, *strides, eps, **sizes)
        ctx.save_for_backward(x, first, bias, second)
        ctx.eps = eps
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, first, bias, second = ctx.saved_tensors
        rows = x.shape[0]
        sizes, vectors = _sizes(x, first)
        # Few rows are split among several programs, whose gradients are then summed in float32.
        splits = min(ceil_div(PROGRAMS, rows), ceil_div(vectors, sizes["BN"]))
        span = ceil_div(ceil_div(vectors, splits), sizes["BN"]) * sizes["BN"]
        kind = first.dtype if splits == 1 else torch.float32
        shares = [
            torch.empty(rows, splits, *weight.shape[1:], dtype=kind, device=x.device)
            for weight in (first, bias, second)
        ]
        dx = torch.empty_like(x)
        strides = (first.stride(0), bias.stride(0), second.stride(0))
        _perceptron_backward[(splits * rows,)](
            x, grad.contiguous(), first, bias, second, dx, *shares, vectors, splits, span, *strides, ctx.eps,
            **sizes,
        )  # fmt: skip
        totals = [s.squeeze(1) if splits == 1 else s.sum(1).to(first.dtype) for s in shares]
        return dx, *totals, None


def _sizes(x: Tensor, first: Tensor) -> tuple[dict[str, int], int]:
    """What the kernels know before they are compiled, and how many vectors a row has."""
    hidden, width = first.shape[1:]
    wide, tall = next_power(width, LEAST), next_power(hidden, LEAST)
    small = wide * tall <= LARGEST // 8
    tile = {"BN": 64 if tall <= 64 else 32, "BD": wide, "BH": tall, "num_warps": 4 if small else 8}
    return {"D": width, "H": hidden, **tile}, x[0].numel() // width
