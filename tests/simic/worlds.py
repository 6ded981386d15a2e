"""Tiny environments for the tests of the run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import torch

from esper.lifecycle.config import GateConfig, LifecycleConfig
from esper.population.config import PopulationConfig
from esper.population.hosts import build_host
from esper.simic.agent.ppo import PPOAgent, PPOConfig
from esper.simic.config import EpisodeConfig, RewardConfig
from esper.simic.environment import EnvironmentSpec, GrowthEnvironment
from esper.simic.learner import Learner
from esper.simic.trainer import Trainer
from esper.tamiyo.policy.network import TamiyoNet, TamiyoNetConfig
from esper.tasks import load_task
from esper.tasks.task import HostSpec, Task

GAMMA = PPOConfig().gamma
SMALL = PopulationConfig(
    batch_size=16, batches_per_epoch=2, validation_samples=48, initial_weights=8, seed_weights=2
)
QUICK = LifecycleConfig(
    min_prune_age=2,
    embargo_ticks=2,
    allow_unfinished=True,  # episodes are a few steps long here
    gates=GateConfig(training_epochs=1),
)


HOSTS = {
    "spirals": HostSpec("mlp", {"width": 8, "depth": 3}),
    "digits": HostSpec("cnn", {"width": 4, "depth": 3}),
}


@cache
def task(name: str = "spirals") -> Task:
    """A task with a host of three slots without blocks, where seeds are planted."""
    return replace(load_task(name), host=HOSTS[name])


def make_spec(
    members: Sequence[int] = (0, 1, 2, 3), steps: int = 6, name: str = "spirals"
) -> EnvironmentSpec:
    return EnvironmentSpec(
        task=task(name),
        members=torch.tensor(members),
        gamma=GAMMA,
        seed=5,
        episode=EpisodeConfig(steps=steps, clock="steps"),
        lifecycle=QUICK,
        population=SMALL,
    )


def make_environment(
    members: Sequence[int] = (0, 1, 2, 3), steps: int = 6, name: str = "spirals", **changes: object
) -> GrowthEnvironment:
    return GrowthEnvironment(replace(make_spec(members, steps, name), **changes))  # type: ignore[arg-type]


def make_residual(
    members: Sequence[int] = (0, 1),
    steps: int = 6,
    clock: str = "steps",
    folds: int = 1,
    depth: int = 1,
    **changes: object,
) -> GrowthEnvironment:
    """Residual perceptrons of `depth` blocks, each of which can be cloned and widened."""
    spirals = task()
    return make_environment(
        members,
        steps,
        make_host=lambda: build_host(
            "resmlp", spirals.input_shape, spirals.num_classes, width=8, hidden=8, depth=depth
        ),
        episode=EpisodeConfig.model_validate({"steps": steps, "clock": clock}),
        population=SMALL.model_copy(update={"folds": folds}),
        **changes,
    )


def make_agent(seed: int = 0, **config: object) -> PPOAgent:
    torch.manual_seed(seed)
    return PPOAgent(TamiyoNet(TamiyoNetConfig(width=16)), PPOConfig.model_validate(config), seed=seed)


def make_trainer(
    rounds: int = 1,
    steps: int = 6,
    members: Sequence[int] = (0, 1, 2, 3),
    control: bool = False,
    **ppo: object,
) -> Trainer:
    """One learner, called "agent", with or without twins."""
    learner = Learner("agent", make_agent(**ppo), steps, reward=RewardConfig(control_variate=control))
    return Trainer([make_spec(members, steps)], [learner], rounds)
