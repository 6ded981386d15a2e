"""Who decides what grows: a controller by name, a trained one, or the user's own."""

from __future__ import annotations

import torch

from esper.controllers import CONTROLLER_NAMES, load_controller
from esper.foundation.errors import UserError
from esper.lifecycle.config import GateConfig
from esper.tamiyo.controller import Controller


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
