"""What an environment knows of its members between two steps: slots, measurements, and the reward.

Everything is a row of a tensor, so that a NaN stays with the member that measured it. The reward derives from
one potential, so that no loop of actions can farm it:

    Φ = accuracy − rent_weight · ln(parameters / host parameters)

A step pays γΦ(s') − Φ(s); with the γ of the returns that telescopes to γ^T Φ(end) − Φ(start).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from esper.lifecycle.rates import Rates
from esper.lifecycle.slot_states import SlotEvidence, SlotStates
from esper.lifecycle.stages import Stage
from esper.population.metrics import TrainMetrics, ValidationMetrics
from esper.simic.config import RewardConfig
from esper.tamiyo.policy.features import HISTORY_LENGTH

VELOCITY_DECAY = 0.7  # of the moving average of a contribution's change


@dataclass(frozen=True)
class ValidationHistory:
    """The latest validations of N members."""

    loss_history: Tensor  # [N, 5] oldest first, NaN = not yet
    accuracy_history: Tensor  # [N, 5]

    @property
    def loss(self) -> Tensor:
        """Return the latest validation loss.  # [N]"""
        return self.loss_history[:, -1]

    @property
    def accuracy(self) -> Tensor:
        """Return the latest validation accuracy, 0..1.  # [N]"""
        return self.accuracy_history[:, -1]

    @staticmethod
    def empty(num_members: int, device: torch.device) -> ValidationHistory:
        """Return a history without any validation."""
        unknown = torch.full((num_members, HISTORY_LENGTH), math.nan, device=device)
        return ValidationHistory(unknown, unknown)

    def append(self, loss: Tensor, accuracy: Tensor) -> ValidationHistory:
        """Return the history with one more validation and without the oldest.  # loss, accuracy [N]"""
        return ValidationHistory(
            torch.cat((self.loss_history[:, 1:], loss.unsqueeze(1)), dim=1),
            torch.cat((self.accuracy_history[:, 1:], accuracy.unsqueeze(1)), dim=1),
        )


@dataclass(frozen=True)
class MemberState:
    """Everything that a member is, apart from its weights and its optimizer state."""

    slots: SlotStates
    evidence: SlotEvidence
    history: ValidationHistory
    rates: Rates | None = None  # where controllers set the learning rate
    training_loss: Tensor | None = None  # [N, 2] of the last two epochs, NaN = not yet; as `rates`


def update_evidence(
    evidence: SlotEvidence, slots: SlotStates, training: TrainMetrics, validation: ValidationMetrics
) -> SlotEvidence:
    """Return the evidence with new measurements where there are any, else the old ones.

    A contribution ages by one a step from its measurement on. A shadow gain is about a seed in isolation and
    is dropped when the isolation ends.
    """
    measured = validation.contribution.isfinite()
    # Points per tick since the last measurement, then v = 0.7·v + 0.3·change.
    change = (validation.contribution - evidence.contribution) / (evidence.contribution_age + 1.0)
    average = VELOCITY_DECAY * evidence.contribution_velocity + (1.0 - VELOCITY_DECAY) * change
    velocity = torch.where(evidence.contribution_velocity.isfinite(), average, change)
    isolated = slots.stage == Stage.TRAINING
    seeds = training.seeds

    def newest(new: Tensor, old: Tensor) -> Tensor:
        return torch.where(new.isnan(), old, new)

    return SlotEvidence(
        contribution=newest(validation.contribution, evidence.contribution),
        contribution_velocity=torch.where(measured, velocity, evidence.contribution_velocity),
        contribution_age=(evidence.contribution_age + 1.0).masked_fill(measured, 0.0),
        interaction=evidence.interaction,
        # Outside isolation the seed is part of the network, and its contribution is measured instead.
        shadow_gain=newest(validation.shadow_gain, evidence.shadow_gain).masked_fill(~isolated, math.nan),
        gradient_norm=newest(seeds.norm, evidence.gradient_norm),
        gradient_health=newest(seeds.health, evidence.gradient_health),
        previous_health=torch.where(seeds.health.isnan(), evidence.previous_health, evidence.gradient_health),
        vanishing=newest(seeds.vanishing, evidence.vanishing),
        exploding=newest(seeds.exploding, evidence.exploding),
    )


def potential(accuracy: Tensor, parameter_ratio: Tensor, config: RewardConfig) -> Tensor:
    """Return Φ from accuracy 0..1 and parameters over the host's own.  # [N], [N] → [N]"""
    return accuracy - config.rent_weight * torch.log(parameter_ratio)
