"""What the environment remembers of its measurements, as rows: a NaN stays with whoever measured it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from esper.lifecycle.slot_states import SlotEvidence, SlotStates
from esper.lifecycle.stages import Stage
from esper.population.metrics import TrainMetrics, ValidationMetrics
from esper.tamiyo.policy.features import HISTORY_LENGTH

VELOCITY_KEPT = 0.7  # of the moving average of a contribution's change; the rest is the latest change


@dataclass(frozen=True)
class Signals:
    """The latest validations of N members."""

    loss_history: Tensor  # [N, 5] oldest first, NaN = not yet
    accuracy_history: Tensor  # [N, 5]

    @property
    def loss(self) -> Tensor:
        """Of the latest validation.  # [N]"""
        return self.loss_history[:, -1]

    @property
    def accuracy(self) -> Tensor:
        """Of the latest validation, 0..1.  # [N]"""
        return self.accuracy_history[:, -1]

    @staticmethod
    def blank(num_members: int, device: torch.device) -> Signals:
        """Before the first validation."""
        unknown = torch.full((num_members, HISTORY_LENGTH), math.nan, device=device)
        return Signals(unknown, unknown)

    def update(self, loss: Tensor, accuracy: Tensor) -> Signals:
        """After another validation: the newest value comes last and the oldest is dropped.  # both [N]"""
        return Signals(_shifted(self.loss_history, loss), _shifted(self.accuracy_history, accuracy))


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
        interaction=evidence.interaction,
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
