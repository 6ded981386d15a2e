"""How a model is grown: everything that has a sensible default."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from pydantic import ConfigDict, Field, ValidationError

from esper.foundation.errors import UserError
from esper.foundation.settings import Config
from esper.lifecycle.config import LifecycleConfig
from esper.population.config import PopulationConfig
from esper.simic.config import EpisodeConfig, lifecycle_for


class GrowSettings(Config):
    """The settings of `esper.grow`."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    objective: Literal["classification", "regression", "language"] | None = Field(
        default=None, description="what the targets are; found out by their type if it is left out"
    )
    loss: Callable[..., Any] | None = Field(
        default=None, description="(outputs, targets) of a batch → one number to lower"
    )
    metric: Callable[..., Any] | None = Field(
        default=None, description="(outputs, targets) of a batch → one number, best between 0 and 1, to raise"
    )
    blueprints: tuple[str, ...] | None = Field(
        default=None, description="names of the blueprints that may grow; all that fit the model if left out"
    )
    optimiser: Literal["adamw", "sgd"] = Field(default="adamw", description="the rule that moves the weights")
    lr: float = Field(default=3e-3, gt=0, description="peak learning rate of the model")
    seed_lr: float | None = Field(
        default=None, gt=0, description="peak learning rate of seeds; lr if left out"
    )
    weight_decay: float = Field(default=1e-2, ge=0, description="decoupled weight decay")
    momentum: float = Field(default=0.9, ge=0, lt=1, description="sgd: momentum; adamw: the first beta")
    clip_norm: float = Field(default=5.0, gt=0, description="gradient norm at most this")
    schedule: Literal["constant", "cosine", "one_cycle"] = Field(
        default="one_cycle", description="how the learning rates move over the run"
    )
    batch_size: int = Field(default=64, ge=1, description="samples in a minibatch")
    batches_per_epoch: int | None = Field(
        default=None, ge=1, description="minibatches between two decisions; a pass over the data if left out"
    )
    validation_samples: int = Field(default=2048, ge=1, description="at most this many per measurement")
    members: int = Field(default=1, ge=1, description="copies that grow side by side; the best one is kept")
    seed: int = Field(default=0, ge=0, description="the same seed gives the same network")
    device: str = Field(default="cpu", description="where to train: cpu, cuda, cuda:1 ...")
    topology: Literal["cnn", "mlp", "transformer"] | None = Field(
        default=None, description="what the activations are; found out if left out"
    )
    progress: bool = Field(default=True, description="whether a progress bar is shown in a terminal")
    lifecycle: LifecycleConfig | None = Field(
        default=None, description="the rules of growth; dwell times that fit the epochs if left out"
    )

    def population(self, num_samples: int) -> PopulationConfig:
        batch = min(self.batch_size, num_samples)
        return PopulationConfig(
            batch_size=batch,
            batches_per_epoch=self.batches_per_epoch or num_samples // batch,
            validation_samples=self.validation_samples,
            optimiser=self.optimiser,
            host_lr=self.lr,
            seed_lr=self.seed_lr or self.lr,
            weight_decay=self.weight_decay,
            momentum=self.momentum,
            clip_norm=self.clip_norm,
            schedule=self.schedule,
            seed_weights=max(4, self.members),
        )

    def rules(self, epochs: int) -> LifecycleConfig:
        return self.lifecycle or lifecycle_for(epochs)

    def episode(self, epochs: int) -> EpisodeConfig:
        return EpisodeConfig(steps=epochs)


def settings_of(given: dict[str, Any]) -> GrowSettings:
    """Checked settings, or one sentence that names the key, its value and what is allowed."""
    try:
        return GrowSettings(**given)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"][:1])
        if first["type"] == "extra_forbidden":
            allowed = ", ".join(GrowSettings.model_fields)
            raise UserError(f"grow has no setting {key!r}; allowed are {allowed}") from None
        about, reason = GrowSettings.model_fields[key].description, first["msg"]
        raise UserError(
            f"{key} is {given[key]!r}: {reason[0].lower()}{reason[1:]} ({key}: {about})"
        ) from None
