"""Controllers: the Protocol that decides for all members at once, and several controllers side by side."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Protocol

import torch
from torch import Tensor

from esper.lifecycle.actions import Actions
from esper.tamiyo.policy.action_masks import ActionMasks
from esper.tamiyo.policy.features import Observation
from esper.utils.rows import strip_prefix

EPISODE_SHIFT = 20  # an episode's draws begin at episode << 20: room for a million steps


@dataclass(frozen=True)
class EpisodeInfo:
    """Whom a controller decides for."""

    members: Tensor  # [N] int64 global ids
    num_slots: int
    seed: int
    device: torch.device
    episode: int = 0
    batches: int = 1  # minibatches between two decisions

    @property
    def num_members(self) -> int:
        """Return N."""
        return self.members.shape[0]

    def counter(self, step: int) -> int:
        """Return which draw of a member's streams this step takes."""
        return (self.episode << EPISODE_SHIFT) + step


class Controller(Protocol):
    """Decides for all members at once; keeps its memory as rows, and waits for no device.

    `uses_metrics`: whether it reads what is measured. Where it does not, its members are not charged for
    measurements.
    """

    @property
    def uses_metrics(self) -> bool: ...

    def begin(self, info: EpisodeInfo) -> None:
        """Start an episode of these members, forgetting the last one."""

    @abstractmethod
    def decide(self, observation: Observation, masks: ActionMasks, step: int) -> Actions | list[Actions]:
        """Return one legal action per member, or several that are applied one after the other."""

    def state_dict(self) -> dict[str, Tensor]:
        """Return what it remembers of the episode under way, by name; nothing by default."""
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue the episode of a saved state; `begin` was called before with the same scene."""
        return None


class Blocks(Controller):
    """Block k of the members is decided for by controller k.

    Give every block the same member ids (`Blocks.members`) and its members are the same networks on the same
    data: the blocks then differ by what their controllers did, and run as one program.
    """

    def __init__(self, controllers: Mapping[str, Controller]):
        self.controllers = dict(controllers)

    def members(self, ids: Tensor) -> Tensor:
        """Return the ids of all blocks, the same in each.  # [n] → [blocks · n]"""
        return ids.repeat(len(self.controllers))

    def spans(self, num_members: int) -> dict[str, slice]:
        """Return which members each controller decides for."""
        size = num_members // len(self.controllers)
        return {name: slice(k * size, (k + 1) * size) for k, name in enumerate(self.controllers)}

    @property
    def uses_metrics(self) -> bool:
        """Whether any of them reads what is measured; `metric_users` says who."""
        return any(controller.uses_metrics for controller in self.controllers.values())

    def metric_users(self, num_members: int) -> Tensor:
        """Return whose controller reads what is measured.  # [N] bool"""
        each = torch.tensor([controller.uses_metrics for controller in self.controllers.values()])
        return each.repeat_interleave(num_members // len(self.controllers))

    def begin(self, info: EpisodeInfo) -> None:
        """Begin the episode of every controller with its own members."""
        self._spans = self.spans(info.num_members)
        for name, controller in self.controllers.items():
            controller.begin(replace(info, members=info.members[self._spans[name]]))

    def state_dict(self) -> dict[str, Tensor]:
        return {
            f"{name}.{key}": value
            for name, controller in self.controllers.items()
            for key, value in controller.state_dict().items()
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        for name, controller in self.controllers.items():
            controller.load_state_dict(strip_prefix(name, state))

    def decide(self, observation: Observation, masks: ActionMasks, step: int) -> list[Actions]:
        """Return as many actions as the longest list of any block; the others wait after theirs."""
        if len(self.controllers) == 1:  # every other way costs some forty launches a step
            (controller,) = self.controllers.values()
            only = controller.decide(observation, masks, step)
            return [only] if isinstance(only, Actions) else only
        decided = [
            controller.decide(observation[span], masks[span], step)
            for controller, span in zip(self.controllers.values(), self._spans.values(), strict=True)
        ]
        lists = [[one] if isinstance(one, Actions) else one for one in decided]
        waits = [Actions.wait(len(actions[0]), observation.slots.device) for actions in lists]
        rates = any(one.rate is not None for actions in lists for one in actions)
        joined = []
        for given in zip_longest(*lists):
            # Blocks with shorter lists wait, so that all blocks run as one program.
            each = [wait if one is None else one for one, wait in zip(given, waits, strict=True)]
            columns = [one.columns() if rates else one.choices for one in each]
            joined.append(Actions.of_columns(torch.cat(columns)))
        return joined
