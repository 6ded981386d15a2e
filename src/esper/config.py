"""The configuration of a run, composed of the config classes of the packages."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, PositiveFloat

from esper.lifecycle.config import LifecycleConfig
from esper.population.config import PopulationConfig
from esper.simic.config import (
    EpisodeConfig,
    GovernorConfig,
    LearnerConfig,
    PPOConfig,
    RewardConfig,
    lifecycle_for,
)
from esper.tamiyo.config import TamiyoNetConfig
from esper.utils.errors import UserError
from esper.utils.settings import Config, build, merged, parse_override, parse_yaml, read_yaml

LARGEST_SEED = 2**53 - 1  # every file format keeps it exactly


class HostConfig(Config):
    """The network that seeds grow in; null keeps the value of the task."""

    preset: Literal["cnn", "mlp", "resnet", "resmlp", "gpt"] | None = Field(
        None, description="the kind of network; clones and widenings need one of the last three"
    )
    width: int | None = Field(None, ge=1, le=65_536, description="channels or features at every slot")
    depth: int | None = Field(
        None, ge=1, le=1_000, description="segments, each with a slot; resnet: blocks of a stage; gpt: layers"
    )
    hidden: int | None = Field(None, ge=1, le=65_536, description="resnet, resmlp: width inside a block")
    stages: int | None = Field(None, ge=1, le=16, description="resnet: each halves the resolution")
    kernel: int | None = Field(None, ge=1, description="cnn, resnet: width of a convolution")
    first_stride: int | None = Field(None, ge=1, description="cnn, resnet: stride of the first segment")
    stride: int | None = Field(None, ge=1, description="cnn: stride of the other segments")
    heads: int | None = Field(None, ge=1, description="gpt: attention heads")
    expansion: int | None = Field(None, ge=1, description="gpt: width of the inner layer, in widths")

    def options(self) -> dict[str, int]:
        """Return the options that were set, besides the preset."""
        return self.model_dump(exclude={"preset"}, exclude_none=True)


class TelemetryConfig(Config):
    """What a run writes to its folder and elsewhere."""

    sinks: tuple[Literal["tensorboard", "wandb"], ...] = Field((), description="also write metrics here")
    trajectories: int = Field(12, ge=0, description="rounds whose slots stay on disk; older ones are thinned")
    checkpoint_every: int = Field(10, ge=0, description="rounds per checkpoint; the newest 3 stay; 0: none")


class RunConfig(Config):
    """All settings of a run. On a CPU they decide every bit of its results."""

    seed: int = Field(0, ge=0, le=LARGEST_SEED, description="random numbers derive from it and a member's id")
    device: str = Field("auto", description="auto, cpu, cuda, cuda:1, ...")
    task: str = Field(
        "digits",
        description="the data set: see 'esper tasks', or MODULE:FUNCTION for one of your own; several with a "
        "+ between them take turns in training",
    )
    task_seed: int = Field(0, ge=0, le=LARGEST_SEED, description="seed of the splits, or of generated data")
    host: HostConfig = Field(HostConfig(), description="the network that seeds grow in")
    members: int = Field(16, ge=1, le=1_000_000, description="networks that train at once")
    rounds: int = Field(20, ge=1, description="episodes of all members, each followed by one update")
    # OpenMP crashes where a machine refuses a thread; 256 could be started wherever that was tried.
    threads: int = Field(1, ge=0, le=256, description="CPU threads; 1 if members are small, 0: torch's own")
    shards: int | None = Field(
        None,
        ge=1,
        le=65_536,
        description="shards that the members are computed in: their number may change the bits of a run, the "
        "number of processes does not; null is one for each process",
    )
    episode: EpisodeConfig = Field(EpisodeConfig(), description="how long an episode is")
    budgets: tuple[PositiveFloat, ...] = Field(
        (1.0,), min_length=1, description="multiples of the episode's budget, dealt to members by their ids"
    )
    reward: RewardConfig = Field(RewardConfig(), description="the reward of the controller")
    governor: GovernorConfig = Field(GovernorConfig(), description="when a member is rolled back")
    lifecycle: LifecycleConfig = Field(lifecycle_for(EpisodeConfig().steps), description="rules of growth")
    population: PopulationConfig = Field(PopulationConfig(folds=4), description="how members train")
    policy: TamiyoNetConfig = Field(TamiyoNetConfig(), description="the size of the policy network")
    ppo: PPOConfig = Field(PPOConfig(), description="how PPO trains the policy")
    learner: LearnerConfig = Field(LearnerConfig(), description="how a controller begins to learn")
    telemetry: TelemetryConfig = Field(TelemetryConfig(), description="what a run writes")


def preset_names() -> list[str]:
    """List the configurations that ship with esper."""
    folder = resources.files("esper") / "presets"
    return sorted(item.name.removesuffix(".yaml") for item in folder.iterdir() if item.name.endswith(".yaml"))


def load_config(
    file: Path | str | None = None,
    preset: str | None = None,
    overrides: Sequence[str] = (),
    base: RunConfig | None = None,
) -> RunConfig:
    """Merge defaults (or `base`), preset, file and each `a.b=c`, in this order, and check the result."""
    # Sources are merged as plain values and checked once at the end, so that each may be incomplete.
    data: dict[str, Any] = (base or RunConfig()).model_dump(mode="json")
    if preset is not None:
        if preset not in preset_names():
            raise UserError(f"preset is {preset!r}; allowed are {', '.join(preset_names())}")
        text = (resources.files("esper") / "presets" / f"{preset}.yaml").read_text(encoding="utf-8")
        data = merged(data, parse_yaml(text, f"preset {preset}") or {})
    if file is not None:
        data = merged(data, read_yaml(file))
    for override in overrides:
        data = merged(data, parse_override(override))
    return build(RunConfig, data)
