"""The advantages on the CPU, compiled by numba; imported only where that extra is installed."""

from __future__ import annotations

from collections.abc import Callable

import numba
import numpy as np
import torch
from numpy.typing import NDArray

from esper.simic.agent.gae import Advantages, Rows

Floats = NDArray[np.float32]
Flags = NDArray[np.bool_]


def numba_kernel(rows: Rows, gamma: float, lam: float) -> Advantages:
    """`compute_gae` in one pass over memory, row after row."""
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
    rows, horizon = rewards.shape
    for n in range(rows):
        ahead = np.float32(0.0)
        for t in range(horizon - 1, -1, -1):
            if t >= step_counts[n]:
                out[0, n, t] = np.float32(0.0)
                out[1, n, t] = np.float32(0.0)
                continue
            advantage = rewards[n, t] - values[n, t]
            if not terminated[n, t]:
                advantage += gamma * next_values[n, t]
                if not truncated[n, t]:
                    advantage += decay * ahead
            out[0, n, t] = advantage
            out[1, n, t] = advantage + values[n, t]
            ahead = advantage


_compiled: Callable[..., None] = numba.njit(cache=True)(_fill)
