"""What is asked for: a model, its data, and how it is to grow."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import distributed, nn

from esper.controllers import make_controller
from esper.growing.batches import UserStep
from esper.growing.settings import GrowSettings, settings_of
from esper.tamiyo.controller import Controller
from esper.tamiyo.scripted import Static
from esper.utils.devices import ANY, choose_device
from esper.utils.errors import UserError, one_line, raised_at
from esper.utils.launch import StopRequest

ModelOrMaker = nn.Module | Callable[[], nn.Module]
STATIC = "static"  # the controller that never grows anything
# By `benchmarks.when_to_grow`, at equal compute, doubling hidden units loses 3.0 ± 2.8 points to plain
# training, and every other controller loses more.
NO_CONTROLLER = (
    "nothing was grown, because no controller was named and growth often loses to plain training at equal "
    "compute; ask for it with controller='schedule:widen_full@0.1'"
)
NOT_TRAINED_FOR = (
    "{} does not grow here, because it was trained on hosts of esper and not on models of your own; "
    "force=True lets it act all the same"
)
_WRAPPERS = ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "FSDPModule")
_OF_THE_GROWTH = ("on_epoch", "patience", "time_limit")  # settings that end it, or tell of it


@dataclass(frozen=True)
class Request:
    """The arguments of `esper.grow`, checked."""

    model: ModelOrMaker
    train: Any
    val: Any
    slots: Sequence[str | int] | None = None
    controller: str | Controller | None = None  # None: nothing grows
    epochs: int = 30
    budget: int | None = None
    step: UserStep | None = None
    baseline: bool = False
    force: bool = False  # a controller acts outside of the conditions that it was trained in, too
    given: Mapping[str, Any] = field(default_factory=dict)  # settings as they were given
    stop: StopRequest = field(default_factory=StopRequest)  # whether somebody asked for an end

    def __post_init__(self) -> None:
        check_one_process()
        if isinstance(self.epochs, bool) or not isinstance(self.epochs, int) or self.epochs < 1:
            raise UserError(f"epochs is {self.epochs!r}; give a whole number, at least 1")
        if self.budget is not None and not _is_count(self.budget):
            raise UserError(
                f"budget is {self.budget!r}; give a whole number of parameters, at least 1, or None for no "
                "limit"
            )
        if not isinstance(self.baseline, bool):
            raise UserError(f"baseline is {self.baseline!r}; give True or False")
        if self.step is not None and not callable(self.step):
            raise UserError(
                f"step is a {type(self.step).__name__}; give a function (model, batch) → loss, score"
            )
        self.device  # noqa: B018 (an unknown setting or device is refused now)

    @cached_property
    def settings(self) -> GrowSettings:
        """The settings, checked."""
        return settings_of(self.given)

    @cached_property
    def device(self) -> torch.device:
        """Where to train."""
        return choose_device(self.settings.device, kinds=ANY)

    def choose_controller(self, device: torch.device) -> tuple[Controller, str, tuple[str, ...]]:
        """Return whoever decides, its name, and why nothing grows where that is so, in one sentence."""
        if self.controller is None:
            return Static(), STATIC, (NO_CONTROLLER,)
        decider = make_controller(self.controller, device)
        name = self.controller if isinstance(self.controller, str) else type(self.controller).__qualname__
        if getattr(decider, "conditions", None) is not None and not self.force:
            return Static(), STATIC, (NOT_TRAINED_FOR.format(name),)
        return decider, name, ()

    def ungrown(self, epochs: int) -> Request:
        """Return the same request without growth, for so many epochs and without callbacks."""
        given = {key: value for key, value in self.given.items() if key not in _OF_THE_GROWTH}
        return replace(
            self,
            epochs=epochs,
            controller=STATIC,
            budget=None,
            given={**given, "progress": False},
        )

    def build_model(self) -> nn.Module:
        """The model itself, or one that the given function makes."""
        if isinstance(self.model, nn.Module):
            return checked_model(self.model)
        try:
            made = self.model() if callable(self.model) else self.model
        except TypeError as error:
            raise UserError(
                f"model cannot be made ({one_line(error)}{raised_at(error)}); give an nn.Module, or a "
                "function without arguments that makes one"
            ) from error
        return checked_model(made, "an nn.Module, or a function that makes one")


def _is_count(value: Any) -> bool:
    """Tell whether a value is a whole number from 1 on, such as 3 or 1e6."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer):
        return False
    return bool(value >= 1 and value % 1 == 0)


def check_one_process() -> None:
    """Raise a UserError where several processes train together: every one would plant seeds of its own."""
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        raise several_processes(distributed.get_world_size())


def several_processes(count: int) -> UserError:
    """The sentence for a training in several processes, or on several devices."""
    return UserError(
        f"{count} processes or devices train together, and the seeds of each would differ; grow in one "
        "process on one device, without DDP or FSDP"
    )


def checked_model(model: Any, allowed: str = "an nn.Module") -> nn.Module:
    """Return a model that can grow; raises a UserError in one sentence for any other."""
    if not isinstance(model, nn.Module):
        raise UserError(f"model is a {type(model).__name__}; give {allowed}")
    for name, module in model.named_modules():
        said = f"{f'the submodule {name}' if name else 'model'} is a {type(module).__name__}"
        if isinstance(module, torch.jit.ScriptModule):
            raise UserError(
                f"{said}, which takes no hooks; give the module that it was scripted or traced from"
            )
        if any(kind.__name__ in _WRAPPERS for kind in type(module).__mro__):
            raise UserError(
                f"{said}, wrapped for several processes or devices, where the seeds of each would differ; "
                "give the module inside, and grow in one process"
            )
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_meta:
            raise UserError(
                f"{name} of {type(model).__name__} is on the meta device and has no values; make it by "
                "model.to_empty(device='cpu') and load its weights first"
            )
    return model
