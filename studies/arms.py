"""Who takes part: scripted controllers, trained ones by file, and both under changes of the lifecycle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load_file

from esper.controllers import PRETRAINED, load_controller
from esper.simic.learned import LearnedController
from esper.tamiyo.controllers import Controller, Periodic, RandomLegal, Scheduled, Static
from esper.tamiyo.heuristic import Heuristic
from studies.ablations import CHANGES
from studies.setting import GATES, make_agent

MAIN = "main"  # the variant that is the study's own; the others are ablations of its training
ABLATED = ("scheduled", f"{MAIN}-0")  # who also lives under every change of the lifecycle


def load_policy(path: Path, device: str) -> LearnedController:
    """A trained controller that decides as it did when it was trained."""
    agent = make_agent(0, device)
    agent.load_state_dict(load_file(path, device=device))
    return LearnedController(agent)


Loader = Callable[[Path, str], Controller]

# How a variant decides; what is not listed decides like the main one.
LOADERS: dict[str, Loader] = {MAIN: load_policy}

SCRIPTED: dict[str, Callable[[], Controller]] = {
    "static": Static,
    "heuristic": lambda: Heuristic(gates=GATES),
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
        raise SystemExit(f"{folder} has no {MAIN}-0.safetensors; it holds {', '.join(paths) or 'none'}")
    return {name: _opener(name, path, device) for name, path in paths.items()}


def _opener(name: str, path: Path, device: str) -> Callable[[], Controller]:
    loader = LOADERS.get(variant_of(name), load_policy)
    return lambda: loader(path, device)


def variant_of(name: str) -> str:
    """The variant of a trained controller: `no_memory-0` → `no_memory`."""
    return name.rpartition("-")[0]


def entrants(learned: dict[str, Callable[[], Controller]], rate: float) -> dict[str, Entrant]:
    """All arms that share one environment; `rate` is that of random germination."""
    makers = SCRIPTED | learned | {"random": lambda: RandomLegal(rate)}
    plain = {name: Entrant(make()) for name, make in makers.items()}
    ablated = {
        f"{name}, {change}": Entrant(makers[name](), change)
        for name in ABLATED
        if name in makers
        for change in CHANGES
    }
    return plain | ablated
