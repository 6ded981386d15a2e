"""Who decides what grows: a controller by name, a trained one, or the user's own."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

import torch

from esper.controllers import CONTROLLER_NAMES, load_controller
from esper.foundation.errors import UserError
from esper.lifecycle.actions import Blueprint
from esper.lifecycle.config import GateConfig
from esper.tamiyo.controller import Controller

if TYPE_CHECKING:
    from esper.growing.live_hooks import Hooks


HEURISTIC = "heuristic"
WIDENING = "schedule:widen_full@0.1"  # twice the hidden units, from a tenth of the epochs on


def default_controller(hooks: Hooks, budget: int | None, blueprints: Collection[str] | None) -> str:
    """Who decides where nobody is named: of `benchmarks.when_to_grow` the one that does best against a wider
    model at equal FLOPs, where it can grow anything; else the heuristic."""
    wide = Blueprint.WIDEN_FULL
    prices = [offer.parameters[wide] for offer in hooks.offers if wide in offer.parameters]
    fits = prices and (budget is None or min(prices) <= budget)
    return WIDENING if fits and (blueprints is None or wide.name in blueprints) else HEURISTIC


def name_of(given: str | Controller | None) -> str:
    """What to call a controller in a report."""
    return given if isinstance(given, str) else type(given).__qualname__


def make_controller(given: str | Controller, gates: GateConfig, device: torch.device) -> Controller:
    """A controller by name, by the run or checkpoint that holds it, or the given object itself."""
    if isinstance(given, str):
        return load_controller(given, gates, device)
    missing = [name for name in ("begin", "decide") if not callable(getattr(given, name, None))]
    if missing:
        raise UserError(
            f"controller is a {type(given).__name__} without {' and '.join(missing)}; give one of "
            f"{', '.join(CONTROLLER_NAMES)}, or an object with begin(scene) and decide(observation, masks, "
            "step)"
        )
    return given
