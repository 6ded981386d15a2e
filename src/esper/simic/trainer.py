"""The run: round after round, every member lives one episode and Tamiyo learns from it.

A round begins from counters alone: episode r gives every member's initial weights, data order and random
numbers. So the state of a run between two rounds is the agent and the number of rounds done, and a run that
was stopped there goes on to the same bits as one that was not.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from esper.foundation.statistics import mean_interval
from esper.lifecycle.actions import Blueprint, Op
from esper.simic.agent.metrics import UpdateMetrics
from esper.simic.agent.ppo import PPOAgent
from esper.simic.baseline import explained_by_baseline
from esper.simic.environment import GrowthEnvironment
from esper.simic.learned import LearningController
from esper.simic.rollout import EpisodeRecord, play
from esper.tamiyo.controllers import Static
from esper.telemetry.schema import RoundSummary

_AGENT = "agent."
_ROUNDS_DONE = "rounds_done"
_SECONDS = "seconds"


@dataclass(frozen=True)
class Round:
    """What one round left behind."""

    summary: RoundSummary
    record: EpisodeRecord
    update: UpdateMetrics


class Trainer:
    """Plays rounds and learns; prints and writes nothing."""

    def __init__(self, environment: GrowthEnvironment, agent: PPOAgent, rounds: int):
        if environment.spec.gamma != agent.config.gamma:
            raise ValueError(
                f"the environment's gamma is {environment.spec.gamma} and the agent's is "
                f"{agent.config.gamma}; give the environment PPOConfig.gamma"
            )
        self.environment = environment
        self.agent = agent
        self.rounds = rounds
        self.rounds_done = 0
        self.seconds = 0.0
        self.controller = LearningController(agent, environment.steps)

    @property
    def _has_twins(self) -> bool:
        return self.environment.spec.reward.control_variate

    def run(self) -> Iterator[Round]:
        """The rounds that are left, one at a time."""
        while self.rounds_done < self.rounds:
            yield self.play_round()

    def play_round(self) -> Round:
        """One episode of all members, then one update."""
        begun = time.perf_counter()
        twins = play(self.environment, Static(), self.rounds_done) if self._has_twins else None
        if twins is not None:
            self.controller.expect(torch.from_numpy(twins.reward).to(self.environment.device))
        record = play(self.environment, self.controller, self.rounds_done, on_step=self.controller.remember)
        update = self.agent.update(self.controller.buffer)
        self.rounds_done += 1
        self.seconds += time.perf_counter() - begun
        return Round(self._summary(record, update, twins), record, update)

    def state_dict(self) -> dict[str, Tensor]:
        """What a checkpoint between two rounds holds."""
        state = {_AGENT + name: value for name, value in self.agent.state_dict().items()}
        return state | {
            _ROUNDS_DONE: torch.tensor(self.rounds_done),
            _SECONDS: torch.tensor(self.seconds, dtype=torch.float64),
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        missing = sorted({_ROUNDS_DONE, _SECONDS} - set(state))
        if missing:
            raise ValueError(f"the state lacks {', '.join(missing)}; give what Trainer.state_dict returned")
        self.agent.load_state_dict(
            {name.removeprefix(_AGENT): value for name, value in state.items() if name.startswith(_AGENT)}
        )
        self.rounds_done = int(state[_ROUNDS_DONE])
        self.seconds = float(state[_SECONDS])

    def _summary(
        self, record: EpisodeRecord, update: UpdateMetrics, twins: EpisodeRecord | None
    ) -> RoundSummary:
        returns, return_ci = mean_interval(record.returns.tolist())
        accuracy, accuracy_ci = mean_interval(record.accuracy[-1].tolist())
        ratio, ratio_ci = mean_interval(record.parameter_ratio[-1].tolist())
        by_step = op_shares(record)  # [T, ops]
        return RoundSummary(
            round=self.rounds_done,
            rounds=self.rounds,
            members=record.num_members,
            member_epochs=self.rounds_done * record.member_epochs * (1 + self._has_twins),
            seconds=self.seconds,
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
            learning_rate=self.agent.config.learning_rate,
            extra=_extra(record, update) | self._beside_twins(record, twins),
            anomalies=_anomalies(record, update),
        )

    def _beside_twins(self, record: EpisodeRecord, twins: EpisodeRecord | None) -> dict[str, float]:
        """How far the returns lie above those of the ungrown twins, and what these explain of them."""
        if twins is None:
            return {}
        mean, half = mean_interval((record.returns - twins.returns).tolist())
        explained = explained_by_baseline(self.controller.buffer, record.reward, twins.reward, record.gamma)
        return {"above_twin": mean, "above_twin_ci": half, "explained_by_baseline": explained}


def op_shares(record: EpisodeRecord) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    """The share of members whose executed op was each, step by step.  # [T, ops]"""
    ops = np.arange(len(Op))
    shares: np.ndarray[tuple[int, int], np.dtype[np.float64]] = (record.executed_op[:, :, None] == ops).mean(
        axis=1
    )
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
