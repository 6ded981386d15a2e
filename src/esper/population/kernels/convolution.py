"""Convolutions of rows without the nine-fold copy.

Activations are channels last: [R, B, H, W, C]. A convolution is an implicit matrix product: each program
gathers its patches from the cache as it multiplies, so that memory sees every activation once. Signals are
images of height 1. Products run in TF32 or BF16, as the activations are; sums run in FP32.

Where an output meets an input is affine in the output's position and the kernel's offset, so a patch costs
one addition per element; which offsets fall inside the image are bits that each output carries with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from esper.population.kernels.rows import ceil_div, next_power


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

    @property
    def turned(self) -> Geometry:
        """The convolution that takes gradients back, where the stride is 1."""
        high, wide = (k - 1 - p for k, p in zip(self.kernel, self.padding, strict=True))
        return Geometry(self.kernel, self.stride, (high, wide))


@triton.jit
def _reach(  # type: ignore[no-untyped-def]
    o, STRIDE: tl.constexpr, PAD: tl.constexpr, SIZE: tl.constexpr, K: tl.constexpr
):
    """Bit d says whether output position o meets an input under kernel offset d."""
    bits = tl.zeros_like(o)
    for d in tl.static_range(K):
        i = o * STRIDE + d - PAD
        bits |= tl.where((i >= 0) & (i < SIZE), 1 << d, 0)
    return bits


@triton.jit
def _origin(  # type: ignore[no-untyped-def]
    m,
    H: tl.constexpr, W: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
    SY: tl.constexpr, SX: tl.constexpr, PY: tl.constexpr, PX: tl.constexpr,
    C: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
):  # fmt: skip
    """Of output pixels m: where offset (0, 0) lies in the input, and the bits of both axes."""
    oy = (m // OW) % OH
    ox = m % OW
    origin = (((m // (OH * OW)) * H + oy * SY - PY) * W + ox * SX - PX) * C
    return origin, _reach(oy, SY, PY, H, KH), _reach(ox, SX, PX, W, KW)


@triton.jit
def _conv(  # type: ignore[no-untyped-def]
    x, w, bias, out, M, tiles, blocks, bias_row,
    H: tl.constexpr, W: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
    SY: tl.constexpr, SX: tl.constexpr, PY: tl.constexpr, PX: tl.constexpr,
    C: tl.constexpr, O: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    BACK: tl.constexpr, SPREAD: tl.constexpr, BIAS: tl.constexpr,
    BM: tl.constexpr, BK: tl.constexpr, BO: tl.constexpr,
):  # fmt: skip
    """out [R, M, O] = patches of x [R, B, H, W, C] times w [R, KH·KW, C, O], with a bias if asked

    BACK: takes gradients back, so w is read as [R, KH·KW, O, C]; with a stride of 1 its offsets are turned
    round, and with a larger one (SPREAD) an output meets only the inputs that a stride reaches.
    """
    K: tl.constexpr = KH * KW * C
    TAPS: tl.constexpr = 1 if C % BK == 0 else BK  # offsets of a step: one for all of it, or one each
    tile = tl.program_id(0) // blocks
    row = (tile // tiles).to(tl.int64)
    m = (tile % tiles) * BM + tl.arange(0, BM)
    o = (tl.program_id(0) % blocks) * BO + tl.arange(0, BO)
    x += row * (M // (OH * OW)) * H * W * C
    w += row * K * O
    image = m // (OH * OW)
    oy = (m // OW) % OH
    ox = m % OW
    origin, in_y, in_x = _origin(m, H, W, OH, OW, SY, SX, PY, PX, C, KH, KW)
    in_y = tl.where(m < M, in_y, 0)
    acc = tl.zeros((BM, BO), dtype=tl.float32)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        tap = (start + tl.arange(0, TAPS)) // C
        c = k % C
        dy = tap // KW
        dx = tap % KW
        if SPREAD:
            ty = oy[:, None] + PY - dy[None, :]
            tx = ox[:, None] + PX - dx[None, :]
            iy = ty // SY
            ix = tx // SX
            seen = (ty >= 0) & (tx >= 0) & (ty % SY == 0) & (tx % SX == 0) & (iy < H) & (ix < W)
            seen = seen & (m < M)[:, None] & (k < K)[None, :]
            patch = tl.load(x + ((image[:, None] * H + iy) * W + ix) * C + c[None, :], mask=seen, other=0.0)
        else:
            seen = ((in_y[:, None] >> dy[None, :]) & (in_x[:, None] >> dx[None, :]) & 1) != 0
            offset = (dy * W + dx) * C + c
            patch = tl.load(x + origin[:, None] + offset[None, :], mask=seen, other=0.0)
        known = (k < K)[:, None] & (o < O)[None, :]
        if BACK:
            turned = tap if SPREAD else KH * KW - 1 - tap
            weight = tl.load(w + (turned[:, None] * O + o[None, :]) * C + c[:, None], mask=known, other=0.0)
        else:
            weight = tl.load(w + k[:, None] * O + o[None, :], mask=known, other=0.0)
        acc = tl.dot(patch, weight.to(patch.dtype), acc, input_precision="tf32")
    if BIAS:
        acc += tl.load(bias + row * bias_row + o, mask=o < O, other=0.0).to(tl.float32)[None, :]
    result = acc.to(out.dtype.element_ty)
    tl.store(
        out + row * M * O + m[:, None] * O + o[None, :], result, mask=(m < M)[:, None] & (o < O)[None, :]
    )


@triton.jit(do_not_specialize=["splits", "span"])  # they follow the number of rows
def _conv_weight(  # type: ignore[no-untyped-def]
    x, g, out, M, blocks, groups, splits, span,
    H: tl.constexpr, W: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
    SY: tl.constexpr, SX: tl.constexpr, PY: tl.constexpr, PX: tl.constexpr,
    C: tl.constexpr, O: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    SWAP: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, BO: tl.constexpr,
):  # fmt: skip
    """out [R, splits, O, C, KH·KW] = g [R, M, O], transposed, times patches of x, over `span` pixels each

    SWAP: computed as its transpose, so that the small factor is the one that is turned: a factor of four
    in float32, where turning costs a trip through shared memory.
    """
    K: tl.constexpr = KH * KW * C
    P: tl.constexpr = OH * OW
    TAPS: tl.constexpr = 1 if C % BK == 0 else BK  # see _conv
    block = tl.program_id(0) // groups
    part = block // blocks
    row = (part // splits).to(tl.int64)
    split = part % splits
    first = (block % blocks) * BK
    k = first + tl.arange(0, BK)
    o = (tl.program_id(0) % groups) * BO + tl.arange(0, BO)
    tap = (first + tl.arange(0, TAPS)) // C
    dy = tap // KW
    dx = tap % KW
    offset = (dy * W + dx) * C + k % C
    x += row * (M // P) * H * W * C
    g += row * M * O
    acc = tl.zeros((BO, BK) if SWAP else (BK, BO), dtype=tl.float32)
    last = tl.minimum((split + 1) * span, M)
    here = tl.arange(0, BM)
    origin, in_y, in_x = _origin(here, H, W, OH, OW, SY, SX, PY, PX, C, KH, KW)
    for start in range(split * span, last, BM):
        m = start + here
        if BM % P == 0:  # whole images: every tile looks like the first
            spot = origin + (start // P) * (H * W * C)
        else:
            spot, in_y, in_x = _origin(m, H, W, OH, OW, SY, SX, PY, PX, C, KH, KW)
        rows_in = tl.where(m < last, in_y, 0)
        # Bit d of each axis says whether offset d falls inside the image: see _reach.
        seen = ((rows_in[:, None] >> dy[None, :]) & (in_x[:, None] >> dx[None, :]) & 1) != 0
        patch = tl.load(x + spot[:, None] + offset[None, :], mask=seen, other=0.0)
        known = (m < last)[:, None] & (o < O)[None, :]
        grad = tl.load(g + m[:, None] * O + o[None, :], mask=known, other=0.0)
        if SWAP:
            acc = tl.dot(tl.trans(grad), patch, acc, input_precision="tf32")
        else:
            acc = tl.dot(tl.trans(patch), grad, acc, input_precision="tf32")
    result = (tl.trans(acc) if SWAP else acc).to(out.dtype.element_ty)
    turned = (k % C) * (KH * KW) + tap
    there = out + (row * splits + split) * K * O + o[None, :] * K + turned[:, None]
    tl.store(there, result, mask=(k < K)[:, None] & (o < O)[None, :])


@cache
def _constants(shape: Geometry, size: tuple[int, int], out: tuple[int, int], channels: int) -> dict[str, int]:
    """What a kernel knows of a convolution before it is compiled."""
    names = ("H", "W", "OH", "OW", "SY", "SX", "PY", "PX", "KH", "KW", "C")
    values = (*size, *out, *shape.stride, *shape.padding, *shape.kernel, channels)
    return dict(zip(names, values, strict=True))


# By the outputs of a tile, chosen on an H200. More than 128 would not fit the registers, so that wide
# layers are cut into blocks.
FORWARD_TILES = {
    16: {"BM": 256, "BK": 32, "num_warps": 4, "num_stages": 2},
    32: {"BM": 128, "BK": 32, "num_warps": 4, "num_stages": 4},
    64: {"BM": 128, "BK": 64, "num_warps": 4, "num_stages": 3},
    128: {"BM": 128, "BK": 64, "num_warps": 4, "num_stages": 3},
}
WEIGHT_TILES = {
    32: {"BM": 64, "BK": 64, "num_warps": 4, "num_stages": 3},
    64: {"BM": 128, "BK": 64, "num_warps": 4, "num_stages": 3},
    128: {"BM": 64, "BK": 128, "num_warps": 4, "num_stages": 3},
}


def _tile(tiles: dict[int, dict[str, int]], outputs: int, depth: int, deepest: int) -> dict[str, int]:
    """The sizes of a tile for so many outputs and elements of a patch, of which it has at most `deepest`."""
    wide = min(next_power(outputs, 16), max(tiles))
    tile = tiles[max(wide, min(tiles))]
    return {**tile, "BO": wide, "BK": min(next_power(depth, 16), tile["BK"], deepest)}


def _convolve(
    x: Tensor,
    w: Tensor,
    size: tuple[int, int],
    shape: Geometry,
    back: bool = False,
    bias: Tensor | None = None,
) -> Tensor:
    """x [R, B, H, W, C], w [R, KH·KW, C, O] → [R, B, *size, O]; back: w [R, KH·KW, O, C]; bias [R, O]"""
    rows, images, height, width, channels = x.shape
    outputs = w.shape[2] if back else w.shape[3]
    out = x.new_empty(rows, images, *size, outputs)
    pixels = images * size[0] * size[1]
    spread = back and max(shape.stride) > 1
    # The gradient of a convolution with stride 1 is a convolution with the kernel turned round.
    if back and not spread:
        shape = shape.turned
    tile = _tile(FORWARD_TILES, outputs, w.shape[1] * channels, 128 // x.element_size())
    tiles, blocks = ceil_div(pixels, tile["BM"]), ceil_div(outputs, tile["BO"])
    _conv[(tiles * blocks * rows,)](
        x, w, w if bias is None else bias, out, pixels, tiles, blocks, 0 if bias is None else bias.stride(0),
        **_constants(shape, (height, width), size, channels), BIAS=bias is not None,
        O=outputs, BACK=back, SPREAD=spread, **tile,
    )  # fmt: skip
    return out


def _weight_gradient(x: Tensor, grad: Tensor, dtype: torch.dtype, shape: Geometry) -> Tensor:
    """x [R, B, H, W, C], grad [R, B, OH, OW, O] → [R, KH·KW, C, O], in memory [R, O, C, KH·KW]"""
    rows, images, height, width, channels = x.shape
    outputs = grad.shape[-1]
    pixels = images * grad.shape[2] * grad.shape[3]
    taps = shape.kernel[0] * shape.kernel[1]
    depth = channels * taps
    tile = _tile(WEIGHT_TILES, outputs, depth, 256 // x.element_size())
    blocks, groups = ceil_div(depth, tile["BK"]), ceil_div(outputs, tile["BO"])
    # Enough programs to fill the GPU, each over at least 1,024 pixels; their shares are summed in float32.
    splits = max(1, min(ceil_div(1024, rows * blocks * groups), ceil_div(pixels, 1024)))
    span = ceil_div(ceil_div(pixels, splits), tile["BM"]) * tile["BM"]
    kept = dtype if splits == 1 else torch.float32
    out = torch.empty(rows, splits, outputs, channels, taps, device=x.device, dtype=kept)
    _conv_weight[(blocks * groups * rows * splits,)](
        x, grad, out, pixels, blocks, groups, splits, span,
        **_constants(shape, (height, width), (grad.shape[2], grad.shape[3]), channels),
        O=outputs, SWAP=x.dtype == torch.float32, **tile,
    )  # fmt: skip
    return (out.sum(1).to(dtype) if splits > 1 else out.squeeze(1)).permute(0, 3, 2, 1)


def to_channels_last(x: Tensor) -> Tensor:
    """Return signals or images with channels last.  # [R, B, C, (H,) W] → [R, B, H, W, C]"""
    images = x if x.ndim == 5 else x.unsqueeze(3)
    return images.movedim(2, -1).contiguous()


def to_channels_first(x: Tensor, like: Tensor) -> Tensor:
    """Invert `to_channels_last`.  # [R, B, H, W, C] → [R, B, C, (H,) W]"""
    images = x.movedim(-1, 2)
    return images if like.ndim == 5 else images.squeeze(3)


class RowConvolution(torch.autograd.Function):
    """A convolution of rows and its bias.  # x [R, B, C, (H,) W], taps [R, KH·KW, C, O] of `RowFilters`

    Axes are turned in here: as operations of their own they cost the host more than the convolution.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, taps: Tensor, bias: Tensor | None, shape: Geometry) -> Tensor:
        images = to_channels_last(x)
        size = shape.out(*images.shape[2:4])
        out = _convolve(images, taps, size, shape, bias=bias)
        ctx.save_for_backward(images, taps)
        ctx.shape, ctx.bias = shape, None if bias is None else bias.dtype
        return to_channels_first(out, x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        images, taps = ctx.saved_tensors
        change = to_channels_last(grad)
        dx = dtaps = db = None
        if ctx.bias is not None:
            db = change.sum((1, 2, 3), dtype=torch.float32).to(ctx.bias)
        if ctx.needs_input_grad[0]:
            dx = to_channels_first(_convolve(change, taps, images.shape[2:4], ctx.shape, back=True), grad)
        if ctx.needs_input_grad[1]:
            dtaps = _weight_gradient(images, change, taps.dtype, ctx.shape)
        return dx, dtaps, db, None
