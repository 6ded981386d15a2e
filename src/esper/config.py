"""The configuration of a run, composed of the rooms' own config classes."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from esper.config_files import build, merged, parse_override, parse_yaml, read_yaml
from esper.errors import UserError
from esper.lifecycle.config import Config, LifecycleConfig
from esper.population.config import PopulationConfig
from esper.simic.agent.ppo import PPOConfig
from esper.tamiyo.policy.network import TamiyoNetConfig


class TelemetryConfig(Config):
    """What a run leaves behind."""

    sinks: tuple[Literal["tensorboard", "wandb"], ...] = Field(
        default=(), description="where metrics go beside the run folder"
    )
    events: bool = Field(default=True, description="write events.jsonl")
    film_members: int = Field(
        default=3, ge=0, description="members whose slots are filmed: best, typical, worst, and more between"
    )
    checkpoint_every: int = Field(
        default=10, ge=0, description="rounds between checkpoints that stay; 0 keeps none"
    )
    checkpoints_kept: int = Field(default=3, ge=1, description="how many of those stay, the newest")


class RunConfig(Config):
    """Everything that decides what a run does. On a CPU it decides every bit of it."""

    seed: int = Field(default=0, ge=0, description="every random number derives from it and a member's id")
    device: str = Field(default="auto", description="auto, cpu, cuda, cuda:1, ...")
    task: str = Field(default="digits", description="the data set: see 'esper tasks'")
    members: int = Field(default=16, ge=1, description="networks that train at once")
    rounds: int = Field(default=20, ge=1, description="episodes of all members, each followed by one update")
    steps: int = Field(
        default=30, ge=1, description="decision steps in an episode: an epoch and an action each"
    )
    lifecycle: LifecycleConfig = Field(default=LifecycleConfig(), description="the rules of growth")
    population: PopulationConfig = Field(default=PopulationConfig(), description="how bodies train")
    policy: TamiyoNetConfig = Field(default=TamiyoNetConfig(), description="the shape of Tamiyo's network")
    ppo: PPOConfig = Field(default=PPOConfig(), description="how Simic learns")
    telemetry: TelemetryConfig = Field(default=TelemetryConfig(), description="what a run leaves behind")


def preset_names() -> list[str]:
    """The configurations that ship with esper."""
    folder = resources.files("esper") / "presets"
    return sorted(item.name.removesuffix(".yaml") for item in folder.iterdir() if item.name.endswith(".yaml"))


def read_preset(name: str) -> dict[str, Any]:
    if name not in preset_names():
        raise UserError(f"preset is {name!r}; allowed are {', '.join(preset_names())}")
    text = (resources.files("esper") / "presets" / f"{name}.yaml").read_text(encoding="utf-8")
    return parse_yaml(text, f"preset {name}") or {}


def load_config(
    file: Path | str | None = None, preset: str | None = None, overrides: Sequence[str] = ()
) -> RunConfig:
    """Defaults, then the preset, then the file, then each `a.b=c`: the later wins."""
    data: dict[str, Any] = {}
    if preset is not None:
        data = merged(data, read_preset(preset))
    if file is not None:
        data = merged(data, read_yaml(file))
    for override in overrides:
        data = merged(data, parse_override(override))
    return build(RunConfig, data)
