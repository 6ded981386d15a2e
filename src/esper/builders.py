"""From a configuration to the things that run: the task, the environment, the agent.

config = load_config(preset="digits")
environment = make_environment(config)
agent = make_agent(config)
for round in Trainer(environment, agent, config.rounds).run():
    print(round.summary.return_mean)
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from esper.config import RunConfig
from esper.foundation.devices import choose_device
from esper.foundation.errors import UserError
from esper.lifecycle.actions import HEAD_CHOICES, Actions
from esper.simic.agent.ppo import PPOAgent
from esper.simic.environment import EnvironmentSpec, GrowthEnvironment, StepResult
from esper.tamiyo.policy.features import schema_hash
from esper.tamiyo.policy.network import TamiyoNet
from esper.tasks import HostSpec, Task, load_task, task_names

OnStep = Callable[[GrowthEnvironment], None]


class WatchedEnvironment(GrowthEnvironment):
    """Tells somebody about every step, for progress bars."""

    on_step: OnStep | None = None

    def step(self, actions: Actions) -> StepResult:
        result = super().step(actions)
        if self.on_step is not None:
            self.on_step(self)
        return result


def make_task(config: RunConfig) -> Task:
    """The task with the host that the configuration asks for."""
    if config.task not in task_names():
        raise UserError(f"task is {config.task!r}; allowed are {', '.join(task_names())}")
    task = load_task(config.task, config.task_seed)
    wanted = config.host
    preset = wanted.preset or task.host.preset
    inherited = dict(task.host.options) if preset == task.host.preset else {}
    return replace(task, host=HostSpec(preset, inherited | wanted.options()))


def make_environment(
    config: RunConfig,
    device: torch.device | None = None,
    members: Tensor | None = None,
    seed: int | None = None,
) -> WatchedEnvironment:
    """The environment of a run; other members or another seed where they are given.  # members [N]"""
    task = make_task(config)
    if config.population.batch_size > len(task.train):
        raise UserError(
            f"population.batch_size is {config.population.batch_size}, and {task.name} has {len(task.train)} "
            "samples to train on; make it smaller"
        )
    return WatchedEnvironment(
        EnvironmentSpec(
            task=task,
            members=torch.arange(config.members) if members is None else members,
            gamma=config.ppo.gamma,
            seed=config.seed if seed is None else seed,
            device=device or choose_device(config.device),
            episode=config.episode,
            reward=config.reward,
            governor=config.governor,
            lifecycle=config.lifecycle,
            population=config.population,
        )
    )


def make_agent(config: RunConfig, device: torch.device | None = None) -> PPOAgent:
    """An agent that knows nothing yet; its first weights belong to the seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        policy = TamiyoNet(config.policy)
    return PPOAgent(policy, config.ppo, device or choose_device(config.device), config.seed)


def agent_schema() -> str:
    """A fingerprint of what an agent sees and of what it may choose: part of every checkpoint."""
    choices = [(head.name, [choice.name for choice in names]) for head, names in HEAD_CHOICES.items()]
    return hashlib.sha256(f"{schema_hash()} {choices}".encode()).hexdigest()[:16]
