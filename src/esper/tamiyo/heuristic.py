"""The heuristic controller: what a careful person would do by looking at the curves."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from pydantic import Field
from torch import Tensor

from esper.lifecycle.actions import Actions, Head, Op
from esper.lifecycle.stages import Stage
from esper.tamiyo.controller import Scene
from esper.tamiyo.policy.action_masks import ActionMasks
from esper.tamiyo.policy.observation import Observation
from esper.tamiyo.scripted import Gardener, Wish
from esper.utils.settings import Config


class HeuristicConfig(Config):
    """When the heuristic grows and when it gives up."""

    plateau_epochs: int = Field(
        default=1, ge=1, le=4, description="germinate after this many epochs without progress"
    )
    plateau_points: float = Field(
        default=1.0, ge=0, description="an epoch that gains fewer points of accuracy made no progress"
    )
    first_epoch: int = Field(default=2, ge=0, description="never germinate before this many epochs")
    fossilise_points: float = Field(
        default=0.5, description="fossilise a seed whose contribution is above this many points"
    )
    prune_points: float = Field(
        default=-2.0, le=0, description="prune any seed whose contribution is this many points or less"
    )
    rest_epochs: int = Field(default=5, ge=0, description="no germination for this long after a prune")


class Heuristic(Gardener):
    """Germinates on a plateau, advances as the gates allow, keeps what helps and prunes what hurts.

    A seed at full strength (HOLDING) is pruned as soon as its contribution is negative; one that is still
    being blended in gets the benefit of the doubt down to `prune_points`.
    """

    def __init__(self, config: HeuristicConfig | None = None):
        self.config = config or HeuristicConfig()

    def begin(self, scene: Scene) -> None:
        """No member has pruned anything, so that all may plant."""
        super().begin(scene)
        self._rested = torch.zeros_like(scene.members)  # [N] the step from which a seed may be planted

    def state_dict(self) -> dict[str, Tensor]:
        return {**super().state_dict(), "rested": self._rested}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        super().load_state_dict(state)
        self._rested = state["rested"].to(self._rested.device)

    def decide(self, observation: Observation, masks: ActionMasks, step: int) -> Actions:
        """Prune what hurts, else fossilise, else advance, else plant on a plateau, else wait."""
        config, contribution = self.config, observation.evidence.contribution
        hurts = (contribution <= config.prune_points) | (
            (observation.slots.stage == Stage.HOLDING) & (contribution < 0)
        )
        ready = self.on_plateau(observation) & (self._rested <= step) & (step >= config.first_epoch)
        wishes = [
            Wish(Op.PRUNE, hurts),
            Wish(Op.FOSSILIZE, contribution > config.fossilise_points),
            Wish(Op.ADVANCE, torch.ones_like(hurts)),
            Wish(Op.GERMINATE, ready.unsqueeze(1).expand_as(hurts)),
        ]
        actions = self.act(wishes, masks)
        self._rested = torch.where(actions[Head.OP] == Op.PRUNE, step + config.rest_epochs, self._rested)
        return actions

    def on_plateau(self, observation: Observation) -> Tensor:
        """Whether each of the latest epochs gained less than `plateau_points`.  # [N] bool"""
        latest = observation.accuracy_history[:, -(self.config.plateau_epochs + 1) :]
        gains = latest.diff(dim=1)  # NaN before there are enough epochs
        return (gains < self.config.plateau_points / 100.0).all(dim=1)
