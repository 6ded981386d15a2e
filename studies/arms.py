"""Who takes part: scripted controllers, trained ones by file, and both under changes of the lifecycle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file

from esper.builders import make_agent
from esper.controllers import PRETRAINED, load_controller
from esper.foundation.errors import UserError
from esper.simic.learner import LearnedController
from esper.tamiyo.controller import Controller
from esper.tamiyo.heuristic import Heuristic
from esper.tamiyo.scripted import Habit, Periodic, RandomLegal, Scheduled, Static
from studies.ablations import CHANGES
from studies.setting import GATES
from studies.variants import MAIN, VARIANTS, config_of, variant_of

ABLATED = ("scheduled", f"{MAIN}-0")  # who also lives under every change of the lifecycle

SCRIPTED: dict[str, Callable[[], Controller]] = {
    "static": Static,
    "heuristic": lambda: Heuristic(gates=GATES),
    "habit": lambda: Habit(gates=GATES),
    "periodic": lambda: Periodic(gates=GATES),
    "scheduled": lambda: Scheduled(gates=GATES),
}


@dataclass(frozen=True)
class Entrant:
    """One arm of the program of controllers."""

    controller: Controller
    change: str | None = None  # of the lifecycle, by its name


def policies(folder: Path | None, device: str) -> dict[str, Callable[[], Controller]]:
    """The trained controllers of a folder by `variant-seed`; without one, that of the package."""
    if folder is None:
        return {f"{MAIN}-0": lambda: load_controller(PRETRAINED, device=device)}
    paths = {path.stem: path for path in sorted(folder.glob("*-*.safetensors"))}
    if f"{MAIN}-0" not in paths:
        raise UserError(
            f"{folder} has no {MAIN}-0.safetensors, its controllers are {', '.join(paths) or 'none'}; "
            "give the --out of: python -m studies.growth train"
        )
    return {name: partial(load_policy, path, device) for name, path in paths.items()}


def load_policy(path: Path, device: str) -> LearnedController:
    """A trained controller that sees and remembers as its variant did when it was trained."""
    name = variant_of(path.stem)
    if name not in VARIANTS:
        raise UserError(f"{path} is of variant {name!r}; allowed are {', '.join(VARIANTS)}")
    config = config_of(path.stem)
    agent = make_agent(config, torch.device(device))
    agent.load_state_dict(load_file(path, device=device))
    return LearnedController(agent, config.learner)


def entrants(
    learned: dict[str, Callable[[], Controller]], rate: float, changed: Sequence[str] = ABLATED
) -> dict[str, Entrant]:
    """All arms that share one environment: `rate` is that of random germination, `changed` are the arms that
    also live under every change of the lifecycle."""
    makers = SCRIPTED | learned | {"random": lambda: RandomLegal(rate)}
    plain = {name: Entrant(make()) for name, make in makers.items()}
    ablated = {
        f"{name}, {change}": Entrant(makers[name](), change)
        for name in changed
        if name in makers
        for change in CHANGES
    }
    return plain | ablated
