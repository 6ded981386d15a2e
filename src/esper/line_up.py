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


@dataclass(frozen=True)
class LineUp:
    """Who is compared, in the order of the table; the first one is the baseline."""

    arms: Mapping[str, str]  # shown name → as it was asked for
    controllers: Mapping[str, str]  # of these, shown name → name or path of a controller

    @staticmethod
    def parse(text: str) -> LineUp:
        """'static,habit,heuristic,final:heuristic,best-of:8,runs/mine' as arms.

        Raises UserError where nothing is named or something is named twice. A controller whose final networks
        are asked for takes part too.
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
        controllers = [name for name in named if not name.startswith((FINAL, BEST_OF, FIXED))]
        shown = {name: _shown(name) for name in controllers}
        if len(set(shown.values())) < len(shown):
            shown = {name: name for name in controllers}
        labels = {
            part: f"{FINAL_OF}{shown[part.removeprefix(FINAL)]}" if part.startswith(FINAL) else part
            for part in named
        } | shown
        back = {label: name for name, label in shown.items()}
        return LineUp({labels[part]: part for part in named}, back)

    def load(self, config: RunConfig) -> dict[str, Arm]:
        """The arms themselves; raises UserError where a controller cannot be loaded."""
        return {label: self._arm(asked, config) for label, asked in self.arms.items()}

    def _arm(self, asked: str, config: RunConfig) -> Arm:
        if asked.startswith(FINAL):
            name = asked.removeprefix(FINAL)
            return Fixed(of=next(label for label, known in self.controllers.items() if known == name))
        if asked.startswith(BEST_OF):
            return Fixed(restarts=restarts_of(asked))
        if asked.startswith(FIXED):
            return Fixed(host=host_options(asked))
        loaded = load_controller(asked, config.lifecycle.gates, own_device(config.device))
        return Fixed() if isinstance(loaded, Static) else loaded


def _shown(name: str) -> str:
    """A path is shown by its last part; a checkpoint inside a run by the run's."""
    if name.partition(":")[0] in CONTROLLER_NAMES:
        return name
    parts = Path(name).parts
    return parts[-3] if len(parts) > 2 and parts[-2] == "checkpoints" else Path(name).name
