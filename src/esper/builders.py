"""From a configuration to the things that run: tasks, environments, agents, a trainer.

config = load_config(preset="digits")
for rounds in make_trainer(config).run():
    print(rounds[LEARNER].summary.return_mean)
"""

from __future__ import annotations

import hashlib
import importlib
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from esper.config import RunConfig
from esper.foundation.devices import choose_device, cpu_threads
from esper.foundation.errors import UserError
from esper.foundation.gather import Gather
from esper.lifecycle.actions import HEAD_CHOICES
from esper.population.hosts import Host, build_host
from esper.population.shapes import fresh_host
from esper.simic.agent.ppo import PPOAgent
from esper.simic.environment import GrowthEnvironment
from esper.simic.learner import Learner, make_policy
from esper.simic.steps import EnvironmentSpec
from esper.simic.trainer import Trainer
from esper.tamiyo.policy.features import schema_hash
from esper.tasks import HostSpec, Task, load_task, task_names

LEARNER = "agent"  # the one learner of a run
AND = "+"  # between tasks that take turns
ONE_BUDGET = (1.0,)  # of the episode


def make_specs(
    config: RunConfig, device: torch.device | None = None, members: Tensor | None = None
) -> list[EnvironmentSpec]:
    """One environment's settings for each task of a run, with other members where they are given.

    Raises UserError where a task is unknown or has fewer samples than a minibatch, and where budgets are
    asked for that nothing would spend.  # members [N]
    """
    unspent = {"budgets": config.budgets != ONE_BUDGET, "episode.flops": config.episode.flops is not None}
    if config.episode.clock == "steps" and any(unspent.values()):
        names = " and ".join(name for name, given in unspent.items() if given)
        raise UserError(
            f"episode.clock is steps, which spends no budget, and {names} is given; set "
            f"episode.clock=compute, or leave {names} out"
        )
    specs = []
    for name in config.task.split(AND):
        tasks = [_with_host(task, config) for task in load_tasks(name.strip(), config.task_seed)]
        if config.population.batch_size > len(tasks[0].train):
            raise UserError(
                f"population.batch_size is {config.population.batch_size}, and {tasks[0].name} has "
                f"{len(tasks[0].train)} samples to train on; make it smaller"
            )
        specs.append(
            EnvironmentSpec(
                task=tasks[0],
                variants=tuple(tasks) if len(tasks) > 1 else (),
                members=torch.arange(config.members) if members is None else members,
                gamma=config.ppo.gamma,
                seed=config.seed,
                device=device or choose_device(config.device),
                episode=config.episode,
                budgets=config.budgets,
                reward=config.reward,
                governor=config.governor,
                lifecycle=config.lifecycle,
                population=config.population,
            )
        )
    return specs


def load_tasks(name: str, seed: int = 0) -> Sequence[Task]:
    """A task by its name; or what a function of the user's returns, by MODULE:FUNCTION.

    The function is given the seed and returns a Task, or several of one shape that are dealt to the members.
    Raises UserError for an unknown name, and for a function that is not there or returns something else.
    """
    if name in task_names():
        return [load_task(name, seed)]
    module, colon, function = name.partition(":")
    if not colon:
        raise UserError(
            f"task is {name!r}; allowed are {', '.join(task_names())}, or MODULE:FUNCTION for one of your own"
        )
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    try:
        made = getattr(importlib.import_module(module), function)(seed)
    except (ImportError, AttributeError, TypeError) as error:
        raise UserError(
            f"task is {name!r}, and that function could not be called with a seed ({error}); give a module "
            "that can be imported from here, and a function of it that takes the seed and returns a Task"
        ) from None
    tasks = [made] if isinstance(made, Task) else list(made) if isinstance(made, Sequence) else []
    if not tasks or not all(isinstance(task, Task) for task in tasks):
        raise UserError(f"task is {name!r}, and it returned {type(made).__name__}; return a Task or several")
    return tasks


def _with_host(task: Task, config: RunConfig) -> Task:
    """The task with the host that the configuration asks for."""
    preset = config.host.preset or task.host.preset
    inherited = dict(task.host.options) if preset == task.host.preset else {}
    return replace(task, host=HostSpec(preset, inherited | config.host.options()))


def make_environment(
    config: RunConfig,
    device: torch.device | None = None,
    members: Tensor | None = None,
    best_epoch: bool = False,
) -> GrowthEnvironment:
    """The environment of a run with one task, with other members where they are given.  # members [N]

    best_epoch: networks end with the weights of their best epoch, and pay for the validations that find it.
    Raises UserError where there are several tasks or budgets.
    """
    specs = make_specs(config, device, members)
    if len(specs) > 1:
        raise UserError(f"task is {config.task!r}; several take turns in 'esper train' alone, give one")
    if config.budgets != ONE_BUDGET:
        raise UserError(
            f"budgets is {list(config.budgets)}; those are for 'esper train' alone, set episode.steps or "
            "episode.flops instead"
        )
    return GrowthEnvironment(replace(specs[0], best_epoch=best_epoch))


def make_agent(config: RunConfig, device: torch.device | None = None) -> PPOAgent:
    """An agent that knows nothing yet; its first weights follow from the seed alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        policy = make_policy(config.policy, config.learner)
    return PPOAgent(policy, config.ppo, device or choose_device(config.device), config.seed)


def make_learner(config: RunConfig, device: torch.device | None = None, name: str = LEARNER) -> Learner:
    """A learner that knows nothing yet."""
    steps = math.ceil(config.episode.steps * max(config.budgets))
    return Learner(name, make_agent(config, device), steps, config.learner, config.reward)


def make_trainer(
    config: RunConfig, device: torch.device | None = None, gather: Gather | None = None
) -> Trainer:
    """All that `esper train` runs: the tasks of a configuration and one learner; `gather` shares them."""
    worlds, learners = make_specs(config, device), [make_learner(config, device)]
    with cpu_threads(config.threads):
        return Trainer(worlds, learners, config.rounds, shards=config.shards or 1, gather=gather)


def agent_schema() -> str:
    """A fingerprint of what an agent sees and of what it may choose: part of every checkpoint."""
    choices = [(head.name, [choice.name for choice in names]) for head, names in HEAD_CHOICES.items()]
    return hashlib.sha256(f"{schema_hash()} {choices}".encode()).hexdigest()[:16]


def shaped_host(task: Task, shape: str) -> Host:
    """A fresh host of a task, grown to a shape as `population.shapes.shapes_of` names it."""
    host = build_host(task.host.preset, task.input_shape, task.num_classes, **task.host.options)
    return fresh_host(host, shape).validate(task.train.inputs[:2], task.num_classes)
