"""How much of the luck of a return the baseline of the policy gradient takes away."""

from __future__ import annotations

from typing import Any

import numpy as np

from esper.simic.agent.rollout_buffer import TamiyoRolloutBuffer
from esper.simic.episode_record import Doubles, EpisodeRecord, Floats


def returns_to_go(rewards: np.ndarray[Any, Any], gamma: float) -> Doubles:
    """Σ γ^k r_{t + k} from every step on.  # [T, N] → [T, N]"""
    togo = np.zeros_like(rewards, dtype=np.float64)
    after = np.zeros(rewards.shape[1])
    for t in range(len(rewards) - 1, -1, -1):
        after = rewards[t] + gamma * after
        togo[t] = after
    return togo


def explained_by_baseline(
    buffer: TamiyoRolloutBuffer, record: EpisodeRecord, expected: Floats | None
) -> float:
    """The share of the variance of plain returns that V(s) accounts for, with the twin's return where given.

    The return of an ungrown twin is known only once the episode is over: a baseline may know it, a critic
    cannot. `buffer` and `record` are of the same episode; steps after a member's last do not count.
    # expected [T, N]: rewards of the twins
    """
    plain = returns_to_go(record.reward, record.gamma)
    baseline = buffer.get_batched_sequences().steps.value.cpu().numpy().T[: len(plain)]  # [T, N]
    if expected is not None:
        baseline = baseline + returns_to_go(expected, record.gamma)
    lived = buffer.valid_mask[:, : len(plain)].cpu().numpy().T  # [T, N]
    return float(1 - (plain - baseline)[lived].var() / max(plain[lived].var(), 1e-12))
