"""Add what seeds make of their activations to the rows, blended: one kernel each way.

out[r] = x[base[r]] + alpha · delta of the entry of r, if it has one. Of the output s of a seed and the
activations h that it read, delta is s with ADD, σ(w · mean(h) + b) · s with GATE, h · tanh(s) with MULTIPLY.
In memory the activations of a row are U units of P pixels of C; a unit has one gate, from the mean over its
pixels. Units are samples, or the positions of a sequence.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from esper.lifecycle.actions import Blend
from esper.population.kernels.norm import _tile, _tiling
from esper.population.kernels.rows import ceil_div
from esper.population.plan.packing import Station

TILE = 4096  # elements of several units that a program holds at a time
# Where these begin in memory follows from the sizes of a plan's groups: not worth a kernel of its own.
ANYWHERE = ["base", "entry", "rows", "alpha", "blend", "w"]
_GATE, _MULTIPLY = tl.constexpr(int(Blend.GATE)), tl.constexpr(int(Blend.MULTIPLY))


@triton.jit
def _tanh(x):  # type: ignore[no-untyped-def]
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0


@triton.jit
def _gate(h, w, U, P, tile, C: tl.constexpr, BS: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the weights of a gate, the means of the units over their pixels, and their gates.

    [1, 1, C], [S, 1, C], [S, 1, 1]
    """
    c = tl.arange(0, BC)[None, None, :]
    weight = tl.load(w + c, mask=c < C, other=0.0).to(tl.float32)
    total = tl.zeros((BS, BP, BC), dtype=tl.float32)
    for first in range(0, P, BP):
        offset, inside = _tile(U, P, C, tile, first, BS, BP, BC)
        total += tl.load(h + offset, mask=inside, other=0.0).to(tl.float32)
    mean = tl.expand_dims(tl.sum(total, axis=1), 1) / P
    level = tl.expand_dims(tl.sum(mean * weight, axis=2), 2) + tl.load(w + C).to(tl.float32)
    return weight, mean, tl.sigmoid(level)


@triton.jit(do_not_specialize=["w_row"], do_not_specialize_on_alignment=ANYWHERE)
def _blend(  # type: ignore[no-untyped-def]
    x, s, h, w, out, base, entry, alpha, blend, U, P, tiles, w_row,
    C: tl.constexpr, BS: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) // tiles).to(tl.int64)
    tile = tl.program_id(0) % tiles
    found = tl.load(entry + row)
    e = tl.maximum(found, 0)
    kind = tl.load(blend + e)
    scale = tl.where(found >= 0, tl.load(alpha + e), 0.0)
    size = U * P * C
    x += tl.load(base + row) * size
    out += row * size
    s += e * size
    h += e * size
    factor = tl.full((BS, 1, 1), 1.0, tl.float32)
    if (kind == _GATE) & (found >= 0):
        _, _, factor = _gate(h, w + e * w_row, U, P, tile, C, BS, BP, BC)
    for first in range(0, P, BP):
        offset, inside = _tile(U, P, C, tile, first, BS, BP, BC)
        value = tl.load(x + offset, mask=inside, other=0.0).to(tl.float32)
        if found >= 0:
            delta = tl.load(s + offset, mask=inside, other=0.0).to(tl.float32)
            if kind == _MULTIPLY:
                delta = _tanh(delta) * tl.load(h + offset, mask=inside, other=0.0).to(tl.float32)
            value += scale * factor * delta
        tl.store(out + offset, value.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["w_row"], do_not_specialize_on_alignment=ANYWHERE)
def _blend_backward(  # type: ignore[no-untyped-def]
    grad, s, h, w, ds, dh, dw, rows, alpha, blend, U, P, tiles, w_row,
    GATED: tl.constexpr, C: tl.constexpr, BS: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Write ds and dh of an entry from the gradient of its row; if GATED, also this program's share of dw.

    dw [E, tiles, C + 1]
    """
    e = (tl.program_id(0) // tiles).to(tl.int64)
    tile = tl.program_id(0) % tiles
    kind = tl.load(blend + e)
    scale = tl.load(alpha + e)
    size = U * P * C
    grad += tl.load(rows + e) * size
    s += e * size
    h += e * size
    ds += e * size
    dh += e * size
    factor = tl.full((BS, 1, 1), 1.0, tl.float32)
    toward = tl.zeros((BS, 1, BC), dtype=tl.float32)  # the gradient of h through the gate
    if GATED:
        dweight = tl.zeros((BC,), dtype=tl.float32)
        dbias = tl.sum(dweight)
        if kind == _GATE:
            weight, mean, factor = _gate(h, w + e * w_row, U, P, tile, C, BS, BP, BC)
            total = tl.zeros((BS, BP, BC), dtype=tl.float32)
            for first in range(0, P, BP):
                offset, inside = _tile(U, P, C, tile, first, BS, BP, BC)
                value = tl.load(s + offset, mask=inside, other=0.0).to(tl.float32)
                total += value * tl.load(grad + offset, mask=inside, other=0.0).to(tl.float32)
            slope = scale * factor * (1.0 - factor)  # units beyond the last have no gradient
            level = slope * tl.expand_dims(tl.expand_dims(tl.sum(tl.sum(total, axis=2), axis=1), 1), 2)
            toward = level * weight / P
            dweight = tl.sum(tl.sum(level * mean, axis=1), axis=0)
            dbias = tl.sum(level)
        c = tl.arange(0, BC)
        dw += (e * tiles + tile) * (C + 1)
        tl.store(dw + c, dweight, mask=c < C)
        tl.store(dw + C, dbias)
    for first in range(0, P, BP):
        offset, inside = _tile(U, P, C, tile, first, BS, BP, BC)
        change = scale * tl.load(grad + offset, mask=inside, other=0.0).to(tl.float32)
        back = toward + tl.zeros((BS, BP, BC), dtype=tl.float32)
        if kind == _MULTIPLY:
            squashed = _tanh(tl.load(s + offset, mask=inside, other=0.0).to(tl.float32))
            back = change * squashed
            value = tl.load(h + offset, mask=inside, other=0.0).to(tl.float32)
            change = change * value * (1.0 - squashed * squashed)
        else:
            change = change * factor
        tl.store(ds + offset, change.to(ds.dtype.element_ty), mask=inside)
        tl.store(dh + offset, back.to(dh.dtype.element_ty), mask=inside)


class RowBlend(torch.autograd.Function):
    """See the top of this file.

    x [before, ...], s and h [E, ...] with channels last; gates [E, C + 1], or None where no entry has one;
    pooled: whether a gate is from the mean over all that lies between samples and channels → [after, ...]
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, s: Tensor, h: Tensor, gates: Tensor | None, work: Station, pooled: bool
    ) -> Tensor:
        x, s, h = (tensor.contiguous() for tensor in (x, s, h))
        units = x.shape[1] if pooled else prod(x.shape[1:-1])
        pixels = x[0].numel() // (units * x.shape[-1])
        _, tile = _tiling(units, pixels, x.shape[-1], TILE)
        ctx.sizes = (units, pixels, ceil_div(units, tile["BS"]))
        weights = s.new_empty(0, 0) if gates is None else gates
        ctx.save_for_backward(s, h, weights)
        ctx.work, ctx.tile, ctx.gated = work, {"C": x.shape[-1], **tile}, gates is not None
        out = x.new_empty(len(work.entry), *x.shape[1:])
        _blend[(ctx.sizes[2] * len(out),)](
            x, s, h, weights, out, work.base, work.entry, work.alpha, work.blend, *ctx.sizes,
            weights.stride(0), **ctx.tile,
        )  # fmt: skip
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        s, h, weights = ctx.saved_tensors
        work: Station = ctx.work
        grad = grad.contiguous()
        ds, dh = torch.empty_like(s), torch.empty_like(h)
        tiles = ctx.sizes[2]
        shares = torch.empty(len(s), tiles if ctx.gated else 0, grad.shape[-1] + 1, device=s.device)
        _blend_backward[(tiles * len(s),)](
            grad, s, h, weights, ds, dh, shares, work.rows, work.alpha, work.blend, *ctx.sizes,
            weights.stride(0), GATED=ctx.gated, **ctx.tile,
        )  # fmt: skip
        dw = shares.sum(1).to(weights.dtype) if ctx.gated else None
        # Rows that fork here start from a constant, so only the incoming rows get a gradient.
        return grad[: work.before], ds, dh, dw, None, None
