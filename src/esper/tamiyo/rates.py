"""Controllers of the learning rate: a reactive rule, and plans that are drawn to be judged in hindsight."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from esper.lifecycle.actions import Actions, Blueprint, Rate
from esper.tamiyo.controller import Controller, EpisodeInfo
from esper.tamiyo.policy.action_masks import ActionMasks
from esper.tamiyo.policy.features import HISTORY_LENGTH, Observation
from esper.tamiyo.schedule import PacedSchedule, ScheduleLine
from esper.utils.errors import UserError
from esper.utils.streams import Stream, random_uniform


class ReactiveRate(Controller):
    """Double the rate where the validation loss falls slowly, halve it where the loss rises; never grow.

    It looks back over `window` epochs and changes the rate at most once in as many. A loss that fell by less
    than the share `fall` fell slowly: the rate is taken to be too small.
    """

    uses_metrics = True

    def __init__(self, fall: float = 0.2, window: int = 1):
        if not 0 <= fall < 1 or not 1 <= window < HISTORY_LENGTH:
            raise ValueError(
                f"fall is {fall} and window is {window}; allowed are 0 to below 1, and 1 to "
                f"{HISTORY_LENGTH - 1} epochs"
            )
        self.fall, self.window = fall, window

    def begin(self, info: EpisodeInfo) -> None:
        """Start an episode in which no rate has been changed yet."""
        self._waits = Actions.wait(info.num_members, info.device).choices
        self._since = torch.zeros_like(info.members)  # [N] epochs since the latest change

    def state_dict(self) -> dict[str, Tensor]:
        return {"since": self._since}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self._since = state["since"].to(self._since.device, copy=True)

    def decide(self, observation: Observation, masks: ActionMasks, step: int) -> Actions:
        """Return WAIT for every member, with what is done to its rate."""
        losses = observation.loss_history
        fallen = 1.0 - losses[:, -1] / losses[:, -1 - self.window]
        # Not `fallen <= fall`: a loss that is NaN has not fallen.
        due = ~(fallen > self.fall) & (self._since >= self.window)
        wanted = torch.where(fallen >= 0, int(Rate.DOUBLE), int(Rate.HALVE))
        rate = _where_legal(torch.where(due, wanted, int(Rate.KEEP)), masks)
        self._since = torch.where(rate == Rate.KEEP, self._since + 1, 1)
        return Actions(self._waits, rate)


# Half of the plans keep the recipe's decay; an eighth widens, and an eighth clones, which costs most to try.
DECAYS = (math.inf, math.inf, math.inf, math.inf, 0.5, 0.35, 0.2, 0.1)
GROWTH = (ScheduleLine(0.15, Blueprint.WIDEN_FULL), ScheduleLine(0.2, Blueprint.CLONE))
GROWS = 0.125
SPAN = 100.0  # of the rates that plans lead to, around the recipe's


class RatePlans(Controller):
    """A drawn plan for every member: bring the rate to a target, decay, and perhaps grow.

    Rows with the same member have different plans. What a plan is worth is known at the end alone, and
    `Learner` weighs what it imitates by that.
    """

    uses_metrics = True

    def __init__(self) -> None:
        self._growth = PacedSchedule(GROWTH)

    def begin(self, info: EpisodeInfo) -> None:
        """Draw a plan for every member."""
        # A counter for each row of an episode, so that equal members draw apart.
        rows = info.counter(0) + torch.arange(info.num_members, device=info.device)
        draws = random_uniform(info.seed, info.members, Stream.CONTROL, rows, 4)
        self._target = ((draws[:, 0] - 0.5) * math.log(SPAN)).exp()
        self._decay = torch.tensor(DECAYS, device=info.device)[(draws[:, 1] * len(DECAYS)).long()]
        self._growth.begin(info)
        self._growth.skip(draws[:, 2:].T >= GROWS)

    def state_dict(self) -> dict[str, Tensor]:
        return self._growth.state_dict()  # the plans follow from `begin`

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self._growth.load_state_dict(state)

    def decide(self, observation: Observation, masks: ActionMasks, step: int) -> Actions:
        """Return the next step of every plan: towards the target in octaves, then the decay."""
        growth = self._growth.decide(observation, masks, step)
        if observation.training is None:
            return growth
        # Within half an octave of the target the rate is there.
        octaves = (self._target / observation.training.scale).log() / math.log(2.0)
        rate = torch.where(octaves > 0.5, int(Rate.DOUBLE), int(Rate.KEEP))
        rate = torch.where(octaves < -0.5, int(Rate.HALVE), rate)
        due = (rate == Rate.KEEP) & (observation.progress >= self._decay)
        rate = torch.where(due, int(Rate.DECAY), rate)
        return Actions(growth.choices, _where_legal(rate, masks))


def _where_legal(rate: Tensor, masks: ActionMasks) -> Tensor:
    """Return the choices that are legal, and KEEP for the others.  # [N] → [N]"""
    if masks.rate is None:
        raise UserError(
            "the controller sets the learning rate, and this run does not let it; set episode.rates to true, "
            "or choose another controller"
        )
    return rate * masks.rate.gather(1, rate.unsqueeze(1)).squeeze(1)
