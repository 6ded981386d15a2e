"""One-group norms of rows: one kernel each way.  # [R, B, P, C], channels last"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from esper.population.kernels.tiles import power

SAMPLE_TILE = 4096  # elements that a norm holds at a time


@triton.jit
def _norm(  # type: ignore[no-untyped-def]
    x, w, b, out, mean_out, rstd_out, B, P, eps, C: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr
):
    """Each sample [P pixels, C] to mean 0 and deviation 1, then scaled by the row's w and b [R, C]."""
    sample = tl.program_id(0).to(tl.int64)
    row = sample // B
    c = tl.arange(0, BC)
    base = sample * P * C
    total = tl.zeros((BP, BC), dtype=tl.float32)
    for start in range(0, P, BP):
        p = start + tl.arange(0, BP)
        inside = (p < P)[:, None] & (c < C)[None, :]
        total += tl.load(x + base + p[:, None] * C + c[None, :], mask=inside, other=0.0)
    mean = tl.sum(total) / (P * C)
    square = tl.zeros((BP, BC), dtype=tl.float32)
    for start in range(0, P, BP):
        p = start + tl.arange(0, BP)
        inside = (p < P)[:, None] & (c < C)[None, :]
        value = tl.load(x + base + p[:, None] * C + c[None, :], mask=inside, other=0.0)
        centred = tl.where(inside, value - mean, 0.0)
        square += centred * centred
    rstd = 1.0 / tl.sqrt(tl.sum(square) / (P * C) + eps)
    weight = tl.load(w + row * C + c, mask=c < C, other=0.0)
    bias = tl.load(b + row * C + c, mask=c < C, other=0.0)
    for start in range(0, P, BP):
        p = start + tl.arange(0, BP)
        inside = (p < P)[:, None] & (c < C)[None, :]
        value = tl.load(x + base + p[:, None] * C + c[None, :], mask=inside, other=0.0)
        result = (value - mean) * rstd * weight[None, :] + bias[None, :]
        tl.store(out + base + p[:, None] * C + c[None, :], result, mask=inside)
    tl.store(mean_out + sample, mean)
    tl.store(rstd_out + sample, rstd)


@triton.jit
def _norm_backward(  # type: ignore[no-untyped-def]
    x, w, g, mean_in, rstd_in, dx, dw, db, B, P, C: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr
):
    """dx [R·B, P, C] and, per sample, the shares of dw and db [R·B, C]"""
    sample = tl.program_id(0).to(tl.int64)
    row = sample // B
    c = tl.arange(0, BC)
    base = sample * P * C
    mean = tl.load(mean_in + sample)
    rstd = tl.load(rstd_in + sample)
    weight = tl.load(w + row * C + c, mask=c < C, other=0.0)
    grad_sum = tl.zeros((BP, BC), dtype=tl.float32)
    grad_unit = tl.zeros((BP, BC), dtype=tl.float32)
    for start in range(0, P, BP):
        p = start + tl.arange(0, BP)
        inside = (p < P)[:, None] & (c < C)[None, :]
        place = base + p[:, None] * C + c[None, :]
        grad = tl.load(g + place, mask=inside, other=0.0)
        unit = (tl.load(x + place, mask=inside, other=0.0) - mean) * rstd
        grad_sum += grad
        grad_unit += grad * unit
    by_channel = tl.sum(grad_sum, axis=0)
    by_channel_unit = tl.sum(grad_unit, axis=0)
    tl.store(db + sample * C + c, by_channel, mask=c < C)
    tl.store(dw + sample * C + c, by_channel_unit, mask=c < C)
    level = tl.sum(by_channel * weight) / (P * C)
    slope = tl.sum(by_channel_unit * weight) / (P * C)
    for start in range(0, P, BP):
        p = start + tl.arange(0, BP)
        inside = (p < P)[:, None] & (c < C)[None, :]
        place = base + p[:, None] * C + c[None, :]
        grad = tl.load(g + place, mask=inside, other=0.0) * weight[None, :]
        unit = (tl.load(x + place, mask=inside, other=0.0) - mean) * rstd
        tl.store(dx + place, rstd * (grad - level - unit * slope), mask=inside)


class RowNorm(torch.autograd.Function):
    """A one-group norm over each sample.  # x [R, B, P, C], w and b [R, C]"""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor, eps: float) -> Tensor:
        x, w, b = x.contiguous(), w.contiguous(), b.contiguous()
        rows, images, pixels, channels = x.shape
        out = torch.empty_like(x)
        mean, rstd = x.new_empty(rows, images), x.new_empty(rows, images)
        _norm[(rows * images,)](
            x, w, b, out, mean, rstd, images, pixels, eps, C=channels, **_norm_tile(pixels, channels)
        )
        ctx.save_for_backward(x, w, mean, rstd)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        x, w, mean, rstd = ctx.saved_tensors
        rows, images, pixels, channels = x.shape
        dx = torch.empty_like(x)
        dw, db = x.new_empty(rows, images, channels), x.new_empty(rows, images, channels)
        _norm_backward[(rows * images,)](
            x, w, grad.contiguous(), mean, rstd, dx, dw, db, images, pixels,
            C=channels, **_norm_tile(pixels, channels),
        )  # fmt: skip
        return dx, dw.sum(1), db.sum(1), None


def _norm_tile(pixels: int, channels: int) -> dict[str, int]:
    wide = power(channels)
    return {"BP": min(power(pixels), max(SAMPLE_TILE // wide, 1)), "BC": wide}
