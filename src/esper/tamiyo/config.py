"""The shape of Tamiyo's network, and the conditions that a controller was trained under.

Outside of these conditions controllers lost up to 23 points of accuracy to not growing, so there they do not
grow. This module does not import torch, so that reading a configuration is quick.
"""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import Field

from esper.utils.settings import Config


class TamiyoNetConfig(Config):
    """The shape of Tamiyo's network."""

    width: int = Field(default=128, ge=8, description="width of the encoders and of the memory")
    embedding: int = Field(default=16, ge=1, description="width of the blueprint and op embeddings")


Range = tuple[float, float]  # the least and the largest, both included
ROUNDING = 1e-6  # relative, of a quotient of FLOPs


class Conditions(Config):
    """Under which settings a controller was trained, or a run is to act."""

    clock: str = Field(description="what ends an episode: compute or steps")
    minibatches: Range = Field(description="FLOPs of the budget over those of a minibatch of the bare host")
    batch_size: Range = Field(description="samples in a minibatch")
    learning_rate: Range = Field(description="peak learning rate of the host")
    schedules: tuple[str, ...] = Field(description="how the learning rate moved")
    hosts: Mapping[str, Mapping[str, Range]] = Field(description="kinds of host, and the sizes of each")
    blueprints: tuple[str, ...] = Field(
        default=(), description="what could grow behind a residual block; empty where that does not matter"
    )
    rates: bool = Field(default=False, description="whether it could set the learning rate")
    optimizer: str = Field(default="adamw", description="what moved the weights")
    seed_rate: Range = Field(default=(1, 1), description="peak learning rate of seeds over that of the host")


# What docs/study.md judged: three budgets, rates of 0.5 to 4 times 0.01, and the smallest host of each kind,
# with which growth began there and in training. Nothing speaks for larger ones (`studies.no_harm`).
STUDY = Conditions(
    clock="compute",
    minibatches=(192, 3072),
    batch_size=(128, 128),
    learning_rate=(0.005, 0.04),
    schedules=("flat",),
    hosts={
        "resmlp": {"width": (32, 32), "hidden": (8, 8), "depth": (2, 2)},
        "resnet": {"width": (8, 8), "hidden": (4, 4), "depth": (1, 1), "stages": (2, 2)},
        "gpt": {"width": (32, 32), "heads": (4, 4), "expansion": (2, 2), "depth": (1, 1)},
    },
)


def differences(trained: Conditions, asked: Conditions) -> list[str]:
    """List in what a run lies outside of the conditions that a controller was trained under, in phrases."""
    found = []
    for setting in ("episode.clock", "episode.rates", "population.optimizer"):
        now, then = (getattr(each, setting.partition(".")[2]) for each in (asked, trained))
        if now != then:
            found.append(f"{setting} is {now} (trained with {then})")
    for kind, sizes in asked.hosts.items():
        if kind in trained.hosts:
            for name, limits in trained.hosts[kind].items():
                found += _beyond(f"host.{name}", sizes[name], limits)
        else:
            known = ", ".join(sorted(trained.hosts)) or "a host that its file does not name"
            found.append(f"the host is {kind} (trained with {known})")
    found += _beyond("the budget in minibatches of the bare host", asked.minibatches, trained.minibatches)
    found += _beyond("population.batch_size", asked.batch_size, trained.batch_size)
    found += _beyond("population.host_lr", asked.learning_rate, trained.learning_rate)
    found += _beyond("population.seed_lr / population.host_lr", asked.seed_rate, trained.seed_rate)
    if not set(asked.schedules) <= set(trained.schedules):
        known = ", ".join(trained.schedules)
        found.append(f"population.schedule is {', '.join(asked.schedules)} (trained with {known})")
    if trained.blueprints and set(asked.blueprints) != set(trained.blueprints):
        known = ", ".join(trained.blueprints)
        found.append(f"lifecycle.block_blueprints is {', '.join(asked.blueprints)} (trained with {known})")
    return found


def _beyond(what: str, asked: Range, trained: Range) -> list[str]:
    least, most = trained
    if least * (1 - ROUNDING) <= asked[0] and asked[1] <= most * (1 + ROUNDING):
        return []
    return [f"{what} is {_in_words(asked)} (trained with {_in_words(trained)})"]


def _in_words(limits: Range) -> str:
    return " to ".join(f"{value:,.6g}" for value in dict.fromkeys(limits))
