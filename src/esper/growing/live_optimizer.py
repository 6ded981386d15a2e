"""The optimizer of a living model: its own weights, those of seeds that come and go, and their rates."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from esper.growing.places import trained
from esper.growing.settings import GrowSettings
from esper.population.config import PopulationConfig
from esper.population.schedule import rate_share
from esper.utils.errors import UserError

if TYPE_CHECKING:
    from esper.growing.live_hooks import Fold
    from esper.growing.widening import Joined

NUMBER = "number:"  # before the name of a state that is a number and no tensor


class LiveOptimizer:
    """Moves the model and its seeds: an optimizer made here, whose rate follows the schedule, or the user's.

    Parameters with more than one axis are decayed, norms and biases are not. A seed enters with a state of
    its own, the others keep theirs. In the user's optimizer a new parameter joins the group of the parameter
    that it stands beside or, where there is none, the group that holds most parameters of its kind. There,
    seeds that learn in isolation have optimizers of their own, in `alone`.
    """

    def __init__(
        self, model: nn.Module, settings: GrowSettings, config: PopulationConfig, given: Optimizer | None
    ):
        self.config, self.owned = config, given is None
        self.host, self.eps = trained(model), adam_eps(model.parameters(), config.second_beta)
        self.rule = self._made(settings) if given is None else given
        held = {id(p) for group in self.rule.param_groups for p in group["params"]}
        if self.host and not any(id(p) in held for p in self.host):
            raise UserError(
                f"the {type(self.rule).__name__} holds none of the {len(self.host)} parameters of the model; "
                "give it model.parameters(), or the groups that make_optimizer is called with"
            )
        self.seeds: dict[int, list[nn.Parameter]] = {}  # by slot
        self.alone: dict[int, Optimizer] = {}  # by slot

    def _made(self, settings: GrowSettings) -> Optimizer:
        config = self.config
        nothing = nn.Parameter(torch.zeros(0))  # an optimizer of a frozen model waits for its seeds
        groups = self._groups(self.host or [nothing], config.host_lr)
        if settings.make_optimizer is not None:
            made = checked_optimizer("make_optimizer gives", settings.make_optimizer(groups))
            for group in made.param_groups:
                group["peak"] = group["lr"]
            return made
        if config.optimizer == "sgd":
            return torch.optim.SGD(groups, config.host_lr, config.momentum)
        betas = (config.momentum, config.second_beta)
        return torch.optim.AdamW(groups, config.host_lr, betas, self.eps)

    def _groups(self, parameters: list[nn.Parameter], lr: float) -> list[dict[str, Any]]:
        decayed = [p for p in parameters if p.ndim > 1]
        plain = [p for p in parameters if p.ndim <= 1]
        pairs = ((decayed, self.config.weight_decay), (plain, 0.0))
        return [{"params": group, "weight_decay": decay, "peak": lr} for group, decay in pairs if group]

    @property
    def peak(self) -> float:
        """The highest rate of the model's first group."""
        return float(self.rule.param_groups[0].get("peak", self.config.host_lr))

    def set_share(self, share: float) -> None:
        """Every rate at this share of its peak; the user's own optimizer is left to its schedule."""
        for group in self.rule.param_groups if self.owned else []:
            group["lr"] = share * group["peak"]

    # ---- who is trained --------------------------------------------------------------------------------

    def take_in(
        self,
        k: int,
        parameters: Iterable[nn.Parameter],
        beside: Mapping[nn.Parameter, nn.Parameter] | None = None,
    ) -> None:
        """Train the seed of slot k from now on; one that is there already stays.

        beside: the model's own parameter that a new one stands beside, where there is one.
        """
        if k in self.seeds:
            return
        self.alone.pop(k, None)
        self.seeds[k] = list(parameters)
        if self.owned:
            for group in self._groups(self.seeds[k], self.config.seed_lr):
                self.rule.add_param_group({**group, "lr": self.config.seed_lr})
            return
        for parameter in self.seeds[k]:
            parameter.grad = None
            self._group_for(parameter, (beside or {}).get(parameter))["params"].append(parameter)

    def _group_for(self, parameter: nn.Parameter, beside: nn.Parameter | None) -> dict[str, Any]:
        """The user's group for a new parameter."""

        def alike(group: dict[str, Any]) -> int:
            if any(p is beside for p in group["params"]):
                return len(self.host) + 1
            return sum((p.ndim > 1) == (parameter.ndim > 1) for p in group["params"])

        return max(self.rule.param_groups, key=alike)

    def raise_alone(self, k: int, seed: nn.Module) -> Optimizer:
        """The optimizer of a seed that learns in isolation, beside the user's."""
        if k not in self.alone:
            own, config = list(seed.parameters()), self.config
            decay = config.weight_decay
            self.alone[k] = torch.optim.AdamW(own, config.seed_lr, eps=self.eps, weight_decay=decay)
        return self.alone[k]

    def let_go(self, k: int) -> None:
        """Forget the seed of slot k and its state."""
        self.alone.pop(k, None)
        gone = {id(p) for p in self.seeds.pop(k, [])}
        for group in self.rule.param_groups:
            for parameter in [p for p in group["params"] if id(p) in gone]:
                self.rule.state.pop(parameter, None)
            group["params"] = [p for p in group["params"] if id(p) not in gone]
        if self.owned:
            self.rule.param_groups = [group for group in self.rule.param_groups if group["params"]]

    def fold(self, k: int, fold: Fold) -> None:
        """The seed of slot k has become part of the model: wider parameters stand where the old ones stood.

        Moments come along; those of new units are brought to the step count of the old ones.
        """
        for joined in fold.joined:
            group = next(g for g in self.rule.param_groups if any(p is joined.old for p in g["params"]))
            old, beside = (self.rule.state.pop(p, {}) for p in (joined.old, joined.beside))
            self.rule.state[joined.new] = _joined_state(joined, old, beside, group.get("betas", (0.0, 0.0)))
            self._replace({joined.old: joined.new})
        for before, after in fold.moved:
            if before in self.rule.state:
                self.rule.state[after] = self.rule.state.pop(before)
        self._replace(dict(fold.moved))
        stays = {after for _, after in fold.moved}
        self.seeds[k] = [p for p in self.seeds[k] if p not in stays]
        self.let_go(k)

    def unfold(self, fold: Fold) -> None:
        """A fold was taken back: the parameters of before stand in their places, with no state yet."""
        for joined in reversed(fold.joined):
            self.rule.state.pop(joined.new, None)
            self._replace({joined.new: joined.old})
        self.seeds[fold.slot] = [after for _, after in fold.moved]
        self.let_go(fold.slot)

    def _replace(self, others: Mapping[nn.Parameter, nn.Parameter]) -> None:
        for group in self.rule.param_groups:
            group["params"] = [others.get(p, p) for p in group["params"]]

    def clip(self) -> Tensor:
        """Bound the gradients of the model and of each seed; the norm of the model's before.  # → []"""
        for parameters in self.seeds.values():
            nn.utils.clip_grad_norm_(parameters, self.config.clip_norm)
        return nn.utils.clip_grad_norm_(self.host, self.config.clip_norm).detach().float()

    # ---- saving ----------------------------------------------------------------------------------------

    def tensors(self, names: Mapping[nn.Parameter, str]) -> dict[str, Tensor]:
        """Moments, step counts and whatever else is remembered of these parameters. Views, not copies."""
        found: dict[str, Tensor] = {}
        for parameter, state in self._states():
            for key, value in state.items() if parameter in names else ():
                if isinstance(value, Tensor):
                    found[f"{names[parameter]}/{key}"] = value
                elif isinstance(value, int | float):
                    found[f"{names[parameter]}/{NUMBER}{key}"] = torch.tensor(value)
        return found

    def check_savable(self) -> None:
        """Raises a UserError for an optimizer that remembers something that is no tensor and no number."""
        for _, state in self._states():
            for key, value in state.items():
                if not isinstance(value, Tensor | int | float | None):
                    raise UserError(
                        f"{type(self.rule).__name__} keeps a {type(value).__name__} ({key}) for a parameter, "
                        "which cannot be saved; leave out out=, or choose an optimizer whose state is tensors"
                    )

    def _states(self) -> Iterator[tuple[Any, dict[str, Any]]]:
        for rule in (self.rule, *self.alone.values()):
            yield from rule.state.items()

    def restore(self, names: Mapping[nn.Parameter, str], saved: Mapping[str, Tensor]) -> None:
        """Remember what was saved of these parameters by `tensors`, and nothing else of them."""
        states: dict[str, dict[str, Any]] = {}
        for name, value in saved.items():
            owner, _, key = name.rpartition("/")
            number = key.startswith(NUMBER)
            states.setdefault(owner, {})[key.removeprefix(NUMBER)] = value.item() if number else value.clone()
        groups = [(rule, group) for rule in (self.rule, *self.alone.values()) for group in rule.param_groups]
        for rule, group in groups:
            for parameter in [p for p in group["params"] if p in names]:
                rule.state.pop(parameter, None)
                if names[parameter] in states:
                    rule.state[parameter] = _at_home(states[names[parameter]], parameter, group)


def adam_eps(parameters: Iterable[nn.Parameter], second_beta: float) -> float:
    """Adam's epsilon: torch's own but for float16, where it would be 0 and so would be small second moments.

    A gradient g below sqrt(2^-25 / (1 - beta)) leaves the moment (1 - beta) g² at 0. With that bound as
    epsilon, its step g / epsilon is at most that of any other gradient.
    """
    half = any(p.dtype is torch.float16 for p in parameters)
    return max(1e-8, (2.0**-25 / (1.0 - second_beta)) ** 0.5) if half else 1e-8


def checked_optimizer(said: str, given: Any) -> Optimizer:
    """What a user gave as an optimizer; raises a UserError, which begins with `said`, where it is none."""
    if isinstance(given, Optimizer):
        return given
    raise UserError(f"{said} {given!r}; it must be an optimizer of torch.optim over the model's parameters")


def _joined_state(
    joined: Joined, old: dict[str, Any], beside: dict[str, Any], betas: Sequence[float]
) -> dict[str, Any]:
    """What an optimizer remembers of a parameter that got wider.

    A moment that decays by b is the larger by 1 − b^n the more steps n it has seen. New entries that have
    seen none get the mean second moment of the others: with 0 their first step would be far too large.
    """
    # Of optimizers with three betas, AdEMAMix decays the squares by the second and Adan by the third.
    # The larger one makes the moment larger if anything, and so the first steps of new units smaller.
    decays = {"exp_avg": betas[0], "exp_avg_sq": max(betas[1:], default=0.0)}
    state = dict(old or beside)
    for key in {*old, *beside}:
        first, second = (
            value if isinstance(value := held.get(key), Tensor) and value.shape == parameter.shape else None
            for held, parameter in ((old, joined.old), (beside, joined.beside))
        )
        if first is None and second is None:
            continue
        if first is None:
            first = torch.zeros_like(joined.old)
        if second is None:
            second = torch.zeros_like(joined.beside)
            if key == "exp_avg_sq":
                second += first.mean()
        elif key in decays and old and "step" in old and "step" in beside:
            seen = [1.0 - decays[key] ** float(held["step"]) for held in (old, beside)]
            second = second * (seen[0] / max(seen[1], 1e-12))
        state[key] = joined.joint.join(first, second)
    return state


def _at_home(state: dict[str, Any], parameter: nn.Parameter, group: Mapping[str, Any]) -> dict[str, Any]:
    """A state whose tensors that are shaped like their parameter lie on its device. Counts of steps stay on
    the CPU, where torch keeps them but for optimizers that step on the device alone."""
    on_device = group.get("fused") or group.get("capturable")
    moments = {
        key: value
        for key, value in state.items()
        if isinstance(value, Tensor) and (on_device or value.shape == parameter.shape)
    }
    return state | {key: value.to(parameter.device) for key, value in moments.items()}


# ---- learning rates ------------------------------------------------------------------------------------


class Rates:
    """Which share of its peak every rate has now.

    A user's scheduler moves a stand-in with one rate, which begins at the peak; all groups follow in
    proportion, so that those of seeds, which come and go, need nothing of it. It is stepped after every step
    of the optimizer.
    """

    def __init__(self, make: Callable[..., Any] | None, config: PopulationConfig, peak: float):
        self._make, self._config, self._peak = make, config, peak
        self.steps = 0  # of the user's scheduler
        self.begin(0)

    def begin(self, steps: int) -> None:
        """A fresh scheduler that has been stepped that often; raises a UserError where it is none."""
        if self._make is None:
            return
        self._stand_in = torch.optim.SGD([nn.Parameter(torch.zeros(1))], self._peak)
        self._scheduler = self._make(self._stand_in)
        if not callable(getattr(self._scheduler, "step", None)):
            raise UserError(
                f"make_scheduler gives a {type(self._scheduler).__name__}; it must return a scheduler of "
                "torch.optim.lr_scheduler, or anything with step()"
            )
        self.steps = 0
        for _ in range(steps):
            self.step()

    def share(self, done: float) -> float:
        """Of the peak, when this share of the run is over."""
        if self._make is None:
            return float(rate_share(torch.tensor(done), self._config))
        return float(self._stand_in.param_groups[0]["lr"]) / self._peak

    def step(self) -> None:
        """The optimizer has made a step."""
        if self._make is not None:
            self._stand_in.step()
            self._scheduler.step()
            self.steps += 1


# ---- a user's optimizer, saved as if nothing had grown ----------------------------------------------------

# What `optimizer.state_dict()` gives has the same form whatever has grown, so that it loads into a fresh
# optimizer, before or after the seeds are planted again; the state of the seeds is for the `Grower` to save.
State = dict[str, Any]


def hide_seeds(optimizer: Optimizer, seeds: Callable[[], Collection[int]]) -> tuple[RemovableHandle, ...]:
    """Leave parameters out of what is saved, and put them back into what is loaded.

    seeds: gives the ids of those parameters. The handles take all this back.
    """
    return (
        optimizer.register_state_dict_post_hook(lambda rule, state: _without(rule, state, seeds())),
        optimizer.register_load_state_dict_pre_hook(lambda rule, state: _with(rule, state, seeds())),
    )


def _without(rule: Optimizer, state: State, seeds: Collection[int]) -> State:
    """A saved state, its parameters numbered anew."""
    groups, kept = [], dict[int, int]()  # from the old number to the new one
    for own, saved in zip(rule.param_groups, state["param_groups"], strict=True):
        pairs = zip(own["params"], saved["params"], strict=True)
        stay = [number for parameter, number in pairs if id(parameter) not in seeds]
        kept |= {number: len(kept) + k for k, number in enumerate(stay)}
        groups.append({**saved, "params": [kept[number] for number in stay]})
    states = {kept[number]: value for number, value in state["state"].items() if number in kept}
    return {**state, "state": states, "param_groups": groups}


def _with(rule: Optimizer, state: State, seeds: Collection[int]) -> State:
    """A state to be loaded, with what is remembered of the seeds now; as it is where it cannot fit."""
    own = [[p for p in group["params"] if id(p) not in seeds] for group in rule.param_groups]
    if [len(group) for group in own] != [len(group["params"]) for group in state["param_groups"]]:
        return state
    groups, states, count = [], dict[int, Any](), 0
    for group, saved in zip(rule.param_groups, state["param_groups"], strict=True):
        numbers = iter(saved["params"])
        for number, parameter in enumerate(group["params"], count):
            hidden = id(parameter) in seeds
            found = rule.state.get(parameter) if hidden else state["state"].get(next(numbers))
            if found:
                states[number] = found
        groups.append({**saved, "params": list(range(count, count + len(group["params"])))})
        count += len(group["params"])
    return {**state, "state": states, "param_groups": groups}
