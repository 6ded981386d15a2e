"""GAE compiled by numba for the CPU and by triton for a GPU; imported only where one of them is installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

if TYPE_CHECKING:
    from esper.simic.agent.gae import Advantages, GaeInputs

Floats = NDArray[np.float32]
Flags = NDArray[np.bool_]


def numba_kernel(rows: GaeInputs, gamma: float, lam: float) -> Advantages:
    """Compute GAE row after row, each row while it is in the cache."""
    # One array for both results, so that the compiled function has one output.
    out = torch.empty(2, *rows.rewards.shape)
    arrays = [tensor.detach().contiguous().numpy() for tensor in (*rows, out)]
    _compiled(*arrays, np.float32(gamma), np.float32(gamma * lam))
    return out[0], out[1]


def _fill(
    rewards: Floats,
    values: Floats,
    next_values: Floats,
    terminated: Flags,
    truncated: Flags,
    step_counts: NDArray[np.int64],
    out: Floats,
    gamma: np.float32,
    decay: np.float32,
) -> None:
    members, horizon = rewards.shape
    decays = np.empty(horizon, np.float32)
    for n in range(members):
        steps = min(step_counts[n], horizon)
        for t in range(steps):  # all that does not wait for the step ahead: the compiler makes vectors of it
            ends = terminated[n, t]
            following = np.float32(0.0) if ends else next_values[n, t]
            out[0, n, t] = rewards[n, t] - values[n, t] + gamma * following
            decays[t] = np.float32(0.0) if ends | truncated[n, t] else decay
        ahead = np.float32(0.0)
        for t in range(steps - 1, -1, -1):
            ahead = out[0, n, t] + decays[t] * ahead
            out[0, n, t] = ahead
        for t in range(steps):
            out[1, n, t] = out[0, n, t] + values[n, t]
        out[:, n, steps:] = np.float32(0.0)


if importlib.util.find_spec("numba"):
    import numba

    _compiled: Callable[..., None] = numba.njit(cache=True, error_model="numpy", fastmath={"contract"})(_fill)


def triton_kernel(rows: GaeInputs, gamma: float, lam: float) -> Advantages:
    """Compute GAE in one launch; a program holds a row in registers, of up to about 8,000 steps."""
    members, horizon = rows.rewards.shape
    advantages, returns = torch.empty_like(rows.rewards), torch.empty_like(rows.rewards)
    inputs = [tensor.contiguous() for tensor in rows]
    block = triton.next_power_of_2(horizon)
    _gae[(members,)](*inputs, advantages, returns, horizon, gamma, gamma * lam, BLOCK=block)
    return advantages, returns


if importlib.util.find_spec("triton"):
    import triton
    import triton.language as tl

    @triton.jit
    def _compose(later_decay, later_delta, decay, delta):  # type: ignore[no-untyped-def]
        """Compose two affine maps of the scan: x → δ + d·(δ' + d'·x)."""
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
        # Composing affine maps from the end: A_t = δ_t + d_t·A_{t+1}.
        _, advantage = tl.associative_scan((decay, delta), 0, _compose, reverse=True)
        tl.store(advantages + at, advantage, mask=inside)
        tl.store(returns + at, tl.where(valid, advantage + value, 0.0), mask=inside)
