"""Generalized advantage estimation over ragged rows, with terminals and truncations anywhere.

    δ_t = r_t + γ·v'_t·(1 − terminated_t) − v_t
    A_t = δ_t + γλ·(1 − terminated_t)·(1 − truncated_t)·A_{t+1}        R_t = A_t + v_t

Index convention: everything at t belongs to the transition t → t+1. `next_values[t]` is v' of that
transition: V(s_{t+1}) inside an episode, the bootstrap value at a truncation; at a terminal it is not
read. Steps at or beyond a row's step count are padding: they are not read, and come out as 0.

One definition, several kernels; `tests/simic/test_gae.py` holds each of them to a scalar float64 loop.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class GaeInputs(NamedTuple):
    """A rollout as the kernels take it."""

    rewards: Tensor  # [N, T] float32
    values: Tensor  # [N, T] float32
    next_values: Tensor  # [N, T] float32
    terminated: Tensor  # [N, T] bool
    truncated: Tensor  # [N, T] bool
    step_counts: Tensor  # [N] int64


Advantages = tuple[Tensor, Tensor]  # advantages and returns, [N, T] float32 each
Kernel = Callable[[GaeInputs, float, float], Advantages]  # (rows, γ, λ)


def compute_gae(rows: GaeInputs, gamma: float, lam: float) -> Advantages:
    """Compute advantages and returns, both [N, T] float32."""
    return fastest_kernel(rows.rewards.device.type)(rows, gamma, lam)


@functools.cache
def fastest_kernel(device_type: str) -> Kernel:
    """Return the fastest kernel that is installed (docs/findings.md has the figures)."""
    # One launch, where the loop takes one for each step.
    if device_type == "cuda" and importlib.util.find_spec("triton"):
        from esper.simic.agent.gae_kernels import triton_kernel

        return triton_kernel
    if device_type == "cpu" and importlib.util.find_spec("numba"):
        from esper.simic.agent.gae_kernels import numba_kernel

        return numba_kernel
    return loop_kernel


def loop_kernel(rows: GaeInputs, gamma: float, lam: float) -> Advantages:
    """Compute GAE backwards in time, with one in-place operation per step."""
    valid = valid_steps(rows.step_counts, rows.rewards.shape[1])
    # δ_t = r_t + γ·v'_t·(1 − terminated_t) − v_t
    delta = rows.rewards - rows.values + gamma * rows.next_values.masked_fill(rows.terminated, 0.0)
    # A_t = δ_t + γλ·(1 − terminated_t)·(1 − truncated_t)·A_{t+1}, 0 beyond a row's end
    decay = (valid & ~(rows.terminated | rows.truncated)) * (gamma * lam)
    # [T, N]: a step is one block of memory. unbind once: indexing [t] would create a view per step.
    advantages = torch.where(valid, delta, 0.0).T.contiguous()
    steps, decays = advantages.unbind(0), decay.T.contiguous().unbind(0)
    for t in range(len(steps) - 2, -1, -1):
        steps[t].addcmul_(decays[t], steps[t + 1])
    advantages = advantages.T.contiguous()
    return advantages, torch.where(valid, advantages + rows.values, 0.0)


def valid_steps(step_counts: Tensor, horizon: int) -> Tensor:
    """Return True where a step was recorded.  # step_counts [N] → [N, T]"""
    return torch.arange(horizon, device=step_counts.device) < step_counts.unsqueeze(1)
