"""Attention to the past over short sequences: one kernel each way, so that no score leaves the chip.

A program holds one head of one sequence.  # qkv [..., T, 3, heads, D] → [..., T, heads, D]
A product in float32 is a sum of three in TF32, which lose few of its digits and run on the tensor cores:
128 GPTs take 78 ms a step, and took 191 with products that do not.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from esper.population.kernels.rows import next_power

LONGEST = 64  # positions: a program holds all scores of its head
WIDEST = 64  # channels of a head
LEAST = 16  # of each side of a product


def attention_fits(time: int, head_width: int) -> bool:
    """Return whether a sequence is short enough for one program."""
    return time <= LONGEST and head_width <= WIDEST


@triton.jit
def _offsets(T, stride, D: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where the elements of one head lie, positions a stride apart, and which exist.  # [BT, BD]"""
    t, d = tl.arange(0, BT)[:, None], tl.arange(0, BD)[None, :]
    return t * stride + d, (t < T) & (d < D)


@triton.jit
def _weights(q, k, scale, BT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Softmax over the past of each position.  # q, k [BT, BD] → [BT, BT]"""
    scores = tl.dot(q, tl.trans(k), input_precision="tf32x3") * scale
    t, s = tl.arange(0, BT)[:, None], tl.arange(0, BT)[None, :]
    scores = tl.where(s <= t, scores, float("-inf"))
    # The maximum is subtracted so that no exponential overflows.
    weights = tl.exp(scores - tl.max(scores, axis=1)[:, None])
    return weights / tl.sum(weights, axis=1)[:, None]


@triton.jit
def _attend(qkv, out, T, scale, H: tl.constexpr, D: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr):  # type: ignore[no-untyped-def]
    sequence = (tl.program_id(0) // H).to(tl.int64)
    head = tl.program_id(0) % H
    qkv += sequence * T * 3 * H * D + head * D
    out += sequence * T * H * D + head * D
    offset, there = _offsets(T, 3 * H * D, D, BT, BD)
    q = tl.load(qkv + offset, mask=there, other=0.0)
    k = tl.load(qkv + H * D + offset, mask=there, other=0.0)
    v = tl.load(qkv + 2 * H * D + offset, mask=there, other=0.0)
    mixed = tl.dot(_weights(q, k, scale, BT).to(v.dtype), v, input_precision="tf32x3")
    offset, there = _offsets(T, H * D, D, BT, BD)
    tl.store(out + offset, mixed.to(out.dtype.element_ty), mask=there)


@triton.jit
def _attend_backward(  # type: ignore[no-untyped-def]
    qkv, g, dqkv, T, scale, H: tl.constexpr, D: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr
):
    sequence = (tl.program_id(0) // H).to(tl.int64)
    head = tl.program_id(0) % H
    qkv += sequence * T * 3 * H * D + head * D
    dqkv += sequence * T * 3 * H * D + head * D
    g += sequence * T * H * D + head * D
    offset, there = _offsets(T, H * D, D, BT, BD)
    grad = tl.load(g + offset, mask=there, other=0.0)
    offset, there = _offsets(T, 3 * H * D, D, BT, BD)
    q = tl.load(qkv + offset, mask=there, other=0.0)
    k = tl.load(qkv + H * D + offset, mask=there, other=0.0)
    v = tl.load(qkv + 2 * H * D + offset, mask=there, other=0.0)
    weights = _weights(q, k, scale, BT)
    # With p = softmax(q kᵀ · scale): dv = pᵀ g;  dp = g vᵀ;  ds = p (dp - sum(dp · p)) · scale.
    dv = tl.dot(tl.trans(weights).to(v.dtype), grad, input_precision="tf32x3")
    change = tl.dot(grad, tl.trans(v), input_precision="tf32x3")
    scores = (weights * (change - tl.sum(change * weights, axis=1)[:, None]) * scale).to(q.dtype)
    # dq = ds k;  dk = dsᵀ q
    dq = tl.dot(scores, k, input_precision="tf32x3")
    dk = tl.dot(tl.trans(scores), q, input_precision="tf32x3")
    tl.store(dqkv + offset, dq.to(dqkv.dtype.element_ty), mask=there)
    tl.store(dqkv + H * D + offset, dk.to(dqkv.dtype.element_ty), mask=there)
    tl.store(dqkv + 2 * H * D + offset, dv.to(dqkv.dtype.element_ty), mask=there)


class RowAttention(torch.autograd.Function):
    """qkv [..., T, 3 · width] → [..., T, width], for sequences that `attention_fits` allows."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, heads: int) -> Tensor:
        qkv = qkv.contiguous()
        out = qkv.new_empty(*qkv.shape[:-1], qkv.shape[-1] // 3)
        ctx.save_for_backward(qkv)
        ctx.heads = heads
        programs, sizes = _launch(qkv, heads)
        _attend[(programs,)](qkv, out, **sizes)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (qkv,) = ctx.saved_tensors
        change = torch.empty_like(qkv)
        programs, sizes = _launch(qkv, ctx.heads)
        _attend_backward[(programs,)](qkv, grad.contiguous(), change, **sizes)
        return change, None


def _launch(qkv: Tensor, heads: int) -> tuple[int, dict[str, float]]:
    """Return the number of programs and the launch parameters."""
    time, width = qkv.shape[-2], qkv.shape[-1] // 3 // heads
    tall, wide = next_power(time, LEAST), next_power(width, LEAST)
    sizes = {"T": time, "scale": width**-0.5, "H": heads, "D": width, "BT": tall, "BD": wide}
    return qkv[..., 0, 0].numel() * heads, {**sizes, "num_warps": max(tall * tall // 1024, 1)}
