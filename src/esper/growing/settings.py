"""How a model is grown: everything that has a sensible default."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal, TypeVar

from pydantic import ConfigDict, Field, ValidationError

from esper.lifecycle.actions import Blueprint
from esper.lifecycle.config import LifecycleConfig
from esper.population.config import PopulationConfig
from esper.simic.config import EpisodeConfig, lifecycle_for
from esper.utils.errors import UserError
from esper.utils.settings import Config, describe_problem, with_new_spellings

AnyConfig = TypeVar("AnyConfig", bound=Config)
BATCH_SIZE = 64  # where neither a setting nor a loader says how many samples go together


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

    def rules(self, epochs: int) -> LifecycleConfig:
        """The rules of growth for a run of that many epochs."""
        return self.lifecycle or lifecycle_for(epochs)

    def episode(self, epochs: int) -> EpisodeConfig:
        """The run as an episode: one decision after each epoch."""
        return EpisodeConfig(steps=epochs, clock="steps")


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


def settings_of(
    given: Mapping[str, Any], allowed: Collection[str] = SETTINGS, where: str = "esper.grow"
) -> GrowSettings:
    """Checked settings from keyword arguments: those of `GrowSettings` and of `PopulationConfig` together.

    Raises a UserError in one sentence for a key that is not in `allowed`, which `where` cannot honour, and
    for a value that does not fit its key.
    """
    given = with_new_spellings(given)
    known = (*OWN_SETTINGS, *PopulationConfig.model_fields)
    for key in (key for key in given if key not in allowed):
        if key in REMOVED:
            raise UserError(f"{key} is {given[key]!r}, and {where} no longer takes it: {REMOVED[key]}")
        said = f"{key} has no effect in {where}" if key in known else f"there is no setting {key!r}"
        raise UserError(f"{said}; allowed are {', '.join(allowed)}")
    training = {key: value for key, value in given.items() if key not in OWN_SETTINGS}
    _checked(PopulationConfig, training)
    own = {key: value for key, value in given.items() if key in OWN_SETTINGS}
    if "device" in own:
        own["device"] = str(own["device"])  # a torch.device too
    for key in ("loss", "metric", "on_epoch"):
        if isinstance(own.get(key), type):
            name = own[key].__name__
            raise UserError(f"{key} is the class {name}; give an instance of it: {key}={name}()")
    checked = _checked(GrowSettings, {**own, "training": training})
    unknown = [name for name in checked.blueprints or () if name not in Blueprint.__members__]
    if unknown or checked.blueprints == ():
        said = f"{unknown[0]!r} is no blueprint" if unknown else "blueprints is empty"
        raise UserError(f"{said}; name some of {', '.join(Blueprint.__members__)}, or leave blueprints out")
    if "decay" in training and training.get("schedule") != "flat":
        warnings.warn("decay is for schedule='flat' and changes nothing here", stacklevel=2)
    return checked


def _checked(kind: type[AnyConfig], given: dict[str, Any]) -> AnyConfig:
    try:
        return kind(**given)
    except ValidationError as error:
        problem = error.errors()[0]
        about = kind.model_fields[str(problem["loc"][0])].description if problem["loc"] else None
        note = f" ({problem['loc'][0]}: {about})" if about else ""
        raise UserError(describe_problem(kind, given, dict(problem)) + note) from None
