"""Gather rows, add seed outputs to them and blend: one kernel in each direction.

How the output s of a seed joins the activation h that it read, before it is scaled by alpha:

    ADD        s
    GATE       gate · s
    MULTIPLY   h · tanh(s)

s, h [E, L]; an entry divides into G groups with a gate each: gate [E, G]; blend [E]
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from esper.lifecycle.actions import Blend
from esper.population.plan.packing import Station

TILE = 4096  # elements of a program
GATE = tl.constexpr(int(Blend.GATE))
MULTIPLY = tl.constexpr(int(Blend.MULTIPLY))


# Plain arithmetic: a step asks hundreds of times, and Triton's own functions are slow on the host.


def next_power(n: int, least: int = 1) -> int:
    """Return the next power of two, at least `least`: the sizes that a tile may have."""
    return max(1 << (n - 1).bit_length(), least)


def ceil_div(n: int, size: int) -> int:
    """Return how many tiles of a size cover n elements."""
    return -(-n // size)


@triton.jit
def _gather(  # type: ignore[no-untyped-def]
    base, base_index, source, index, scale, out, L, tiles,
    BASE: tl.constexpr, SCALE: tl.constexpr, BL: tl.constexpr,
):  # fmt: skip
    """out[r] = base[base_index[r]] + scale · source[index[r]], where index -1 picks nothing

    BASE: 0 no base, 1 base[r], 2 base[base_index[r]]; SCALE: 0 none, 1 scale[r], 2 scale[index[r]]
    """
    row = (tl.program_id(0) // tiles).to(tl.int64)
    offset = (tl.program_id(0) % tiles) * BL + tl.arange(0, BL)
    inside = offset < L
    pick = tl.load(index + row)
    value = tl.load(source + pick * L + offset, mask=inside & (pick >= 0), other=0.0).to(tl.float32)
    if SCALE == 1:
        value = value * tl.load(scale + row)
    if SCALE == 2:
        value = value * tl.load(scale + tl.maximum(pick, 0))
    if BASE:
        under = row
        if BASE == 2:
            under = tl.load(base_index + row)
        value += tl.load(base + under * L + offset, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * L + offset, value.to(out.dtype.element_ty), mask=inside)


def gather_rows(
    source: Tensor,
    index: Tensor,
    base: Tensor | None = None,
    base_index: Tensor | None = None,
    scale: Tensor | None = None,
    scale_by_index: bool = False,
) -> Tensor:
    """See the kernel.  # source [E, ...], index [R] → [R, ...]"""
    source = source.contiguous()
    out = source.new_empty(index.shape[0], *source.shape[1:])
    if not out.numel():
        return out
    length = out[0].numel()
    tiles = ceil_div(length, TILE)
    _gather[(tiles * index.shape[0],)](
        out if base is None else base.contiguous(), index if base_index is None else base_index,
        source, index, index if scale is None else scale, out, length, tiles,
        BASE=0 if base is None else 1 if base_index is None else 2,
        SCALE=0 if scale is None else 2 if scale_by_index else 1, BL=TILE, num_warps=8,
    )  # fmt: skip
    return out


class TakeRows(torch.autograd.Function):
    """x and x[source]; `entry` is where each row of x was taken to as a variable, -1 if nowhere."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, source: Tensor, entry: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(entry)
        return x, gather_rows(x, source)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, taken: Tensor) -> tuple[Tensor, None, None]:
        return gather_rows(taken, ctx.saved_tensors[0], base=grad), None, None


class AddToRows(torch.autograd.Function):
    """Each row that goes out: the row that it continues, and alpha · delta where it has an entry.

    Alpha is a constant, and so is the row that a forking row continues.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, delta: Tensor, work: Station) -> Tensor:
        ctx.work = work
        return gather_rows(delta, work.entry, x, work.base, work.alpha, scale_by_index=True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        work: Station = ctx.work
        # Rows that fork here start from a constant, so only the incoming rows get a gradient.
        return grad[: work.before], gather_rows(grad, work.rows, scale=work.alpha), None


@triton.jit
def _tanh(x):  # type: ignore[no-untyped-def]
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0


@triton.jit
def _blend(s, h, gate, blend, out, L, I, tiles, BL: tl.constexpr):  # type: ignore[no-untyped-def]
    row = (tl.program_id(0) // tiles).to(tl.int64)
    offset = (tl.program_id(0) % tiles) * BL + tl.arange(0, BL)
    inside = offset < L
    kind = tl.load(blend + row)
    said = tl.load(s + row * L + offset, mask=inside, other=0.0).to(tl.float32)
    met = tl.load(h + row * L + offset, mask=inside & (kind == MULTIPLY), other=0.0).to(tl.float32)
    opened = tl.load(gate + row * (L // I) + offset // I, mask=inside & (kind == GATE), other=1.0)
    value = tl.where(kind == MULTIPLY, met * _tanh(said), opened.to(tl.float32) * said)
    tl.store(out + row * L + offset, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _blend_backward(  # type: ignore[no-untyped-def]
    grad, s, h, gate, blend, to_s, to_h, to_gate, G, I, tiles,
    GATES: tl.constexpr, FACTORS: tl.constexpr, BG: tl.constexpr, BI: tl.constexpr,
):  # fmt: skip
    """GATES: there are gates; FACTORS: h is a factor of some entries"""
    row = (tl.program_id(0) // tiles).to(tl.int64)
    part = (tl.program_id(0) % tiles) * BG + tl.arange(0, BG)
    kind = tl.load(blend + row)
    gated = (part < G) & (kind == GATE)
    opened = tl.load(gate + row * G + part, mask=gated, other=1.0).to(tl.float32)
    moved = tl.zeros([BG], dtype=tl.float32)
    for start in range(0, I, BI):
        i = start + tl.arange(0, BI)
        offset = row * G * I + part[:, None] * I + i[None, :]
        inside = (part < G)[:, None] & (i < I)[None, :]
        asked = tl.load(grad + offset, mask=inside, other=0.0).to(tl.float32)
        said = tl.load(s + offset, mask=inside, other=0.0).to(tl.float32)
        back = asked * opened[:, None]
        if FACTORS:
            met = tl.load(h + offset, mask=inside & (kind == MULTIPLY), other=0.0).to(tl.float32)
            share = _tanh(said)
            # d(h tanh(s)) = h (1 - tanh²(s)) ds + tanh(s) dh
            back = tl.where(kind == MULTIPLY, asked * met * (1.0 - share * share), back)
            to_met = tl.where(kind == MULTIPLY, asked * share, 0.0)
            tl.store(to_h + offset, to_met.to(to_h.dtype.element_ty), mask=inside)
        tl.store(to_s + offset, back.to(to_s.dtype.element_ty), mask=inside)
        moved += tl.sum(asked * said, axis=1)
    if GATES:
        moved = tl.where(gated, moved, 0.0)
        tl.store(to_gate + row * G + part, moved.to(to_gate.dtype.element_ty), mask=part < G)


class BlendParts(torch.autograd.Function):
    """What each entry of a station adds to its row at full strength.

    s, h [E, ...] as stored; gate: a number for each leading part of an entry, None where no entry has any
    """

    @staticmethod
    def forward(ctx: Any, s: Tensor, h: Tensor, gate: Tensor | None, work: Station) -> Tensor:
        s, h = s.contiguous(), h.contiguous()
        gates = None if gate is None else gate.contiguous()
        factors = Blend.MULTIPLY in work.blends
        ctx.save_for_backward(s, h if factors else None, gates)
        ctx.work, out = work, torch.empty_like(s)
        if out.numel():
            length = s[0].numel()
            inner = length if gates is None else length // gates[0].numel()
            tiles = ceil_div(length, TILE)
            _blend[(tiles * s.shape[0],)](
                s, h, s if gates is None else gates, work.blend, out, length, inner, tiles,
                BL=TILE, num_warps=8,
            )  # fmt: skip
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, None]:
        s, h, gate = ctx.saved_tensors
        grad, to_s = grad.contiguous(), torch.empty_like(s)
        to_h = None if h is None else torch.empty_like(h)
        to_gate = None if gate is None else torch.empty_like(gate)
        if grad.numel():
            parts = s.shape[1] if gate is None else gate[0].numel()
            inner = s[0].numel() // parts
            wide = min(next_power(inner, 16), 1024)
            high = min(next_power(parts, 1), TILE // wide)
            tiles = ceil_div(parts, high)
            _blend_backward[(tiles * s.shape[0],)](
                grad, s, s if h is None else h, s if gate is None else gate, ctx.work.blend,
                to_s, to_s if to_h is None else to_h, to_s if to_gate is None else to_gate,
                parts, inner, tiles, GATES=gate is not None, FACTORS=h is not None,
                BG=high, BI=wide, num_warps=8,
            )  # fmt: skip
        return to_s, to_h, to_gate, None
