"""A controller for tests that plants early and often."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from esper.lifecycle.actions import Actions, Op
from esper.tamiyo.policy.action_masks import ActionMasks
from esper.tamiyo.policy.features import Observation
from esper.tamiyo.scripted import Heuristic


class Scheduled(Heuristic):
    """Germinates a seed at each step of a list, or as soon after it as is legal; never prunes."""

    def __init__(self, steps: Sequence[int]):
        self.steps = tuple(steps)

    def decide(self, observation: Observation, masks: ActionMasks, step: int) -> Actions:
        """Fossilise, else advance, else plant if the list owes a seed, else wait."""
        anywhere = torch.ones_like(masks.slot)
        due = self._planted < sum(at <= step for at in self.steps)  # [N]
        plants = due.unsqueeze(1).expand_as(anywhere)
        return self.act({Op.FOSSILIZE: anywhere, Op.ADVANCE: anywhere, Op.GERMINATE: plants}, masks)
