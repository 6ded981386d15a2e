"""The settings of a growth, and the controller that they choose and limit."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeVar

import torch
from pydantic import ConfigDict, Field, ValidationError
from torch import Tensor

from esper.controllers import make_controller
from esper.lifecycle.actions import Actions, Blueprint, Head, Op
from esper.lifecycle.config import LifecycleConfig
from esper.population.config import PopulationConfig
from esper.simic.bodies import Bodies
from esper.tamiyo.controller import Controller, EpisodeInfo
from esper.tamiyo.policy.action_masks import ActionMasks
from esper.tamiyo.policy.features import Observation
from esper.tamiyo.schedule import Schedule
from esper.tamiyo.scripted import Static
from esper.utils.errors import UserError
from esper.utils.settings import Config, describe_problem, with_new_spellings

AnyConfig = TypeVar("AnyConfig", bound=Config)
BATCH_SIZE = 64  # where neither a setting nor a loader gives another
STATIC = "static"  # the controller that never grows anything
# By `benchmarks.when_to_grow`, at equal compute, doubling hidden units loses 3.0 ± 2.8 points to plain
# training, and every other controller loses more.
INTO = "into"  # in place of a controller: grow into the model, also where it is not expected to pay
BEYOND = "schedule:widen_full@0.1"  # what `beyond` stands for
NO_CONTROLLER = (
    "nothing was grown, because no controller was named and growth often loses to plain training at equal "
    "compute; ask for it with controller='schedule:widen_full@0.1'"
)
NOT_TRAINED_FOR = (
    "{} does not grow here, because it was trained on hosts of esper and not on models of your own; "
    "force=True lets it act all the same"
)


class GrowSettings(Config):
    """The settings of `esper.grow`; `training` holds those of `PopulationConfig`."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    loss: Callable[..., Any] | None = Field(
        default=None, description="(outputs, targets) of a batch → one number to lower"
    )
    metric: Callable[..., Any] | None = Field(
        default=None, description="(outputs, targets) of all validation samples → one number to raise"
    )
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
    make_optimizer: Callable[..., Any] | None = Field(
        default=None, description="(parameter groups) → the optimizer to train with; AdamW if left out"
    )
    on_epoch: Callable[..., Any] | None = Field(
        default=None, description="called after every epoch with the numbers of it, a dictionary"
    )
    sinks: tuple[Literal["tensorboard", "wandb"], ...] = Field(
        default=(), description="where metrics go beside the folder `out`"
    )
    training: Mapping[str, Any] = Field(default_factory=dict, description="settings of PopulationConfig")


OWN_SETTINGS = tuple(name for name in GrowSettings.model_fields if name != "training")
# The settings of `PopulationConfig` that are about one model, not about rows.
SETTINGS = (
    *OWN_SETTINGS,
    *("batch_size", "batches_per_epoch", "optimizer", "host_lr", "seed_lr", "weight_decay", "momentum"),
    *("second_beta", "clip_norm", "schedule", "warmup", "decay", "precision", "folds", "validation_samples"),
)


def check_settings(given: Mapping[str, Any]) -> GrowSettings:
    """Return settings from keyword arguments: those of `GrowSettings` and of `PopulationConfig` together.

    Raises a UserError for a key that has no effect in `esper.grow`, and for a value that does not fit it.
    """
    given = with_new_spellings(given)
    for key in (key for key in given if key not in SETTINGS):
        known = key in PopulationConfig.model_fields
        problem = f"{key} has no effect in esper.grow" if known else f"there is no setting {key!r}"
        raise UserError(f"{problem}; allowed are {', '.join(SETTINGS)}")
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
        raise UserError(
            f"{problem}; name some of {', '.join(Blueprint.__members__)}, or leave blueprints out"
        )
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


def choose_controller(asked: str | Controller | None, force: bool) -> tuple[Controller, str, tuple[str, ...]]:
    """Return the controller, its name and, where nothing grows, one sentence that tells why.

    force: a learned controller acts outside of the conditions that it was trained in.
    """
    if asked is None:
        return Static(), STATIC, (NO_CONTROLLER,)
    controller = make_controller(asked, torch.device("cpu"))
    name = asked if isinstance(asked, str) else type(asked).__qualname__
    if getattr(controller, "conditions", None) is not None and not force:
        return Static(), STATIC, (NOT_TRAINED_FOR.format(name),)
    return controller, name, ()


class LimitedController:
    """A controller that is offered, and given, only blueprints that are allowed and fit.

    A slot is open for GERMINATE while an allowed blueprint fits there, a blueprint while a slot for it is.
    """

    def __init__(
        self,
        controller: Controller,
        bodies: Bodies,
        allowed: Sequence[str] | None = None,
        refusals: Callable[[Blueprint], Sequence[str]] = lambda blueprint: (),
    ):
        """allowed: blueprints by name; all that fit if left out. refusals: by blueprint, why slots do not
        take it.

        Raises a UserError for limits that leave nothing to grow, and for a schedule that no slot can follow.
        """
        self.controller, self.bodies = controller, bodies
        self.uses_metrics = getattr(controller, "uses_metrics", True)  # a user's own may not have it
        self._refusals = refusals
        fits = bodies.growable()[0].any(dim=0).tolist()
        fitting = [b.name for b in Blueprint if fits[b]]
        names = list(fitting if allowed is None else allowed)
        if not names or not set(names) <= set(fitting):
            known = ", ".join(fitting)
            raise UserError(
                f"blueprints are {names}; in a {bodies.topology} allowed are {known}, at least one"
            )
        self._allowed = torch.tensor([b.name in names for b in Blueprint], device=bodies.device)
        events = controller.events if isinstance(controller, Schedule) else []
        asked = list(dict.fromkeys(event.blueprint for event in events))
        missing = [b for b in asked if not bool(self._choosable()[:, b].any())]
        if missing and missing == asked:
            listed = ", ".join(b.name for b in missing)
            raise UserError(f"the schedule asks for {listed}, {self._why_not(missing[0])}")
        self.remarks = tuple(f"{b.name} was asked for, {self._why_not(b)}" for b in missing)

    def _why_not(self, blueprint: Blueprint) -> str:
        taken = [b.name for b in Blueprint if bool(self._choosable()[:, b].any())]
        reasons = "; ".join(self._refusals(blueprint)) or f"{blueprint.name} is not for such a model"
        return f"which no slot of this model takes: {reasons}; here a slot takes {', '.join(taken)}"

    def _choosable(self) -> Tensor:
        """Return what is allowed and fits each slot now.  # [S, blueprints] bool"""
        return self.bodies.growable()[0] & self._allowed

    def begin(self, info: EpisodeInfo) -> None:
        """Begin an episode."""
        self.controller.begin(info)

    def decide(self, observation: Observation, masks: ActionMasks, step: int) -> Actions | list[Actions]:
        """Return the controller's actions, less what is not allowed."""
        asked = self.controller.decide(observation, self.limit_masks(masks), step)
        if isinstance(asked, Actions):
            return self.limit_actions(asked)
        return [self.limit_actions(actions) for actions in asked]

    def state_dict(self) -> dict[str, Tensor]:
        """Return the controller's state; nothing of a user's own that has no such method."""
        return self.controller.state_dict() if hasattr(self.controller, "state_dict") else {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a saved state; raises a UserError for a user's controller that cannot."""
        if not hasattr(self.controller, "load_state_dict"):
            name = type(self.controller).__name__
            raise UserError(
                f"the run was made with a {name}, which has no load_state_dict and cannot be resumed; give "
                "it state_dict() and load_state_dict(state), which keep what it remembers as tensors"
            )
        self.controller.load_state_dict(state)

    def limit_actions(self, actions: Actions) -> Actions:
        """Return actions with WAIT for seeds that are not allowed: some controllers read no masks."""
        plants = actions[Head.OP] == Op.GERMINATE  # [N]
        fits = self._choosable()[actions[Head.SLOT], actions[Head.BLUEPRINT]]
        waits = (plants & ~fits).unsqueeze(1)
        return Actions(torch.where(waits, torch.zeros_like(actions.choices), actions.choices))

    def limit_masks(self, masks: ActionMasks) -> ActionMasks:
        """Return the masks without what is not allowed or does not fit."""
        choosable = self._choosable()
        open_slots = masks.slot_by_op[:, Op.GERMINATE] & choosable.any(dim=1)  # [N, S]
        blueprints = masks.blueprint & (open_slots.unsqueeze(2) & choosable).any(dim=1)
        open_slots = open_slots & (blueprints.unsqueeze(1) & choosable).any(dim=2)
        # Where no slot is open the head is not read; it must not be empty all the same.
        any_open = open_slots.any(dim=1, keepdim=True)
        blueprints = torch.where(any_open, blueprints, masks.blueprint & choosable.any(dim=0))
        by_op = masks.slot_by_op.clone()
        by_op[:, Op.GERMINATE] = open_slots
        return replace(masks, blueprint=blueprints, slot_by_op=by_op, op=by_op.any(dim=2))
