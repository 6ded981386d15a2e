"""The constants of the rules of growth, each a named default."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from esper.utils.settings import Config

BlueprintName = Literal[
    "conv_light", "attention", "norm", "depthwise", "bottleneck", "conv_small", "conv_heavy", "lora",
    "lora_large", "mlp_small", "mlp", "flex_attention", "clone", "widen_half", "widen_full",
]  # fmt: skip


class GateConfig(Config):
    """When a seed may move on. A refused gate changes nothing but costs the step."""

    training_epochs: int = Field(default=10, ge=0, description="G2: epochs in TRAINING before BLENDING")
    min_health: float = Field(default=0.7, ge=0, le=1, description="G2: gradient health at least this")


class LifecycleConfig(Config):
    """What is legal, and how long things take."""

    max_seeds: int = Field(default=0, ge=0, description="live and fossilised seeds per member; 0: no limit")
    min_prune_age: int = Field(default=5, ge=0, description="a seed of fewer ticks cannot be pruned")
    embargo_ticks: int = Field(default=5, ge=1, description="ticks a slot stays EMBARGOED")
    allow_growth: bool = Field(default=True, description="whether a seed may ever be planted")
    allow_advance: bool = Field(default=True, description="whether ADVANCE is ever legal")
    allow_unfinished: bool = Field(
        default=False,
        description="whether a seed may be planted, advanced or given another strength when too few steps of "
        "the episode are left to bring it to full strength",
    )
    block_blueprints: tuple[BlueprintName, ...] = Field(
        default=("clone", "widen_half", "widen_full"),
        min_length=1,
        description="what may grow in a slot behind a residual block; elsewhere all that fits does",
    )
    gates: GateConfig = Field(default_factory=lambda: GateConfig())
