"""The figures of a round, from its record, its update and its ungrown twins."""

from __future__ import annotations

from typing import Any

import numpy as np

from esper.lifecycle.actions import Blueprint, Op
from esper.runs.schema import RoundSummary
from esper.simic.agent.metrics import UpdateMetrics
from esper.simic.agent.rollout_buffer import TamiyoRolloutBuffer
from esper.simic.episode_record import Doubles, EpisodeRecord, Floats
from esper.simic.learner import Learner
from esper.utils.statistics import mean_interval


def summarise(
    learner: Learner,
    record: EpisodeRecord,
    update: UpdateMetrics,
    twins: EpisodeRecord | None,
    **progress: Any,
) -> RoundSummary:
    """What is told of one learner's round; `record` and `twins` are of its own members.

    progress: how far the run is, by the names of `RoundSummary`.
    """
    returns, return_ci = mean_interval(record.returns.tolist())
    accuracy, accuracy_ci = mean_interval(record.accuracy[-1].tolist())
    ratio, ratio_ci = mean_interval(record.parameter_ratio[-1].tolist())
    by_step = op_shares(record)  # [T, ops]
    return RoundSummary(
        **progress,
        members=record.num_members,
        return_mean=returns,
        return_ci=return_ci,
        accuracy_mean=accuracy,
        accuracy_ci=accuracy_ci,
        parameter_ratio_mean=ratio,
        parameter_ratio_ci=ratio_ci,
        op_shares={op.name: float(share) for op, share in zip(Op, by_step.mean(axis=0), strict=True)},
        op_shares_by_step=by_step.tolist(),
        head_entropy=dict(update.head_entropy),
        policy_loss=update.policy_loss,
        value_loss=update.value_loss,
        entropy=update.entropy,
        kl=update.kl,
        clip_fraction=update.clip_fraction,
        explained_variance=update.explained_variance,
        gradient_norm=update.grad_norm,
        learning_rate=learner.agent.config.learning_rate,
        extra=_extra(record, update) | _beside_twins(learner, record, twins),
        anomalies=_anomalies(record, update),
    )


def op_shares(record: EpisodeRecord) -> Doubles:
    """The share of members whose executed op was each, step by step.  # [T, ops]"""
    shares: Doubles = (record.executed_op[:, :, None] == np.arange(len(Op))).mean(axis=1)
    return shares


def _extra(record: EpisodeRecord, update: UpdateMetrics) -> dict[str, float]:
    return {
        "potential": float(np.nanmean(record.potential[-1])),
        "succeeded": float(record.succeeded.mean()),
        **{f"refused_{op.lower()}": rate for op, rate in record.refusal_rates().items()},
        "germinated": float(record.germinated.sum() / record.num_members),
        "pruned": float(record.pruned.sum() / record.num_members),
        "rollbacks": float(record.panicked.sum() / record.num_members),
        "flops": float(record.flops.mean()),
        "epochs_done": update.epochs_done,
        "entropy_coefficient": update.entropy_coefficient,
    } | planted(record)


def planted(record: EpisodeRecord) -> dict[str, float]:
    """Seeds per member by blueprint, as `planted/NAME`; a blueprint that nobody planted is left out."""
    counts = np.bincount(record.blueprint[record.germinated], minlength=len(Blueprint)) / record.num_members
    return {f"planted/{b.name}": float(counts[b]) for b in Blueprint if counts[b] > 0}


def _beside_twins(learner: Learner, record: EpisodeRecord, twins: EpisodeRecord | None) -> dict[str, float]:
    """How far returns lie above those of the ungrown twins, and what the baseline explains of them."""
    expected = twins.reward if twins is not None and learner.reward.control_variate else None
    values = {"explained_by_baseline": explained_by_baseline(learner.buffer, record, expected)}
    if twins is not None:
        mean, half = mean_interval((record.returns - twins.returns).tolist())
        values |= {"above_twin": mean, "above_twin_ci": half}
    return values


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


def _anomalies(record: EpisodeRecord, update: UpdateMetrics) -> list[str]:
    """One sentence for each thing that should not happen."""
    found = []
    rollbacks = int(record.panicked.sum())
    if rollbacks:
        who = int(record.panicked.any(axis=0).sum())
        found.append(f"the governor rolled {who} of {record.num_members} members back, {rollbacks} times")
    if update.steps_dropped:
        found.append(f"{update.steps_dropped} transitions had a return that was not finite and were dropped")
    if update.steps_vetoed:
        found.append(f"{update.steps_vetoed} updates had a gradient that was not finite and were refused")
    return found
