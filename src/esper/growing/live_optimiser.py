"""The optimiser of a living model: its own weights, and those of seeds that come and go."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from esper.foundation.errors import UserError
from esper.growing.settings import GrowSettings
from esper.population.config import PopulationConfig


class LiveOptimiser:
    """Moves the model and its seeds: an optimiser made here, whose rate follows the schedule, or the user's.

    Parameters with more than one axis are decayed, norms and biases are not. A seed enters with a state of
    its own, the others keep theirs. The user's optimiser takes seeds into its first group, by its own rules.
    """

    def __init__(
        self, model: nn.Module, settings: GrowSettings, config: PopulationConfig, given: Optimizer | None
    ):
        self.config, self.owned = config, given is None
        self.host = [p for p in model.parameters() if p.requires_grad]
        self.rule = given or self._made(settings)
        self.seeds: dict[int, list[nn.Parameter]] = {}  # by slot

    def _made(self, settings: GrowSettings) -> Optimizer:
        config = self.config
        groups = self._groups(self.host, config.host_lr)
        if settings.make_optimiser is not None:
            made: Optimizer = settings.make_optimiser(groups)
            for group in made.param_groups:
                group["peak"] = group["lr"]
            return made
        if config.optimiser == "sgd":
            return torch.optim.SGD(groups, config.host_lr, config.momentum)
        return torch.optim.AdamW(groups, config.host_lr, (config.momentum, config.second_beta))

    def _groups(self, parameters: list[nn.Parameter], lr: float) -> list[dict[str, Any]]:
        decayed = [p for p in parameters if p.ndim > 1]
        plain = [p for p in parameters if p.ndim <= 1]
        pairs = ((decayed, self.config.weight_decay), (plain, 0.0))
        return [{"params": group, "weight_decay": decay, "peak": lr} for group, decay in pairs if group]

    def set_share(self, share: float) -> None:
        """Every rate at this share of its peak; the user's own optimiser is left to its schedule."""
        for group in self.rule.param_groups if self.owned else []:
            group["lr"] = share * group["peak"]

    def take_in(self, k: int, seed: nn.Module) -> None:
        """Train the seed of slot k from now on; one that is there already stays."""
        if k in self.seeds:
            return
        self.seeds[k] = list(seed.parameters())
        if self.owned:
            for group in self._groups(self.seeds[k], self.config.seed_lr):
                self.rule.add_param_group({**group, "lr": self.config.seed_lr})
        else:
            seed.zero_grad(set_to_none=True)
            self.rule.param_groups[0]["params"].extend(self.seeds[k])

    def let_go(self, k: int) -> None:
        """Forget the seed of slot k and its state."""
        gone = {id(p) for p in self.seeds.pop(k, [])}
        for group in self.rule.param_groups:
            for parameter in [p for p in group["params"] if id(p) in gone]:
                self.rule.state.pop(parameter, None)
            group["params"] = [p for p in group["params"] if id(p) not in gone]
        self.rule.param_groups = [group for group in self.rule.param_groups if group["params"]]

    def clip(self) -> torch.Tensor:
        """Bound the gradients of the model and of each seed; the norm of the model's before.  # → []"""
        for parameters in self.seeds.values():
            nn.utils.clip_grad_norm_(parameters, self.config.clip_norm)
        return nn.utils.clip_grad_norm_(self.host, self.config.clip_norm).detach()

    def tensors(self, names: Mapping[str, nn.Parameter]) -> dict[str, torch.Tensor]:
        """The state of each named parameter: `NAME.tensor.KEY`, or `NAME.number.KEY` for a plain number.

        Raises a UserError for a state of any other kind.
        """
        found: dict[str, torch.Tensor] = {}
        for name, parameter in names.items():
            for key, value in self.rule.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor):
                    found[f"{name}.tensor.{key}"] = value.detach()
                elif isinstance(value, bool | int | float):
                    found[f"{name}.number.{key}"] = torch.tensor(value, dtype=torch.float64)
                elif value is not None:
                    raise UserError(
                        f"{type(self.rule).__name__} keeps a {type(value).__name__} ({key}) for a parameter, "
                        "which cannot be saved; leave out out=, or choose an optimiser whose state is tensors"
                    )
        return found

    def load(self, names: Mapping[str, nn.Parameter], tensors: Mapping[str, torch.Tensor]) -> None:
        """The inverse of `tensors`: these parameters have that state, and no other has any."""
        self.rule.state.clear()
        for full, value in tensors.items():
            name, kind, key = full.rsplit(".", 2)
            parameter = names[name]
            own = self.rule.state[parameter]
            if kind == "number":
                number = float(value)
                own[key] = int(number) if number.is_integer() else number
            else:
                own[key] = value.clone() if value.ndim == 0 else value.clone().to(parameter.device)

    def forget(self) -> None:
        """Begin anew after weights were put back; the state of the user's own optimiser is the user's."""
        if self.owned:
            self.rule.state.clear()
