"""Whoever decides, as a small protocol: it sees an observation and masks, and answers with legal actions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from esper.lifecycle.actions import Actions
from esper.tamiyo.policy.action_masks import ActionMasks
from esper.tamiyo.policy.observation import Observation
from esper.utils.streams import Stream, random_uniform

EPISODE_SHIFT = 20  # an episode's draws begin at episode << 20: room for a million steps


@dataclass(frozen=True)
class Scene:
    """Whom a controller decides for."""

    members: Tensor  # [N] int64 global ids
    num_slots: int
    seed: int
    device: torch.device
    episode: int = 0
    batches: int = 1  # minibatches between two decisions

    @property
    def num_members(self) -> int:
        """N."""
        return self.members.shape[0]

    def draw(self, stream: Stream, step: int, count: int) -> Tensor:
        """Numbers in [0, 1) that belong to each member, this episode and this step.  # [N, count]"""
        return random_uniform(self.seed, self.members, stream, self.counter(step), count)

    def counter(self, step: int) -> int:
        """Which draw of a member's streams this step takes."""
        return (self.episode << EPISODE_SHIFT) + step


class Controller(Protocol):
    """Decides for all members at once; keeps its memory as rows, and waits for no device.

    `looks`: whether it reads what is measured. Where it does not, its members are not charged for
    measurements.
    """

    @property
    def looks(self) -> bool: ...

    def begin(self, scene: Scene) -> None:
        """Start an episode of these members, forgetting the last one."""

    def decide(self, observation: Observation, masks: ActionMasks, step: int) -> Actions | list[Actions]:
        """Return one legal action per member, or several that are applied one after the other."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Tensor]:
        """Return what it remembers of the episode under way, by name; nothing by default."""
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue the episode of a saved state; `begin` was called before with the same scene."""
        return None
