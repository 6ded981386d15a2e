"""A made-up world for `esper lifecycle`: no network is trained, but the evidence moves as real evidence does.

Every seed has a hidden worth in percentage points. It learns towards it while it trains; what is heard of it
shows as contribution, and in the accuracy of its member.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from esper.foundation.streams import Stream, random_normal
from esper.lifecycle.evidence import SlotEvidence
from esper.lifecycle.slot_states import SlotStates
from esper.lifecycle.stages import HEARD_STAGES, Stage, stage_table

LEARNING_RATE = 0.16  # the share of what is missing that a seed learns per step
NOISE = 0.15  # points
HOST_START, HOST_END, HOST_STEPS = 0.52, 0.74, 14.0  # the accuracy of a host alone, and how fast it comes


@dataclass(frozen=True)
class ToyWorld:
    """What is hidden behind the evidence, each [N, S], in percentage points."""

    seed: int
    worth: Tensor
    skill: Tensor

    @staticmethod
    def new(seed: int, num_members: int, num_slots: int) -> ToyWorld:
        """A world in which nothing grows yet."""
        blank = torch.zeros(num_members, num_slots)
        return ToyWorld(seed, blank, blank)

    def sown(self, where: Tensor, worth: Tensor) -> ToyWorld:
        """New seeds of the given worth, which know nothing yet.  # [N, S] each"""
        return ToyWorld(self.seed, torch.where(where, worth, self.worth), self.skill.masked_fill(where, 0.0))

    def trained(self, states: SlotStates) -> ToyWorld:
        """One epoch: whatever is trained comes closer to its worth."""
        learns = stage_table(HEARD_STAGES | {Stage.TRAINING})[states.stage]
        step = LEARNING_RATE * (self.worth - self.skill)
        return ToyWorld(self.seed, self.worth, torch.where(learns, self.skill + step, self.skill))

    def evidence(self, states: SlotStates, step: int) -> SlotEvidence:
        """What the gates get to see of it: nothing about a slot without a seed that learns or is heard."""
        members, slots = self.skill.shape
        noise = NOISE * random_normal(self.seed, torch.arange(members), Stream.TASK, step, slots)
        heard = stage_table(HEARD_STAGES)[states.stage]
        trains = heard | (states.stage == Stage.TRAINING)
        unknown = torch.full_like(noise, float("nan"))
        return SlotEvidence.unmeasured(members, slots).replace(
            contribution=torch.where(heard, states.alpha * self.skill + noise, unknown),
            shadow_gain=torch.where(states.stage == Stage.TRAINING, self.skill + noise, unknown),
            gradient_norm=torch.where(trains, (1.0 + noise).abs(), unknown),
            gradient_health=torch.where(trains, (0.95 - noise.abs() / 4).clamp(0, 1), unknown),
            gradient_ratio=torch.where(trains, 0.5 + noise / 4, unknown),
            vanishing=torch.where(trains, 0.0, unknown),
            exploding=torch.where(trains, 0.0, unknown),
        )

    def accuracy(self, states: SlotStates, step: int) -> Tensor:
        """Validation accuracy of each member.  # [N]"""
        host = HOST_END - (HOST_END - HOST_START) * math.exp(-step / HOST_STEPS)
        grown = (states.alpha * self.skill).sum(dim=1) / 100
        return (host + grown).clamp(0, 1)
