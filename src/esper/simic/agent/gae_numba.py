"""The advantages on the CPU, compiled by numba; imported only where that extra is installed."""

from __future__ import annotations

from collections.abc import Callable

import numba
import numpy as np
import torch
from numpy.typing import NDArray

from esper.simic.agent.gae import Advantages, GaeInputs

Floats = NDArray[np.float32]
Flags = NDArray[np.bool_]


def numba_kernel(rows: GaeInputs, gamma: float, lam: float) -> Advantages:
    """`compute_gae` row after row, each row while it is in the cache."""
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


_compiled: Callable[..., None] = numba.njit(cache=True, error_model="numpy", fastmath={"contract"})(_fill)
