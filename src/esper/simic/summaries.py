"""The figures of a round, from its record, its update and its ungrown twins."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from esper.foundation.statistics import mean_interval
from esper.lifecycle.actions import Blueprint, Op
from esper.simic.agent.metrics import UpdateMetrics
from esper.simic.baseline import explained_by_baseline
from esper.simic.episode_record import Doubles, EpisodeRecord
from esper.simic.learner import Learner
from esper.telemetry.schema import RoundSummary


@dataclass(frozen=True)
class Progress:
    """How far a run is."""

    round: int  # done
    rounds: int  # asked for
    member_epochs: int  # since the run began, all blocks together
    seconds: float  # of rounds


def summarise(
    learner: Learner,
    progress: Progress,
    record: EpisodeRecord,
    update: UpdateMetrics,
    twins: EpisodeRecord | None,
) -> RoundSummary:
    """What is told of one learner's round; `record` and `twins` are of its own members."""
    returns, return_ci = mean_interval(record.returns.tolist())
    accuracy, accuracy_ci = mean_interval(record.accuracy[-1].tolist())
    ratio, ratio_ci = mean_interval(record.parameter_ratio[-1].tolist())
    by_step = op_shares(record)  # [T, ops]
    return RoundSummary(
        round=progress.round,
        rounds=progress.rounds,
        members=record.num_members,
        member_epochs=progress.member_epochs,
        seconds=progress.seconds,
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
