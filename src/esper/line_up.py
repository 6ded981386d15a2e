"""Who is compared: the arms of a comparison, from what a person names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

from esper.config import RunConfig
from esper.controllers import (
    BEST_OF,
    CONTROLLER_NAMES,
    FINAL,
    FIXED,
    host_options,
    load_controller,
    restarts_of,
)
from esper.foundation.devices import own_device
from esper.foundation.errors import UserError
from esper.tamiyo.controller import Controller
from esper.tamiyo.scripted import Static
from esper.telemetry.differences import FINAL_OF


@dataclass(frozen=True)
class Fixed:
    """An arm of networks that never change."""

    of: str = ""  # the controller whose final networks they are; by default the task's own host
    host: Mapping[str, int] = field(default_factory=dict)  # options of the host that are other than its own
    restarts: int = 1  # hosts that share the compute of a member, 0 for as many as it pays for


Arm = Controller | Fixed


def arms_of(text: str, config: RunConfig) -> dict[str, Arm]:
    """'static,habit,heuristic,final:heuristic,best-of:8,runs/mine' as arms by the names that they are shown
    under, in the order of the table; the first one is the baseline.

    A controller whose final networks are asked for takes part too. Raises UserError where nothing is named,
    something is named twice, or a controller cannot be loaded.
    """
    asked = [part.strip() for part in text.split(",") if part.strip()]
    if not asked:
        raise UserError(
            f"--controllers is {text!r}; give some of {', '.join(CONTROLLER_NAMES)}, run folders, "
            f"{FINAL}NAME and {BEST_OF}:K, with commas between them"
        )
    twice = sorted({part for part in asked if asked.count(part) > 1})
    if twice:
        raise UserError(f"--controllers names {', '.join(twice)} more than once; name each arm once")
    named = dict.fromkeys(chain.from_iterable((part.removeprefix(FINAL), part) for part in asked))
    shown = {name: _shown(name) for name in named if not name.startswith((FINAL, BEST_OF, FIXED))}
    if len(set(shown.values())) < len(shown):
        shown = {name: name for name in shown}
    arms: dict[str, Arm] = {}
    for name in named:
        if name.startswith(FINAL):
            of = shown[name.removeprefix(FINAL)]
            arms[f"{FINAL_OF}{of}"] = Fixed(of=of)
        elif name.startswith(BEST_OF):
            arms[name] = Fixed(restarts=restarts_of(name))
        elif name.startswith(FIXED):
            arms[name] = Fixed(host=host_options(name))
        else:
            loaded = load_controller(name, config.lifecycle.gates, own_device(config.device))
            arms[shown[name]] = Fixed() if isinstance(loaded, Static) else loaded
    return arms


def _shown(name: str) -> str:
    """A path is shown by its last part; a checkpoint inside a run by the run's."""
    if name.partition(":")[0] in CONTROLLER_NAMES:
        return name
    parts = Path(name).parts
    return parts[-3] if len(parts) > 2 and parts[-2] == "checkpoints" else Path(name).name
