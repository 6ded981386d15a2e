"""The settings of a growth, and the controller that they choose and limit."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeVar

import torch
from pydantic import ConfigDict, Field, ValidationError
from torch import Tensor

from esper.controllers import make_controller
from esper.lifecycle.actions import Actions, Blueprint, Head, Op, Style, has_gate
from esper.lifecycle.config import LifecycleConfig
from esper.lifecycle.legality import grows_block
from esper.lifecycle.slot_states import SlotStates
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
NO_CONTROLLER = (
    "nothing was grown, because no controller was named and growth often loses to plain training at equal "
    "compute; ask for it with controller='schedule:widen_full@0.1'"
)
NOT_TRAINED_FOR = (
    "{} does not grow here, because it was trained on hosts of esper and not on models of your own; "
    "force=True lets it act all the same"
)
PAST_ONLY = {Blueprint.ATTENTION, Blueprint.FLEX_ATTENTION}  # in a transformer no position sees a later one
_NO_LIMIT = 1 << 60  # parameters


class GrowSettings(Config):
    """The settings of `esper.grow` and `esper.Grower`; `training` holds those of `PopulationConfig`."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    objective: Literal["classification", "regression", "language"] | None = Field(
        default=None,
        description="what the targets are; if left out, whole numbers and one-hot rows are classes, other "
        "decimals are a regression",
    )
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
    topology: Literal["cnn", "mlp", "transformer"] | None = Field(
        default=None, description="what the activations are; found out if left out"
    )
    progress: bool = Field(default=True, description="whether a progress bar is shown in a terminal")
    lifecycle: LifecycleConfig | None = Field(
        default=None, description="the rules of growth; dwell times that fit the epochs if left out"
    )
    accumulate: int = Field(default=1, ge=1, description="batches that make one step of the optimizer")
    make_optimizer: Callable[..., Any] | None = Field(
        default=None, description="(parameter groups) → the optimizer to train with; AdamW if left out"
    )
    make_scheduler: Callable[..., Any] | None = Field(
        default=None,
        description="(an optimizer at the peak rate) → a scheduler of torch's, which is stepped after "
        "every step of the optimizer; all rates follow it in proportion",
    )
    patience: int | None = Field(
        default=None, ge=1, description="end after this many epochs without a better validation score"
    )
    time_limit: float | None = Field(
        default=None, gt=0, description="end with the first epoch after this many seconds"
    )
    on_epoch: Callable[..., Any] | None = Field(
        default=None, description="called after every epoch with the numbers of it, a dictionary"
    )
    training: Mapping[str, Any] = Field(default_factory=dict, description="settings of PopulationConfig")


OWN_SETTINGS = tuple(name for name in GrowSettings.model_fields if name != "training")
# The settings of `PopulationConfig` that are about one model, not about rows.
SETTINGS = (
    *OWN_SETTINGS,
    *("batch_size", "batches_per_epoch", "optimizer", "host_lr", "seed_lr", "weight_decay", "momentum"),
    *("second_beta", "clip_norm", "schedule", "warmup", "decay", "precision", "folds", "validation_samples"),
    "validation_batch",
)
# Arguments of earlier versions, and what to do without them.
REMOVED = {
    "engine": "every model is trained as it is; leave engine out",
    "members": "one model is grown at a time; leave members out, and call esper.grow once for each seed",
    "control": "a wider model can be trained by a call of its own; leave control out",
}


def check_settings(
    given: Mapping[str, Any], allowed: Collection[str] = SETTINGS, where: str = "esper.grow"
) -> GrowSettings:
    """Return settings from keyword arguments: those of `GrowSettings` and of `PopulationConfig` together.

    Raises a UserError for a key that is not in `allowed`, which has no effect in `where`, and for a value
    that does not fit its key.
    """
    given = with_new_spellings(given)
    known = (*OWN_SETTINGS, *PopulationConfig.model_fields)
    for key in (key for key in given if key not in allowed):
        if key in REMOVED:
            raise UserError(f"{key} is {given[key]!r}, and {where} no longer takes it: {REMOVED[key]}")
        problem = f"{key} has no effect in {where}" if key in known else f"there is no setting {key!r}"
        raise UserError(f"{problem}; allowed are {', '.join(allowed)}")
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
    """A controller that is never offered a blueprint that is not allowed, nor a seed that breaks the budget.

    A slot stays open for GERMINATE while the cheapest seed fits there; a blueprint stays open while it fits
    in every slot that is open; the gated style stays open while its gate fits as well. So no combination of
    open choices breaks the budget. The budget counts the parameters of the seeds that live at one time.
    """

    def __init__(
        self,
        controller: Controller,
        bodies: Bodies,
        budget: int | None = None,
        allowed: Sequence[str] | None = None,
        refusals: Callable[[Blueprint], Sequence[str]] = lambda blueprint: (),
    ):
        """allowed: blueprints by name. If left out, all that fit except those that see only the past, because
        a model need not be causal. refusals: by blueprint, why slots do not take it.

        Raises a UserError for limits that leave nothing to grow, and for a schedule that no slot can follow.
        """
        self.controller, self.bodies = controller, bodies
        self.budget = _NO_LIMIT if budget is None else budget
        self.uses_metrics = getattr(controller, "uses_metrics", True)  # a user's own may not have it
        self._refusals = refusals
        fits = bodies.growable()[0].any(dim=0).tolist()
        fitting = {b.name: b for b in Blueprint if fits[b]}
        shut = PAST_ONLY if bodies.topology == "transformer" else set()
        names = [b.name for b in fitting.values() if b not in shut] if allowed is None else list(allowed)
        if not names or not set(names) <= set(fitting):
            known = ", ".join(fitting)
            raise UserError(
                f"blueprints are {names}; in a {bodies.topology} allowed are {known}, at least one"
            )
        self._allowed = torch.tensor([b.name in names for b in Blueprint], device=bodies.device)
        cheapest = int(self._prices()[0].masked_fill(~self._choosable(), 2 * _NO_LIMIT).min())
        if self.budget < cheapest:
            raise UserError(
                f"budget is {self.budget} parameters and the smallest seed that fits this model has "
                f"{cheapest}; give a budget of at least {cheapest}, or None for no limit"
            )
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

    # Layers and lists of a live model may grow, and with them the price of a seed: so nothing is kept.

    def _prices(self) -> tuple[Tensor, Tensor]:
        """Count the parameters of seeds, and of gates.  # [S, blueprints], [S] int64"""
        device = self.bodies.device
        return self.bodies.seed_parameters().to(device), self.bodies.gate_parameters().to(device)

    def _choosable(self) -> Tensor:
        """Return what is allowed and fits each slot now.  # [S, blueprints] bool"""
        return self.bodies.growable()[0] & self._allowed

    def parameters_left(self, slots: SlotStates) -> Tensor:
        """Return the parameters that growth may still add.  # [N]"""
        return self.budget - (self.bodies.parameter_counts(slots) - self.bodies.host_parameters)

    def begin(self, info: EpisodeInfo) -> None:
        """Begin an episode."""
        self.controller.begin(info)

    def decide(self, observation: Observation, masks: ActionMasks, step: int) -> Actions | list[Actions]:
        """Return the controller's actions, less what is not allowed."""
        asked = self.controller.decide(observation, self.limit_masks(observation.slots, masks), step)
        allowed = self.limit_actions(observation.slots, [asked] if isinstance(asked, Actions) else asked)
        return allowed[0] if isinstance(asked, Actions) else allowed

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

    def limit_actions(self, slots: SlotStates, asked: Sequence[Actions]) -> list[Actions]:
        """Return the actions of one decision, with WAIT for seeds that are not allowed or break the budget,
        whatever a controller that reads no masks asked for.

        Layers that get wider one after the other may have new weights between new units as well, at most as
        many as the later one brings: so that one counts twice.
        """
        left, found = self.parameters_left(slots), []  # [N]
        again = torch.zeros_like(left, dtype=torch.bool)  # whether an action before this one widens something
        (seeds, gates), choosable = self._prices(), self._choosable()
        for actions in asked:
            slot, blueprint = actions[Head.SLOT], actions[Head.BLUEPRINT]
            plants = actions[Head.OP] == Op.GERMINATE  # [N]
            grows = grows_block(blueprint)
            price = seeds[slot, blueprint] * (1 + (grows & again).long())
            price = price + has_gate(actions[Head.STYLE]) * gates[slot] * ~grows
            fits = choosable[slot, blueprint] & (price <= left)
            left = left - torch.where(plants & fits, price, 0)
            again = again | (plants & fits & grows)
            waits = (plants & ~fits).unsqueeze(1)
            found.append(Actions(torch.where(waits, torch.zeros_like(actions.choices), actions.choices)))
        return found

    def limit_masks(self, slots: SlotStates, masks: ActionMasks) -> ActionMasks:
        """Return the masks without what the budget does not allow."""
        left = self.parameters_left(slots)  # [N]
        (seeds, gates), choosable = self._prices(), self._choosable()
        seeds = seeds.masked_fill(~choosable, 2 * _NO_LIMIT)
        room = left.view(-1, 1, 1)
        fits = seeds.unsqueeze(0) <= room  # [N, S, blueprints]
        open_slots = masks.slot_by_op[:, Op.GERMINATE] & fits.any(dim=2)  # [N, S]
        absent = ~open_slots.unsqueeze(2) | ~choosable
        blueprints = masks.blueprint & (fits | absent).all(dim=1) & (~absent).any(dim=1)
        open_slots = open_slots & (blueprints.unsqueeze(1) & choosable).any(dim=2)
        any_open = open_slots.any(dim=1, keepdim=True)
        blueprints = torch.where(any_open, blueprints, masks.blueprint & choosable.any(dim=0))
        with_gate = (seeds + gates.unsqueeze(1)).unsqueeze(0) <= room
        gate_fits = (with_gate | absent | ~blueprints.unsqueeze(1)).flatten(1).all(dim=1, keepdim=True)
        restyled = gates.unsqueeze(0) <= left.unsqueeze(1)  # a living seed may be given a gate
        restyled = restyled | ~masks.slot_by_op[:, Op.SET_ALPHA_TARGET]
        gate_fits = gate_fits & restyled.all(dim=1, keepdim=True)
        styles = masks.style & (~has_gate(torch.arange(len(Style), device=left.device)) | gate_fits)
        by_op = masks.slot_by_op.clone()
        by_op[:, Op.GERMINATE] = open_slots
        return replace(masks, blueprint=blueprints, style=styles, slot_by_op=by_op, op=by_op.any(dim=2))
