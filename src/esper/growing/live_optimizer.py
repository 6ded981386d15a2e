"""The optimizer of a live model: its own parameters, those of seeds that come and go, and learning rates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from esper.growing.settings import GrowSettings
from esper.growing.slots import trainable_parameters
from esper.growing.surgery.widening import GrownParameter, merge_units
from esper.population.config import PopulationConfig
from esper.population.optimizer import moment_scale, rate_share
from esper.utils.errors import UserError, with_place

if TYPE_CHECKING:
    from esper.growing.live_model import Fold

NUMBER = "number:"  # before the name of a state that is a number and no tensor


class LiveOptimizer:
    """Updates the model and its seeds; all rates follow one schedule.

    Parameters with more than one axis are decayed, norms and biases are not. A seed enters as groups of its
    own, with a state of its own; the others keep theirs.
    """

    def __init__(self, model: nn.Module, settings: GrowSettings, config: PopulationConfig):
        self.model, self.config = model, config
        self.host = trainable_parameters(model)
        self.inner = self._make(settings)
        held = {id(p) for group in self.inner.param_groups for p in group["params"]}
        if self.host and not any(id(p) in held for p in self.host):
            raise UserError(
                f"the {type(self.inner).__name__} holds none of the {len(self.host)} parameters of the "
                "model, which is a copy of yours; make it of the groups that make_optimizer is called with"
            )
        self.seeds: dict[int, list[nn.Parameter]] = {}  # by slot
        self._given_groups = [dict(group) for group in self.inner.param_groups]

    def _make(self, settings: GrowSettings) -> Optimizer:
        config = self.config
        nothing = nn.Parameter(torch.zeros(0))  # an optimizer of a frozen model waits for its seeds
        groups = self._groups(self.host or [nothing], config.host_lr)
        if settings.make_optimizer is not None:
            must = "it must return an optimizer of torch over the groups that it is called with"
            try:
                made = settings.make_optimizer(groups)
            except Exception as error:  # whatever the user's function raises
                raise UserError(f"make_optimizer raised an error ({with_place(error)}); {must}") from error
            if not isinstance(made, Optimizer):
                raise UserError(f"make_optimizer gives {made!r}; {must}")
            for group in made.param_groups:
                group["peak"] = group["lr"]
            return made
        if config.optimizer == "sgd":
            return torch.optim.SGD(groups, config.host_lr, config.momentum)
        betas = (config.momentum, config.second_beta)
        eps = _adam_eps(self.model.parameters(), config.second_beta)
        return torch.optim.AdamW(groups, config.host_lr, betas, eps)

    def _groups(self, parameters: list[nn.Parameter], lr: float) -> list[dict[str, Any]]:
        decayed = [p for p in parameters if p.ndim > 1]
        plain = [p for p in parameters if p.ndim <= 1]
        pairs = ((decayed, self.config.weight_decay), (plain, 0.0))
        return [{"params": group, "weight_decay": decay, "peak": lr} for group, decay in pairs if group]

    def set_rates(self, progress: float) -> None:
        """Set every rate to its peak times the factor of the schedule after this share of the run."""
        factor = float(rate_share(torch.tensor(progress), self.config))
        for group in self.inner.param_groups:
            group["lr"] = factor * group["peak"]

    def step(self) -> None:
        """Clip the gradients of the model and of each seed, and step."""
        # Each by itself: the gradients of a fresh seed may be large and would shrink those of the model.
        for parameters in self.seeds.values():
            nn.utils.clip_grad_norm_(parameters, self.config.clip_norm)
        nn.utils.clip_grad_norm_(self.host, self.config.clip_norm)
        self.inner.step()

    # ---- seeds -----------------------------------------------------------------------------------------

    def add_seed(self, k: int, parameters: Iterable[nn.Parameter]) -> None:
        """Train the seed of slot k from now on; one that is there already stays."""
        if k in self.seeds:
            return
        self.seeds[k] = list(parameters)
        for group in self._groups(self.seeds[k], self.config.seed_lr):
            self.inner.add_param_group({**group, "lr": self.config.seed_lr})

    def remove_seed(self, k: int) -> None:
        """Remove the parameters of the seed of slot k, and their state."""
        gone = {id(p) for p in self.seeds.pop(k, [])}
        for group in self.inner.param_groups:
            for parameter in [p for p in group["params"] if id(p) in gone]:
                self.inner.state.pop(parameter, None)
            group["params"] = [p for p in group["params"] if id(p) not in gone]
        self.inner.param_groups = [group for group in self.inner.param_groups if group["params"]]

    def fold(self, k: int, fold: Fold) -> None:
        """Replace parameters that a fold has made wider, and keep those of the seed that joined the model.

        Moments come along; those of new units are rescaled to the step count of the old ones.
        """
        for grown in fold.grown:
            group = next(g for g in self.inner.param_groups if any(p is grown.old for p in g["params"]))
            old, side = (self.inner.state.pop(p, {}) for p in (grown.old, grown.side))
            self.inner.state[grown.new] = _merge_states(grown, old, side, group.get("betas", (0.0, 0.0)))
            self._replace({grown.old: grown.new})
        for before, after in fold.moved:
            if before in self.inner.state:
                self.inner.state[after] = self.inner.state.pop(before)
        self._replace(dict(fold.moved))
        stays = {after for _, after in fold.moved}
        self.seeds[k] = [p for p in self.seeds[k] if p not in stays]
        self.remove_seed(k)
        self.host = trainable_parameters(self.model)

    def reset(self) -> None:
        """Return to the parameters that the model was given with, without any state."""
        self.inner.state.clear()
        self.inner.param_groups = [dict(group) for group in self._given_groups]
        self.seeds, self.host = {}, trainable_parameters(self.model)

    def _replace(self, others: Mapping[nn.Parameter, nn.Parameter]) -> None:
        for group in self.inner.param_groups:
            group["params"] = [others.get(p, p) for p in group["params"]]

    # ---- saving ----------------------------------------------------------------------------------------

    def tensors(self, names: Mapping[Any, str]) -> dict[str, Tensor]:
        """Return the optimizer state of these parameters, by name and key. Views, not copies."""
        found: dict[str, Tensor] = {}
        for parameter, state in self.inner.state.items():
            for key, value in state.items() if parameter in names else ():
                if isinstance(value, Tensor):
                    found[f"{names[parameter]}/{key}"] = value
                elif isinstance(value, int | float):
                    found[f"{names[parameter]}/{NUMBER}{key}"] = _number(value)
        for k, group in enumerate(self.inner.param_groups[: len(self._given_groups)]):
            found |= {f"group {k}/{NUMBER}{n}": _number(group[n]) for n in _numbers(group)}  # of steps
        return found

    def check_savable(self) -> None:
        """Raise a UserError for an optimizer whose state holds more than tensors and numbers."""
        kept = [pair for state in self.inner.state.values() for pair in state.items()]
        odd = [(key, value) for key, value in kept if not isinstance(value, Tensor | int | float | None)]
        odd += [(key, value) for key, value in vars(self.inner).items() if isinstance(value, Optimizer)]
        for key, value in odd:
            raise UserError(
                f"{type(self.inner).__name__} keeps a {type(value).__name__} ({key}), which cannot be saved; "
                "leave out out=, or choose an optimizer whose state is tensors"
            )

    def restore(self, names: Mapping[Any, str], saved: Mapping[str, Tensor]) -> None:
        """Replace the state of these parameters by what `tensors` returned."""
        states: dict[str, dict[str, Any]] = {}
        for name, value in saved.items():
            owner, _, key = name.rpartition("/")
            number = key.startswith(NUMBER)
            states.setdefault(owner, {})[key.removeprefix(NUMBER)] = value.item() if number else value.clone()
        for k, group in enumerate(self.inner.param_groups):
            numbers = states.get(f"group {k}", {})
            for name in _numbers(group) - numbers.keys() if numbers else ():  # counted since
                del group[name]
            group.update(numbers)
            for parameter in [p for p in group["params"] if p in names]:
                self.inner.state.pop(parameter, None)
                if names[parameter] in states:
                    self.inner.state[parameter] = _to_device(states[names[parameter]], parameter, group)


def _number(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)


def _numbers(group: Mapping[str, Any]) -> set[str]:
    """Name the numbers of a parameter group but its rates, which follow from the schedule."""
    return {n for n, v in group.items() if type(v) in (int, float) and n not in ("lr", "peak")}


def _adam_eps(parameters: Iterable[nn.Parameter], second_beta: float) -> float:
    """Return Adam's epsilon: torch's own, but for float16, where it and small second moments would be 0.

    A gradient g below sqrt(2^-25 / (1 - beta)) leaves the moment (1 - beta) g² at 0. With that bound as
    epsilon, its step g / epsilon is at most that of any other gradient.
    """
    half = any(p.dtype is torch.float16 for p in parameters)
    return max(1e-8, (2.0**-25 / (1.0 - second_beta)) ** 0.5) if half else 1e-8


def _merge_states(
    grown: GrownParameter, old: dict[str, Any], side: dict[str, Any], betas: Sequence[float]
) -> dict[str, Any]:
    """Return the optimizer state of a parameter that got wider.

    New entries without a state get the mean second moment of the others: with 0 they would step too far.
    """
    # Of optimizers with three betas, AdEMAMix decays the squares by the second and Adan by the third.
    # The larger one makes the moment larger if anything, and so the first steps of new units smaller.
    decays = {"exp_avg": betas[0], "exp_avg_sq": max(betas[1:], default=0.0)}
    state = dict(old or side)
    for key in {*old, *side}:
        first, second = (
            value if isinstance(value := held.get(key), Tensor) and value.shape == parameter.shape else None
            for held, parameter in ((old, grown.old), (side, grown.side))
        )
        if first is None and second is None:
            continue
        if first is None:
            first = torch.zeros_like(grown.old)
        if second is None:
            second = torch.zeros_like(grown.side)
            if key == "exp_avg_sq":
                second += first.mean()
        elif key in decays and old and "step" in old and "step" in side:
            second = second * moment_scale(decays[key], float(old["step"]), float(side["step"]))
        state[key] = merge_units(first, second, grown.axis, grown.positions)
    return state


def _to_device(state: dict[str, Any], parameter: nn.Parameter, group: Mapping[str, Any]) -> dict[str, Any]:
    """Move tensors that are shaped like their parameter to its device. Step counts stay on the CPU, where
    torch keeps them, except for optimizers that step on the device alone."""
    on_device = group.get("fused") or group.get("capturable")
    return {
        key: value.to(parameter.device)
        if isinstance(value, Tensor) and (on_device or value.shape == parameter.shape)
        else value
        for key, value in state.items()
    }
