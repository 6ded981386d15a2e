"""Build what runs from a configuration: tasks, environments, agents, a trainer.

config = load_config(preset="digits")
for rounds in make_trainer(config).run():
    print(rounds[LEARNER].summary.return_mean)
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

import torch
from torch import Tensor

from esper.config import RunConfig
from esper.lifecycle.actions import HEAD_CHOICES, Rate
from esper.population.hosts import build_host
from esper.simic.agent.ppo import PPOAgent
from esper.simic.environment import EnvironmentSpec, GrowthEnvironment
from esper.simic.learner import Learner, make_policy
from esper.simic.trainer import Trainer
from esper.tamiyo.policy.features import schema_hash
from esper.tasks import HostSpec, Task, load_task, task_names, task_table
from esper.utils.calls import call_function
from esper.utils.devices import choose_device, cpu_threads, memory_of
from esper.utils.errors import UserError
from esper.utils.gather import Gather
from esper.utils.launch import Launch

LEARNER = "agent"  # the one learner of a run
TASK_SEPARATOR = "+"  # separates tasks that take turns
ONE_BUDGET = (1.0,)  # of the episode
MIN_BYTES = 3 * 4  # of a parameter: its weight, its gradient and a moment, in float32


def make_specs(
    config: RunConfig, device: torch.device | None = None, members: Tensor | None = None
) -> list[EnvironmentSpec]:
    """Build the settings of one environment for each task of a run; `members` [N] replace those of the run.

    Raises UserError where a task is unknown or has fewer samples than a minibatch, where its host cannot be
    built, and where budgets are asked for that nothing would spend.
    """
    unspent = {"budgets": config.budgets != ONE_BUDGET, "episode.flops": config.episode.flops is not None}
    if config.episode.clock == "steps" and any(unspent.values()):
        names = " and ".join(name for name, given in unspent.items() if given)
        raise UserError(f"{names}: a budget, which episode.clock=steps does not spend; leave it out")
    device = device or choose_device(config.device)
    specs = []
    for name in config.task.split(TASK_SEPARATOR):
        tasks = [_with_host(task, config) for task in load_tasks(name.strip(), config.task_seed)]
        if config.population.batch_size > len(tasks[0].train):
            raise UserError(
                f"population.batch_size is {config.population.batch_size}, and {tasks[0].name} has "
                f"{len(tasks[0].train)} samples to train on; make it smaller"
            )
        # Each process has its own share of the members in memory.
        check_host(tasks[0], config.members // Launch.of().size, device)
        specs.append(
            EnvironmentSpec(
                task=tasks[0],
                variants=tuple(tasks) if len(tasks) > 1 else (),
                members=torch.arange(config.members) if members is None else members,
                gamma=config.ppo.gamma,
                seed=config.seed,
                device=device,
                episode=config.episode,
                budgets=config.budgets,
                reward=config.reward,
                governor=config.governor,
                lifecycle=config.lifecycle,
                population=config.population,
            )
        )
    return specs


def check_host(task: Task, members: int, device: torch.device) -> None:
    """Raise ValueError for a host that cannot be built, or that the task or the memory does not fit."""
    # On the meta device nothing is allocated, so a host of any size can be refused.
    with torch.device("meta"):
        host = build_host(task.host.preset, task.input_shape, task.num_classes, **task.host.options)
    takes_tokens = host.topology == "transformer"
    if takes_tokens == task.train.inputs.is_floating_point():
        fitting = [row.name for row in task_table() if (row.topology == "transformer") == takes_tokens]
        raise UserError(
            f"the {task.host.preset} host takes {'tokens' if takes_tokens else 'numbers'}, which {task.name} "
            f"does not have; leave out --preset and host.preset, or choose a task of {', '.join(fitting)}"
        )
    needed, there = members * MIN_BYTES * host.num_parameters, memory_of(device)
    if needed > there:
        raise UserError(
            f"the host has {host.num_parameters:,} parameters, and {members:,} members take at least "
            f"{needed / 2**30:,.0f} GiB of the {there / 2**30:,.0f} GiB of {device}; lower members or the "
            "size of the host (host.width, hidden, depth)"
        )


def load_tasks(name: str, seed: int = 0) -> Sequence[Task]:
    """Load a task by its name, or by MODULE:FUNCTION of the user.

    The function takes the seed and returns a Task, or several of one shape that are dealt to the members.
    Raises UserError for an unknown name, and for a function that does not exist or returns something else.
    """
    if name in task_names():
        return [load_task(name, seed)]
    if ":" not in name:
        allowed = ", ".join(task_names())
        raise UserError(f"task is {name!r}; allowed are {allowed}, or MODULE:FUNCTION for one of your own")
    made = call_function("task", name, seed)
    tasks = [made] if isinstance(made, Task) else list(made) if isinstance(made, Sequence) else []
    if not tasks or not all(isinstance(task, Task) for task in tasks):
        raise UserError(f"task is {name!r}, and it returned {type(made).__name__}; return a Task or several")
    return tasks


def _with_host(task: Task, config: RunConfig) -> Task:
    """Return the task with the host that the configuration asks for."""
    # Options of the task's own host mean nothing to a host of another kind.
    preset = config.host.preset or task.host.preset
    inherited = dict(task.host.options) if preset == task.host.preset else {}
    return replace(task, host=HostSpec(preset, inherited | config.host.options()))


def make_environment(
    config: RunConfig,
    device: torch.device | None = None,
    members: Tensor | None = None,
    best_epoch: bool = False,
) -> GrowthEnvironment:
    """Build the environment of a run with one task; `members` [N] replace those of the run.

    best_epoch: networks end with the weights of their best epoch, and pay for the validations that find it.
    Raises UserError where there are several tasks or budgets, or one that pays for no step.
    """
    specs = make_specs(config, device, members)
    if len(specs) > 1:
        raise UserError(f"task is {config.task!r}; several take turns in 'esper train' alone, give one")
    if config.budgets != ONE_BUDGET:
        raise UserError(
            f"budgets is {list(config.budgets)}; those are for 'esper train' alone: set budgets=[1], and "
            "episode.steps or episode.flops to the budget of every member"
        )
    return check_budgets(GrowthEnvironment(replace(specs[0], best_epoch=best_epoch)))


def check_budgets(environment: GrowthEnvironment) -> GrowthEnvironment:
    """Raise UserError where a member's budget does not pay for one decision step of its host."""
    smallest, step = float(environment.budget.min()), environment.bare_cost
    # A budget of exactly one step must pass: FLOPs are sums of floats.
    if smallest < (1 - 1e-9) * step:
        raise UserError(
            f"the smallest budget of a member is {smallest:.3g} FLOPs, and one step of its host costs "
            f"{step:.3g}; raise episode.flops or budgets, or lower population.batches_per_epoch"
        )
    return environment


def make_agent(config: RunConfig, device: torch.device | None = None) -> PPOAgent:
    """Build an untrained agent; its first weights follow from the seed and the threads of the run alone."""
    # The caller's random state stays as it is. Orthogonal weights depend on the number of CPU threads.
    with torch.random.fork_rng(devices=[]), cpu_threads(config.threads):
        torch.manual_seed(config.seed)
        policy = make_policy(config.policy, config.learner, config.episode.rates)
    return PPOAgent(policy, config.ppo, device or choose_device(config.device), config.seed)


def make_learner(config: RunConfig, device: torch.device | None = None, name: str = LEARNER) -> Learner:
    """Build an untrained learner."""
    # The rollout buffer is as long as the member with the largest budget can live.
    steps = math.ceil(config.episode.steps * max(config.budgets))
    return Learner(name, make_agent(config, device), steps, config.learner, config.reward)


def make_trainer(
    config: RunConfig, device: torch.device | None = None, gather: Gather | None = None
) -> Trainer:
    """Build what `esper train` runs: the tasks of a configuration and one learner; `gather` shares them."""
    specs, learners = make_specs(config, device), [make_learner(config, device)]
    with cpu_threads(config.threads):
        trainer = Trainer(specs, learners, config.rounds, shards=config.shards or 1, gather=gather)
    for environment in chain.from_iterable(trainer.environments):
        check_budgets(environment)
    return trainer


def agent_schema(rates: bool = False) -> str:
    """Hash what an agent sees and may choose, with `rates` learning rates too: part of every checkpoint."""
    choices = [(head.name, [choice.name for choice in names]) for head, names in HEAD_CHOICES.items()]
    if rates:
        choices.append(("RATE", [rate.name for rate in Rate]))
    return hashlib.sha256(f"{schema_hash(rates)} {choices}".encode()).hexdigest()[:16]
