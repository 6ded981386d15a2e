"""Depthwise convolutions of rows: every channel has a filter of its own; see convolution.py."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from esper.population.kernels.convolution import Geometry, as_seen, places, stored, taps_first
from esper.population.kernels.tiles import cdiv, power


@triton.jit
def _depthwise(  # type: ignore[no-untyped-def]
    x, w, out, M, tiles,
    H: tl.constexpr, W: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
    SY: tl.constexpr, SX: tl.constexpr, PY: tl.constexpr, PX: tl.constexpr,
    C: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, BACK: tl.constexpr,
    BM: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """out [R, M, C], w [R, KH·KW, C]"""
    row = (tl.program_id(0) // tiles).to(tl.int64)
    m = (tl.program_id(0) % tiles) * BM + tl.arange(0, BM)
    c = tl.arange(0, BC)
    image = m // (OH * OW)
    oy = (m // OW) % OH
    ox = m % OW
    x += row * (M // (OH * OW)) * H * W * C
    acc = tl.zeros((BM, BC), dtype=tl.float32)
    for tap in tl.static_range(KH * KW):
        if BACK:
            ty = oy + PY - tap // KW
            tx = ox + PX - tap % KW
            iy = ty // SY
            ix = tx // SX
            seen = (ty >= 0) & (tx >= 0) & (ty % SY == 0) & (tx % SX == 0) & (iy < H) & (ix < W)
        else:
            iy = oy * SY + tap // KW - PY
            ix = ox * SX + tap % KW - PX
            seen = (iy >= 0) & (iy < H) & (ix >= 0) & (ix < W)
        inside = (seen & (m < M))[:, None] & (c < C)[None, :]
        value = tl.load(x + (((image * H + iy) * W + ix) * C)[:, None] + c[None, :], mask=inside, other=0.0)
        weight = tl.load(w + (row * KH * KW + tap) * C + c, mask=c < C, other=0.0)
        acc += value.to(tl.float32) * weight.to(tl.float32)[None, :]
    result = acc.to(out.dtype.element_ty)
    tl.store(
        out + row * M * C + m[:, None] * C + c[None, :], result, mask=(m < M)[:, None] & (c < C)[None, :]
    )


@triton.jit
def _depthwise_weight(  # type: ignore[no-untyped-def]
    x, g, out, M,
    H: tl.constexpr, W: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
    SY: tl.constexpr, SX: tl.constexpr, PY: tl.constexpr, PX: tl.constexpr,
    C: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """out [R, C, KH·KW]: one program per row and tap"""
    row = (tl.program_id(0) // (KH * KW)).to(tl.int64)
    tap = tl.program_id(0) % (KH * KW)
    c = tl.arange(0, BC)
    x += row * (M // (OH * OW)) * H * W * C
    g += row * M * C
    acc = tl.zeros((BM, BC), dtype=tl.float32)
    for start in range(0, M, BM):
        m = start + tl.arange(0, BM)
        iy = ((m // OW) % OH) * SY + tap // KW - PY
        ix = (m % OW) * SX + tap % KW - PX
        inside = (m < M)[:, None] & (c < C)[None, :]
        seen = ((iy >= 0) & (iy < H) & (ix >= 0) & (ix < W))[:, None] & inside
        place = (((m // (OH * OW)) * H + iy) * W + ix) * C
        value = tl.load(x + place[:, None] + c[None, :], mask=seen, other=0.0).to(tl.float32)
        acc += value * tl.load(g + m[:, None] * C + c[None, :], mask=inside, other=0.0).to(tl.float32)
    total = tl.sum(acc, axis=0).to(out.dtype.element_ty)
    tl.store(out + (row * C + c) * (KH * KW) + tap, total, mask=c < C)


class RowDepthwise(torch.autograd.Function):
    """A depthwise convolution of rows.  # x [R, B, C, (H,) W], w [R, C, 1, *kernel]"""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, shape: Geometry) -> Tensor:
        images, taps = stored(x), taps_first(w)  # [R, taps, 1, C]
        ctx.save_for_backward(images, taps)
        ctx.shape, ctx.weight_shape = shape, w.shape
        return as_seen(_depthwise_over(images, taps, shape.out(*images.shape[2:4]), shape, back=False), x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        images, taps = ctx.saved_tensors
        shape: Geometry = ctx.shape
        change = stored(grad)
        rows, batch, height, width, channels = images.shape
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = as_seen(_depthwise_over(change, taps, images.shape[2:4], shape, back=True), grad)
        if ctx.needs_input_grad[1]:
            dw = taps.new_empty(ctx.weight_shape)
            size = change.shape[2:4]
            _depthwise_weight[(taps.shape[1] * rows,)](
                images, change, dw, batch * size[0] * size[1], BM=128, BC=power(channels),
                **places(shape, (height, width), (size[0], size[1]), channels),
            )  # fmt: skip
        return dx, dw, None


def _depthwise_over(x: Tensor, w: Tensor, size: tuple[int, int], shape: Geometry, back: bool) -> Tensor:
    rows, images, height, width, channels = x.shape
    out = x.new_empty(rows, images, *size, channels)
    pixels = images * size[0] * size[1]
    tiles = cdiv(pixels, 64)
    _depthwise[(tiles * rows,)](
        x, w, out, pixels, tiles, BACK=back, BM=64, BC=power(channels),
        **places(shape, (height, width), size, channels),
    )  # fmt: skip
    return out
