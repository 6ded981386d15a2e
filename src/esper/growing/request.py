"""What is asked for: a model, its data, and how it is to grow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from esper.foundation.errors import UserError
from esper.foundation.interrupts import StopRequest
from esper.growing.batches import UserStep
from esper.growing.settings import GrowSettings
from esper.tamiyo.controller import Controller

ModelOrMaker = nn.Module | Callable[[], nn.Module]


@dataclass(frozen=True)
class Request:
    """The arguments of `esper.grow`, checked."""

    model: ModelOrMaker
    train: Any
    val: Any
    slots: Sequence[str | int] | None
    controller: str | Controller
    epochs: int
    budget: int | None
    step: UserStep | None
    settings: GrowSettings
    device: torch.device
    stop: StopRequest

    def made(self) -> nn.Module:
        """The model itself, or one that the given function makes."""
        if isinstance(self.model, nn.Module):
            return self.model
        made = self.model() if callable(self.model) else self.model
        if not isinstance(made, nn.Module):
            raise UserError(
                f"model is a {type(made).__name__}; give an nn.Module, or a function that makes one"
            )
        return made
