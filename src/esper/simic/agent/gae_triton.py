"""The advantages on a GPU: one kernel, one program per row; imported only where triton and a GPU are.

A_t = δ_t + d_t·A_{t+1} is a chain of affine maps, and those compose associatively: the whole row is one
reversed scan over pairs (d, δ).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from esper.simic.agent.gae import Advantages, GaeInputs, scan_kernel

LONGEST_ROW = 8192  # what one program holds in registers; longer rows take the scan in torch


def triton_kernel(rows: GaeInputs, gamma: float, lam: float) -> Advantages:
    """`compute_gae` in one launch."""
    members, horizon = rows.rewards.shape
    if horizon > LONGEST_ROW:
        return scan_kernel(rows, gamma, lam)
    advantages, returns = torch.empty_like(rows.rewards), torch.empty_like(rows.rewards)
    inputs = [tensor.contiguous() for tensor in rows]
    block = triton.next_power_of_2(horizon)
    _gae[(members,)](*inputs, advantages, returns, horizon, gamma, gamma * lam, BLOCK=block)
    return advantages, returns


@triton.jit
def _compose(later_decay, later_delta, decay, delta):  # type: ignore[no-untyped-def]
    """What is scanned so far, then the step before it: x → δ + d·(δ' + d'·x)."""
    return decay * later_decay, delta + decay * later_delta


@triton.jit  # type: ignore[untyped-decorator]
def _gae(  # type: ignore[no-untyped-def]
    rewards, values, next_values, terminated, truncated, step_counts, advantages, returns,
    horizon, gamma, gamma_lambda, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    t = tl.arange(0, BLOCK)
    at = row * horizon + t
    inside = t < horizon
    valid = inside & (t < tl.load(step_counts + row))
    value = tl.load(values + at, mask=valid, other=0.0)
    ends = tl.load(terminated + at, mask=valid, other=1) != 0
    cut = tl.load(truncated + at, mask=valid, other=1) != 0
    following = tl.load(next_values + at, mask=valid & ~ends, other=0.0)
    delta = tl.load(rewards + at, mask=valid, other=0.0) - value + gamma * following
    decay = tl.where(valid & ~ends & ~cut, gamma_lambda, 0.0)
    _, advantage = tl.associative_scan((decay, delta), 0, _compose, reverse=True)
    tl.store(advantages + at, advantage, mask=inside)
    tl.store(returns + at, tl.where(valid, advantage + value, 0.0), mask=inside)
