"""Learning rate schedules: a share of the peak rate, by how far a member has come."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from esper.lifecycle.legality import in_forward_pass
from esper.lifecycle.slot_states import SlotStates
from esper.population.config import PopulationConfig

LEAST = 1e-3  # a schedule that falls ends here
FIRST = 0.04  # one_cycle begins here


def rate_share(done: Tensor, config: PopulationConfig) -> Tensor:
    """Return the share of the peak learning rate of members that have come so far.  # done [n] → [n], 0..1"""
    return SCHEDULES[config.schedule](done, config)


def _constant(done: Tensor, config: PopulationConfig) -> Tensor:
    return torch.ones_like(done)


def _cosine(done: Tensor, config: PopulationConfig, start: float = 0.0) -> Tensor:
    return (0.5 * (1.0 + torch.cos(math.pi * (done - start) / (1.0 - start)))).clamp(min=LEAST)


def _one_cycle(done: Tensor, config: PopulationConfig) -> Tensor:
    if config.warmup == 0:
        return _cosine(done, config)
    # Half a cosine up from FIRST over the warm-up, then half a cosine down.
    rise = FIRST + (1.0 - FIRST) * 0.5 * (1.0 - torch.cos(math.pi * done / config.warmup))
    return torch.where(done < config.warmup, rise, _cosine(done, config, config.warmup))


def _flat(done: Tensor, config: PopulationConfig) -> Tensor:
    """Up over `warmup`, flat, then linearly down to 0 over the last `decay`."""
    fall = ((1.0 - done) / max(config.decay, 1e-6)).clamp(0.0, 1.0)
    if config.warmup == 0:
        return fall
    return torch.minimum((FIRST + done / config.warmup).clamp(max=1.0), fall)


SCHEDULES: dict[str, Callable[[Tensor, PopulationConfig], Tensor]] = {
    "constant": _constant,
    "cosine": _cosine,
    "one_cycle": _one_cycle,
    "flat": _flat,
}


class Rewarming:
    """Warms up the rates of a member anew when a new seed starts to blend in. State is written in place."""

    def __init__(self, members: int, slots: int, minibatches: int, device: torch.device) -> None:
        self.minibatches = minibatches
        self.heard = torch.zeros(members, slots, dtype=torch.bool, device=device)  # in the latest epoch
        self.since = torch.zeros(members, device=device)  # minibatches
        self.begin()

    def begin(self) -> None:
        """Begin an episode: no seed was heard yet, and every member is warm."""
        self.heard.fill_(False)
        self.since.fill_(self.minibatches)

    def plant(self, where: Tensor) -> None:
        """Note new seeds, which were not heard yet.  # where [N, S] bool"""
        self.heard.masked_fill_(where, False)

    def fold(self, where: Tensor) -> None:
        """Note folds: a seed that was never heard in an epoch starts a warm-up now.  # where [N, S] bool"""
        self.since.masked_fill_((where & ~self.heard).any(dim=1), 0.0)

    def shares(self, states: SlotStates, active: Tensor, minibatches: int) -> Tensor:
        """Begin an epoch; return what to multiply the rates of its minibatches with.  # [minibatches, N]

        active [N] bool: members that take part; for the others no time passes
        """
        heard = torch.where(active.unsqueeze(1), in_forward_pass(states) & (states.alpha > 0), self.heard)
        self.since.masked_fill_((heard & ~self.heard).any(dim=1), 0.0)
        self.heard.copy_(heard)
        steps = torch.arange(1, minibatches + 1, device=self.since.device).unsqueeze(1)
        shares = ((self.since + steps) / self.minibatches).clamp(max=1.0)
        self.since.add_(minibatches * active)
        return shares

    def tensors(self) -> dict[str, Tensor]:
        """What a snapshot holds."""
        return {"heard": self.heard, "since_heard": self.since}
