"""Taking rows and blending what seeds say into them, one gather each way."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _pick(  # type: ignore[no-untyped-def]
    base, source, index, scale, out, L, BASE: tl.constexpr, SCALE: tl.constexpr, BL: tl.constexpr
):
    """out[r] = base[r] + scale[r] · source[index[r]], where index -1 picks nothing"""
    row = tl.program_id(1).to(tl.int64)
    place = tl.program_id(0) * BL + tl.arange(0, BL)
    inside = place < L
    pick = tl.load(index + row)
    value = tl.load(source + pick * L + place, mask=inside & (pick >= 0), other=0.0)
    if SCALE:
        value = value * tl.load(scale + row)
    if BASE:
        value = value + tl.load(base + row * L + place, mask=inside, other=0.0)
    tl.store(out + row * L + place, value, mask=inside)


def pick_rows(
    source: Tensor, index: Tensor, scale: Tensor | None = None, base: Tensor | None = None
) -> Tensor:
    """base + scale · source[index] by rows, index -1 picking nothing.  # source [E, ...] → [R, ...]"""
    source = source.contiguous()
    out = source.new_empty(index.shape[0], *source.shape[1:])
    if not out.numel():
        return out
    length = out[0].numel()
    block = 4096
    _pick[(triton.cdiv(length, block), index.shape[0])](
        out if base is None else base.contiguous(), source, index, index if scale is None else scale, out,
        length, BASE=base is not None, SCALE=scale is not None, BL=block, num_warps=8,
    )  # fmt: skip
    return out


class TakeRows(torch.autograd.Function):
    """x[rows], each row at most once; `entry` is the inverse map, -1 where a row is not taken."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor, entry: Tensor) -> Tensor:
        ctx.save_for_backward(entry)
        return pick_rows(x, rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return pick_rows(grad, ctx.saved_tensors[0]), None, None


class BlendRows(torch.autograd.Function):
    """x with alpha · delta added to the rows that have an entry; alpha is a constant."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, delta: Tensor, alpha: Tensor, rows: Tensor, entry: Tensor) -> Tensor:
        ctx.save_for_backward(alpha, rows)
        return pick_rows(delta, entry, alpha[entry.clamp(min=0)], x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        alpha, rows = ctx.saved_tensors
        return grad, pick_rows(grad, rows, alpha), None, None, None
