"""The learning rates of one living model: by a schedule of ours, or by a scheduler of the user's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from esper.foundation.errors import UserError
from esper.population.config import PopulationConfig
from esper.population.schedule import rate_share


class Rates:
    """Which share of its peak every rate has now.

    A user's scheduler moves a stand-in with one rate, which begins at the peak; all groups follow in
    proportion, so that those of seeds, which come and go, need nothing of it. It is stepped after every step
    of the optimiser.
    """

    def __init__(self, make: Callable[..., Any] | None, config: PopulationConfig, peak: float):
        self._make, self._config, self._peak = make, config, peak
        self.steps = 0  # of the user's scheduler
        self.begin(0)

    def begin(self, steps: int) -> None:
        """A fresh scheduler that has been stepped that often; raises a UserError where it is none."""
        if self._make is None:
            return
        self._stand_in = torch.optim.SGD([nn.Parameter(torch.zeros(1))], self._peak)
        self._scheduler = self._make(self._stand_in)
        if not callable(getattr(self._scheduler, "step", None)):
            raise UserError(
                f"make_scheduler gives a {type(self._scheduler).__name__}; it must return a scheduler of "
                "torch.optim.lr_scheduler, or anything with step()"
            )
        self.steps = 0
        for _ in range(steps):
            self.step()

    def share(self, done: float) -> float:
        """Of the peak, when this share of the run is over."""
        if self._make is None:
            return float(rate_share(torch.tensor(done), self._config))
        return float(self._stand_in.param_groups[0]["lr"]) / self._peak

    def step(self) -> None:
        """The optimiser has made a step."""
        if self._make is not None:
            self._stand_in.step()
            self._scheduler.step()
            self.steps += 1
