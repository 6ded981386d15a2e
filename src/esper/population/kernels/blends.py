"""How what a seed says joins what it met, for all seeds of a slot at once: one kernel each way.

    ADD        s
    GATE       gate · s
    MULTIPLY   h · tanh(s)

s, h [E, L]: an entry is cut into G parts that have a gate each; gate [E, G], blend [E]
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from esper.lifecycle.actions import Blend
from esper.population.kernels.tiles import cdiv, power
from esper.population.plan import Station

TILE = 4096  # elements of a program
GATE = tl.constexpr(int(Blend.GATE))
MULTIPLY = tl.constexpr(int(Blend.MULTIPLY))


@triton.jit
def _tanh(x):  # type: ignore[no-untyped-def]
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0


@triton.jit
def _join(s, h, gate, blend, out, L, I, tiles, BL: tl.constexpr):  # type: ignore[no-untyped-def]
    row = (tl.program_id(0) // tiles).to(tl.int64)
    place = (tl.program_id(0) % tiles) * BL + tl.arange(0, BL)
    inside = place < L
    kind = tl.load(blend + row)
    said = tl.load(s + row * L + place, mask=inside, other=0.0).to(tl.float32)
    met = tl.load(h + row * L + place, mask=inside & (kind == MULTIPLY), other=0.0).to(tl.float32)
    opened = tl.load(gate + row * (L // I) + place // I, mask=inside & (kind == GATE), other=1.0)
    value = tl.where(kind == MULTIPLY, met * _tanh(said), opened.to(tl.float32) * said)
    tl.store(out + row * L + place, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _join_backward(  # type: ignore[no-untyped-def]
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
        place = row * G * I + part[:, None] * I + i[None, :]
        inside = (part < G)[:, None] & (i < I)[None, :]
        asked = tl.load(grad + place, mask=inside, other=0.0).to(tl.float32)
        said = tl.load(s + place, mask=inside, other=0.0).to(tl.float32)
        back = asked * opened[:, None]
        if FACTORS:
            met = tl.load(h + place, mask=inside & (kind == MULTIPLY), other=0.0).to(tl.float32)
            share = _tanh(said)
            back = tl.where(kind == MULTIPLY, asked * met * (1.0 - share * share), back)
            to_met = tl.where(kind == MULTIPLY, asked * share, 0.0)
            tl.store(to_h + place, to_met.to(to_h.dtype.element_ty), mask=inside)
        tl.store(to_s + place, back.to(to_s.dtype.element_ty), mask=inside)
        moved += tl.sum(asked * said, axis=1)
    if GATES:
        moved = tl.where(gated, moved, 0.0)
        tl.store(to_gate + row * G + part, moved.to(to_gate.dtype.element_ty), mask=part < G)


class JoinParts(torch.autograd.Function):
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
            tiles = cdiv(length, TILE)
            _join[(tiles * s.shape[0],)](
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
            wide = min(power(inner, 16), 1024)
            high = min(power(parts, 1), TILE // wide)
            tiles = cdiv(parts, high)
            _join_backward[(tiles * s.shape[0],)](
                grad, s, s if h is None else h, s if gate is None else gate, ctx.work.blend,
                to_s, to_s if to_h is None else to_h, to_s if to_gate is None else to_gate,
                parts, inner, tiles, GATES=gate is not None, FACTORS=h is not None,
                BG=high, BI=wide, num_warps=8,
            )  # fmt: skip
        return to_s, to_h, to_gate, None
