"""What the environment remembers of its measurements, as rows: a NaN stays with whoever measured it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from esper.lifecycle.evidence import SlotEvidence
from esper.lifecycle.slot_states import SlotStates
from esper.lifecycle.stages import Stage
from esper.population.population import TrainMetrics, ValidationMetrics
from esper.simic.config import EpisodeConfig
from esper.tamiyo.policy.observation import HISTORY_LENGTH

VELOCITY_KEPT = 0.7  # of the moving average of a contribution's change; the rest is the latest change


@dataclass(frozen=True)
class Signals:
    """The course of validation, for N members."""

    loss_history: Tensor  # [N, 5] oldest first, NaN = not yet
    accuracy_history: Tensor  # [N, 5]
    best_accuracy: Tensor  # [N] the bar that the next epoch has to clear; NaN before the first
    plateau: Tensor  # [N] int64: epochs in a row that did not clear it
    calm: Tensor  # [N] int64: epochs in a row in which the loss hardly fell
    stable: Tensor  # [N] bool: there have been enough calm epochs; stays so

    @staticmethod
    def blank(num_members: int, device: torch.device) -> Signals:
        unknown = torch.full((num_members, HISTORY_LENGTH), math.nan, device=device)
        none = torch.zeros(num_members, dtype=torch.long, device=device)
        return Signals(unknown, unknown, unknown[:, 0], none, none, none.bool())

    def update(self, loss: Tensor, accuracy: Tensor, config: EpisodeConfig) -> Signals:
        """After another validation.  # loss, accuracy [N]"""
        known = self.best_accuracy.isfinite()
        improved = accuracy >= self.best_accuracy + config.plateau_points / 100.0
        latest = self.loss_history[:, -1]
        rushing = (latest - loss) >= config.stable_share * latest.abs()
        calm = torch.where(latest.isfinite() & loss.isfinite() & ~rushing, self.calm + 1, 0)
        return Signals(
            loss_history=_shifted(self.loss_history, loss),
            accuracy_history=_shifted(self.accuracy_history, accuracy),
            best_accuracy=torch.where(improved | ~known, accuracy, self.best_accuracy),
            plateau=torch.where(known & ~improved, self.plateau + 1, 0),
            calm=calm,
            stable=self.stable | (calm >= config.stable_epochs),
        )


def _shifted(history: Tensor, value: Tensor) -> Tensor:
    """The newest value at the end, the oldest gone.  # [N, 5], [N] → [N, 5]"""
    return torch.cat((history[:, 1:], value.unsqueeze(1)), dim=1)


def update_evidence(
    evidence: SlotEvidence, slots: SlotStates, training: TrainMetrics, validation: ValidationMetrics
) -> SlotEvidence:
    """What is now known about every seed: new measurements where there are any, else the old ones.

    A contribution ages by one a step from its measurement on. A shadow gain speaks of a seed in isolation
    and ends with it.
    """
    measured = validation.contribution.isfinite()
    change = (validation.contribution - evidence.contribution) / (evidence.contribution_age + 1.0)
    average = VELOCITY_KEPT * evidence.contribution_velocity + (1.0 - VELOCITY_KEPT) * change
    velocity = torch.where(evidence.contribution_velocity.isfinite(), average, change)
    isolated = slots.stage == Stage.TRAINING
    shadow_gain = _newest(validation.shadow_gain, evidence.shadow_gain)
    seeds = training.seeds
    return SlotEvidence(
        contribution=_newest(validation.contribution, evidence.contribution),
        contribution_velocity=torch.where(measured, velocity, evidence.contribution_velocity),
        contribution_age=(evidence.contribution_age + 1.0).masked_fill(measured, 0.0),
        interaction=_newest(validation.interaction, evidence.interaction),
        shadow_gain=shadow_gain.masked_fill(~isolated, math.nan),
        gradient_norm=_newest(seeds.norm, evidence.gradient_norm),
        gradient_health=_newest(seeds.health, evidence.gradient_health),
        previous_health=torch.where(seeds.health.isnan(), evidence.previous_health, evidence.gradient_health),
        vanishing=_newest(seeds.vanishing, evidence.vanishing),
        exploding=_newest(seeds.exploding, evidence.exploding),
        gradient_ratio=_newest(seeds.ratio, evidence.gradient_ratio),
    )


def _newest(new: Tensor, old: Tensor) -> Tensor:
    return torch.where(new.isnan(), old, new)
