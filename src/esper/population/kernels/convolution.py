"""Convolutions of rows without the nine-fold copy.

Activations are channels last: [R, B, H, W, C]. A convolution is an implicit matrix product: each program
gathers its patches from the cache as it multiplies, so that memory sees every activation once. Signals are
images of height 1. Products run in TF32, sums in FP32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from esper.population.kernels.tiles import power

PIXELS = 128  # outputs per program of a convolution


@dataclass(frozen=True)
class Geometry:
    """The shape of a convolution over images; a signal has height 1 and a kernel of height 1."""

    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]

    def out(self, height: int, width: int) -> tuple[int, int]:
        sizes = zip((height, width), self.kernel, self.stride, self.padding, strict=True)
        high, wide = ((n + 2 * p - k) // s + 1 for n, k, s, p in sizes)
        return high, wide


@triton.jit
def _source(o, d, stride, pad, size, TRANSPOSED: tl.constexpr):  # type: ignore[no-untyped-def]
    """The input position that output position o meets under kernel offset d, and whether it exists."""
    if TRANSPOSED:
        t = o + pad - d
        i = t // stride
        return i, (t >= 0) & (t % stride == 0) & (i < size)
    else:
        i = o * stride + d - pad
        return i, (i >= 0) & (i < size)


@triton.jit
def _conv(  # type: ignore[no-untyped-def]
    x, w, out, H, W, OH, OW, M, sy, sx, py, px,
    C: tl.constexpr, O: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, TRANSPOSED: tl.constexpr,
    BM: tl.constexpr, BK: tl.constexpr, BO: tl.constexpr,
):  # fmt: skip
    """out [R, M, O] = patches of x [R, B, H, W, C] times w [R, KH·KW·C, O]"""
    K: tl.constexpr = KH * KW * C
    row = tl.program_id(1).to(tl.int64)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    o = tl.arange(0, BO)
    image = m // (OH * OW)
    oy = (m // OW) % OH
    ox = m % OW
    x += row * (M // (OH * OW)) * H * W * C
    w += row * K * O
    acc = tl.zeros((BM, BO), dtype=tl.float32)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        tap = k // C
        c = k % C
        iy, in_y = _source(oy[:, None], (tap // KW)[None, :], sy, py, H, TRANSPOSED)
        ix, in_x = _source(ox[:, None], (tap % KW)[None, :], sx, px, W, TRANSPOSED)
        seen = in_y & in_x & (m < M)[:, None] & (k < K)[None, :]
        patch = tl.load(x + ((image[:, None] * H + iy) * W + ix) * C + c[None, :], mask=seen, other=0.0)
        weight = tl.load(w + k[:, None] * O + o[None, :], mask=(k < K)[:, None] & (o < O)[None, :], other=0.0)
        acc = tl.dot(patch, weight, acc, input_precision="tf32")
    place = out + row * M * O + m[:, None] * O + o[None, :]
    tl.store(place, acc, mask=(m < M)[:, None] & (o < O)[None, :])


@triton.jit
def _conv_weight(  # type: ignore[no-untyped-def]
    x, g, out, H, W, OH, OW, M, sy, sx, py, px, SPAN, SPLITS,
    C: tl.constexpr, O: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    BM: tl.constexpr, BK: tl.constexpr, BO: tl.constexpr,
):  # fmt: skip
    """out [R, SPLITS, K, O] = transposed patches of x times g [R, M, O], over SPAN pixels each"""
    K: tl.constexpr = KH * KW * C
    row = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    k = tl.program_id(0) * BK + tl.arange(0, BK)
    o = tl.arange(0, BO)
    tap = k // C
    c = k % C
    x += row * (M // (OH * OW)) * H * W * C
    g += row * M * O
    acc = tl.zeros((BK, BO), dtype=tl.float32)
    last = tl.minimum((split + 1) * SPAN, M)
    for start in range(split * SPAN, last, BM):
        m = start + tl.arange(0, BM)
        image = m // (OH * OW)
        iy, in_y = _source(((m // OW) % OH)[:, None], (tap // KW)[None, :], sy, py, H, False)
        ix, in_x = _source((m % OW)[:, None], (tap % KW)[None, :], sx, px, W, False)
        seen = in_y & in_x & (m < last)[:, None] & (k < K)[None, :]
        patch = tl.load(x + ((image[:, None] * H + iy) * W + ix) * C + c[None, :], mask=seen, other=0.0)
        grad = tl.load(
            g + m[:, None] * O + o[None, :], mask=(m < last)[:, None] & (o < O)[None, :], other=0.0
        )
        acc = tl.dot(tl.trans(patch), grad, acc, input_precision="tf32")
    place = out + ((row * SPLITS + split) * K + k[:, None]) * O + o[None, :]
    tl.store(place, acc, mask=(k < K)[:, None] & (o < O)[None, :])


@triton.jit
def _depthwise(  # type: ignore[no-untyped-def]
    x, w, out, H, W, OH, OW, M, sy, sx, py, px,
    C: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, TRANSPOSED: tl.constexpr,
    BM: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """out [R, M, C], w [R, KH·KW, C]"""
    row = tl.program_id(1).to(tl.int64)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    c = tl.arange(0, BC)
    image = m // (OH * OW)
    x += row * (M // (OH * OW)) * H * W * C
    acc = tl.zeros((BM, BC), dtype=tl.float32)
    for tap in tl.static_range(KH * KW):
        iy, in_y = _source((m // OW) % OH, tap // KW, sy, py, H, TRANSPOSED)
        ix, in_x = _source(m % OW, tap % KW, sx, px, W, TRANSPOSED)
        seen = (in_y & in_x & (m < M))[:, None] & (c < C)[None, :]
        value = tl.load(x + (((image * H + iy) * W + ix) * C)[:, None] + c[None, :], mask=seen, other=0.0)
        weight = tl.load(w + (row * KH * KW + tap) * C + c, mask=c < C, other=0.0)
        acc += value * weight[None, :]
    tl.store(out + row * M * C + m[:, None] * C + c[None, :], acc, mask=(m < M)[:, None] & (c < C)[None, :])


@triton.jit
def _depthwise_weight(  # type: ignore[no-untyped-def]
    x, g, out, H, W, OH, OW, M, sy, sx, py, px,
    C: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """out [R, KH·KW, C]: one program per row and tap"""
    row = tl.program_id(1).to(tl.int64)
    tap = tl.program_id(0)
    c = tl.arange(0, BC)
    x += row * (M // (OH * OW)) * H * W * C
    g += row * M * C
    acc = tl.zeros((BM, BC), dtype=tl.float32)
    for start in range(0, M, BM):
        m = start + tl.arange(0, BM)
        iy, in_y = _source((m // OW) % OH, tap // KW, sy, py, H, False)
        ix, in_x = _source(m % OW, tap % KW, sx, px, W, False)
        inside = (m < M)[:, None] & (c < C)[None, :]
        seen = (in_y & in_x)[:, None] & inside
        place = (((m // (OH * OW)) * H + iy) * W + ix) * C
        value = tl.load(x + place[:, None] + c[None, :], mask=seen, other=0.0)
        acc += value * tl.load(g + m[:, None] * C + c[None, :], mask=inside, other=0.0)
    tl.store(out + (row * KH * KW + tap) * C + c, tl.sum(acc, axis=0), mask=c < C)


def _convolve(x: Tensor, w: Tensor, size: tuple[int, int], shape: Geometry, transposed: bool) -> Tensor:
    """x [R, B, H, W, C], w [R, K, O] → [R, B, *size, O]"""
    rows, images, height, width, channels = x.shape
    outputs = w.shape[-1]
    out = x.new_empty(rows, images, *size, outputs)
    pixels = images * size[0] * size[1]
    depth = shape.kernel[0] * shape.kernel[1] * channels
    grid = (triton.cdiv(pixels, PIXELS), rows)
    _conv[grid](
        x, w, out, height, width, *size, pixels, *shape.stride, *shape.padding,
        C=channels, O=outputs, KH=shape.kernel[0], KW=shape.kernel[1], TRANSPOSED=transposed,
        BM=PIXELS, BK=min(power(depth, 16), 32), BO=power(outputs, 16),
    )  # fmt: skip
    return out


class RowConvolution(torch.autograd.Function):
    """A convolution of rows.  # x [R, B, H, W, C], w [R, KH·KW·C, O]"""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, shape: Geometry) -> Tensor:
        x, w = x.contiguous(), w.contiguous()
        ctx.save_for_backward(x, w)
        ctx.shape = shape
        return _convolve(x, w, shape.out(*x.shape[2:4]), shape, transposed=False)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, w = ctx.saved_tensors
        shape: Geometry = ctx.shape
        grad = grad.contiguous()
        rows, channels, outputs = x.shape[0], x.shape[-1], w.shape[-1]
        dx = dw = None
        if ctx.needs_input_grad[0]:
            turned = (
                w.view(rows, -1, channels, outputs).transpose(2, 3).reshape(rows, -1, channels).contiguous()
            )
            dx = _convolve(grad, turned, x.shape[2:4], shape, transposed=True)
        if ctx.needs_input_grad[1]:
            dw = _weight_gradient(x, grad, w.shape[1], shape)
        return dx, dw, None


def _weight_gradient(x: Tensor, grad: Tensor, depth: int, shape: Geometry) -> Tensor:
    """x [R, B, H, W, C], grad [R, B, OH, OW, O] → [R, K, O]"""
    rows, images, height, width, channels = x.shape
    outputs = grad.shape[-1]
    pixels = images * grad.shape[2] * grad.shape[3]
    block = min(power(depth, 16), 64)
    blocks = triton.cdiv(depth, block)
    splits = max(1, min(triton.cdiv(1024, rows * blocks), triton.cdiv(pixels, 1024)))
    span = triton.cdiv(triton.cdiv(pixels, splits), 64) * 64
    out = x.new_empty(rows, splits, depth, outputs)
    _conv_weight[(blocks, rows, splits)](
        x, grad, out, height, width, grad.shape[2], grad.shape[3], pixels, *shape.stride, *shape.padding,
        span, splits, C=channels, O=outputs, KH=shape.kernel[0], KW=shape.kernel[1],
        BM=64, BK=block, BO=power(outputs, 16),
    )  # fmt: skip
    return out.sum(1) if splits > 1 else out.squeeze(1)


class RowDepthwise(torch.autograd.Function):
    """A depthwise convolution of rows.  # x [R, B, H, W, C], w [R, KH·KW, C]"""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, shape: Geometry) -> Tensor:
        x, w = x.contiguous(), w.contiguous()
        ctx.save_for_backward(x, w)
        ctx.shape = shape
        return RowDepthwise._run(x, w, shape.out(*x.shape[2:4]), shape, transposed=False)

    @staticmethod
    def _run(x: Tensor, w: Tensor, size: tuple[int, int], shape: Geometry, transposed: bool) -> Tensor:
        rows, images, height, width, channels = x.shape
        out = x.new_empty(rows, images, *size, channels)
        pixels = images * size[0] * size[1]
        _depthwise[(triton.cdiv(pixels, 64), rows)](
            x, w, out, height, width, *size, pixels, *shape.stride, *shape.padding,
            C=channels, KH=shape.kernel[0], KW=shape.kernel[1], TRANSPOSED=transposed,
            BM=64, BC=power(channels),
        )  # fmt: skip
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, w = ctx.saved_tensors
        shape: Geometry = ctx.shape
        grad = grad.contiguous()
        rows, images, height, width, channels = x.shape
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = RowDepthwise._run(grad, w, x.shape[2:4], shape, transposed=True)
        if ctx.needs_input_grad[1]:
            dw = torch.empty_like(w)
            pixels = images * grad.shape[2] * grad.shape[3]
            _depthwise_weight[(w.shape[1], rows)](
                x, grad, dw, height, width, grad.shape[2], grad.shape[3], pixels,
                *shape.stride, *shape.padding, C=channels, KH=shape.kernel[0], KW=shape.kernel[1],
                BM=128, BC=power(channels),
            )  # fmt: skip
        return dx, dw, None
