"""The settings of a growth, and the controller that they choose and limit."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from pydantic import ConfigDict, Field, ValidationError
from torch import Tensor

from esper.controllers import make_controller
from esper.lifecycle.actions import Actions, Blueprint
from esper.lifecycle.config import LifecycleConfig
from esper.population.config import PopulationConfig
from esper.tamiyo.controller import Controller, EpisodeInfo
from esper.tamiyo.policy.action_masks import ActionMasks
from esper.tamiyo.policy.features import Observation
from esper.tamiyo.scripted import Static
from esper.utils.errors import UserError
from esper.utils.settings import AnyConfig, Config, describe_problem

Function = Callable[..., Any] | None
BATCH_SIZE = 64  # where neither a setting nor a loader gives another
STATIC = "static"  # the controller that never grows anything
NOT_TRAINED_FOR = (
    "{} does not act here, because it was trained on hosts of esper and not on models of your own; "
    "force=True lets it act all the same"
)


class GrowSettings(Config):
    """The settings of `esper.grow`; `training` holds those of `PopulationConfig`."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    loss: Function = Field(None, description="(outputs, targets) of a batch → one number to lower")
    metric: Function = Field(None, description="the same of all validation samples → one number to raise")
    blueprints: tuple[str, ...] | None = Field(
        default=None, description="names of the blueprints that may grow; all that fit the model if left out"
    )
    lr: float = Field(default=3e-3, gt=0, description="peak learning rate of the model and of seeds")
    seed: int = Field(default=0, ge=0, description="the same seed gives the same network")
    device: str = Field(default="cpu", description="where to train: auto, cpu, cuda, cuda:1, mps ...")
    threads: int | None = Field(
        default=None,
        ge=1,
        le=256,
        description="CPU threads; if left out 1 for a small model, unless OMP_NUM_THREADS or "
        "torch.set_num_threads gave another number than torch's own",
    )
    progress: bool = Field(default=True, description="whether a progress bar is shown in a terminal")
    lifecycle: LifecycleConfig | None = Field(
        default=None, description="the rules of growth; dwell times that fit the epochs if left out"
    )
    accumulate: int = Field(default=1, ge=1, description="batches that make one step of the optimizer")
    make_optimizer: Function = Field(None, description="(parameter groups) → optimizer; AdamW if left out")
    on_epoch: Function = Field(None, description="called after every epoch with its numbers, a dictionary")
    sinks: tuple[Literal["tensorboard", "wandb"], ...] = Field((), description="also write metrics here")
    training: Mapping[str, Any] = Field(default_factory=dict, description="settings of PopulationConfig")


OWN_SETTINGS = tuple(name for name in GrowSettings.model_fields if name != "training")
# The settings of `PopulationConfig` that are about one model, not about rows.
SETTINGS = (
    *OWN_SETTINGS,
    *("batch_size", "batches_per_epoch", "optimizer", "host_lr", "seed_lr", "weight_decay", "momentum"),
    *("second_beta", "clip_norm", "schedule", "warmup", "decay", "precision", "folds", "validation_samples"),
)

# Of `esper.grow` itself, for hints.
ARGUMENTS = ("train", "val", "slots", "controller", "epochs", "step", "out", "baseline", "equal_compute")


def check_settings(given: Mapping[str, Any]) -> GrowSettings:
    """Return settings from keyword arguments: those of `GrowSettings` and of `PopulationConfig` together.

    Raises a UserError for a key that has no effect in `esper.grow`, and for a value that does not fit it.
    """
    for key in (key for key in given if key not in SETTINGS):
        known = key in PopulationConfig.model_fields
        problem = f"{key} has no effect in esper.grow" if known else f"there is no setting {key!r}"
        near = [] if known else difflib.get_close_matches(key, (*SETTINGS, *ARGUMENTS), n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"allowed are {', '.join(SETTINGS)}"
        raise UserError(f"{problem}; {hint}")
    training = {key: value for key, value in given.items() if key not in OWN_SETTINGS}
    _validate(PopulationConfig, training)
    own = {key: value for key, value in given.items() if key in OWN_SETTINGS}
    if "device" in own:
        own["device"] = str(own["device"])  # a torch.device too
    for key in ("loss", "metric", "on_epoch"):
        if isinstance(own.get(key), type):
            name = own[key].__name__
            raise UserError(f"{key} is the class {name}; give an instance of it: {key}={name}()")
    checked = _validate(GrowSettings, {**own, "training": training})
    unknown = [name for name in checked.blueprints or () if name not in Blueprint.__members__]
    if unknown or checked.blueprints == ():
        problem = f"{unknown[0]!r} is no blueprint" if unknown else "blueprints is empty"
        raise UserError(f"{problem}; name some of {', '.join(Blueprint.__members__)}, or leave it out")
    if "decay" in training and training.get("schedule") != "flat":
        warnings.warn("decay is for schedule='flat' and changes nothing here", stacklevel=2)
    return checked


def _validate(kind: type[AnyConfig], given: dict[str, Any]) -> AnyConfig:
    try:
        return kind(**given)
    except ValidationError as error:
        problem = error.errors()[0]
        about = kind.model_fields[str(problem["loc"][0])].description if problem["loc"] else None
        note = f" ({problem['loc'][0]}: {about})" if about else ""
        raise UserError(describe_problem(kind, given, dict(problem)) + note) from None


# ---- the controller ------------------------------------------------------------------------------------


def choose_controller(asked: str | Controller | None, force: bool) -> tuple[Controller, str, list[str]]:
    """Return the controller, its name and why nothing grows, if so; force: learned ones act everywhere."""
    if asked is None:
        return Static(), STATIC, []
    controller = make_controller(asked, torch.device("cpu"))
    name = asked if isinstance(asked, str) else type(asked).__qualname__
    if getattr(controller, "conditions", None) is not None and not force:
        return Static(), STATIC, [NOT_TRAINED_FOR.format(name)]
    return controller, name, []


class UserController(Controller):
    """A controller of the user's, which may lack all methods of `Controller` but `begin` and `decide`."""

    def __init__(self, controller: Any):
        self.controller = controller

    @property
    def uses_metrics(self) -> bool:
        return bool(getattr(self.controller, "uses_metrics", True))

    def begin(self, info: EpisodeInfo) -> None:
        self.controller.begin(info)

    def decide(self, observation: Observation, masks: ActionMasks, step: int) -> Actions | list[Actions]:
        return self.controller.decide(observation, masks, step)

    def state_dict(self) -> dict[str, Tensor]:
        return self.controller.state_dict() if hasattr(self.controller, "state_dict") else {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a saved state; raises a UserError for a controller that cannot."""
        if not hasattr(self.controller, "load_state_dict"):
            name = type(self.controller).__name__
            give = "state_dict() and load_state_dict(state), which keep what it remembers as tensors"
            raise UserError(f"the run was made with a {name}, which cannot be resumed; give it {give}")
        self.controller.load_state_dict(state)
