"""Who decides what grows: a controller by name, the one that ships with esper, or the user's own."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path

import torch
from torch import Tensor

from esper.errors import UserError
from esper.lifecycle import GateConfig
from esper.tamiyo.controllers import Controller, Periodic, RandomLegal, Scheduled, Static
from esper.tamiyo.heuristic import Heuristic, HeuristicConfig

TAMIYO = "tamiyo"
# A run of one's own is short and its validation noisy: one epoch that gains little is reason enough to grow.
EAGER = HeuristicConfig(plateau_epochs=1, plateau_points=1.0, first_epoch=2)
_SCRIPTED: dict[str, Callable[[GateConfig], Controller]] = {
    "heuristic": lambda gates: Heuristic(EAGER, gates),
    "periodic": lambda gates: Periodic(gates=gates),
    "scheduled": lambda gates: Scheduled(gates=gates),
    "random": lambda gates: RandomLegal(),
    "static": lambda gates: Static(),
}
CONTROLLERS = (*_SCRIPTED, TAMIYO)


def make_controller(
    given: str | Controller, gates: GateConfig, device: torch.device, path: Path | None = None
) -> Controller:
    """A controller by name, or the given object itself. `path`: weights to use instead of those shipped."""
    if not isinstance(given, str):
        missing = [name for name in ("begin", "decide") if not callable(getattr(given, name, None))]
        if missing:
            raise UserError(
                f"controller is a {type(given).__name__} without {' and '.join(missing)}; give one of "
                f"{', '.join(CONTROLLERS)}, or an object with begin(scene) and decide(observation, masks, "
                "step)"
            )
        return given
    if given == TAMIYO:
        return _tamiyo_or_heuristic(gates, device, path)
    if given not in _SCRIPTED:
        raise UserError(f"controller is {given!r}; allowed are {', '.join(CONTROLLERS)}")
    return _SCRIPTED[given](gates)


def pretrained_path() -> Path:
    """Where the trained controller lies, if this copy of esper ships one."""
    return Path(str(files("esper"))) / "pretrained" / f"{TAMIYO}.safetensors"


def _tamiyo_or_heuristic(gates: GateConfig, device: torch.device, path: Path | None) -> Controller:
    path = path or pretrained_path()
    try:
        return load_tamiyo(path, device)
    except UserError as error:
        warnings.warn(f"{error}; the heuristic controller decides instead", UserWarning, stacklevel=4)
        return Heuristic(EAGER, gates)


def load_tamiyo(path: Path, device: torch.device) -> Controller:
    """A trained policy from a safetensors file: a policy's own tensors, or a checkpoint that holds them."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    from esper.simic.agent.ppo import PPOAgent
    from esper.simic.learned import LearnedController
    from esper.tamiyo.policy.network import TamiyoNet, TamiyoNetConfig

    if not path.is_file():
        raise UserError(f"this copy of esper ships no trained controller ({path.name} is not there)")
    try:
        tensors = _policy_tensors(load_file(path))
        config = TamiyoNetConfig(
            width=tensors["op_head.weight"].shape[1], embedding=tensors["op_embedding.weight"].shape[1]
        )
        policy = TamiyoNet(config)
        policy.load_state_dict(tensors)
    except (SafetensorError, KeyError, RuntimeError, ValueError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(
            f"the trained controller in {path.name} does not fit this esper ({reason})"
        ) from error
    return LearnedController(PPOAgent(policy, device=device))


def _policy_tensors(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    named = {name.replace("/", "."): tensor for name, tensor in tensors.items()}
    inside = {name.partition("policy.")[2]: t for name, t in named.items() if "policy." in name}
    return inside or named
