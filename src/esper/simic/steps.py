"""The records of an environment: what it is made of, and what a step of it leads to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from esper.lifecycle.config import LifecycleConfig
from esper.lifecycle.engine import ActionOutcome, TickOutcome
from esper.lifecycle.slot_states import SlotEvidence, SlotStates
from esper.population.config import PopulationConfig
from esper.population.hosts import Host
from esper.population.metrics import TrainMetrics, ValidationMetrics
from esper.simic.config import EpisodeConfig, GovernorConfig, RewardConfig
from esper.tamiyo.policy.features import Observation
from esper.tasks.task import Task


@dataclass(frozen=True, kw_only=True)
class RuleSpec:
    """The rules of an environment, whatever its members are."""

    gamma: float  # of the potential: give it `PPOConfig.gamma`
    seed: int = 0
    episode: EpisodeConfig = field(default_factory=EpisodeConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    governor: GovernorConfig = field(default_factory=GovernorConfig)
    lifecycle: LifecycleConfig = field(default_factory=LifecycleConfig)
    budgets: tuple[float, ...] = (1.0,)  # multiples of the episode's, dealt to the members by their ids
    best_epoch: bool = False  # networks end with the weights of their best epoch on validation data


@dataclass(frozen=True, kw_only=True)
class EnvironmentSpec(RuleSpec):
    """Everything that decides what an environment of built-in networks does."""

    task: Task
    members: Tensor  # [N] int64 global ids
    device: torch.device | str = "cpu"
    population: PopulationConfig = field(default_factory=PopulationConfig)
    make_host: Callable[[], Host] | None = None  # the task's own host if none is given
    variants: tuple[Task, ...] = ()  # tasks of the same shape, dealt to the members by their ids
    rate_scale: tuple[float, ...] = ()  # of each member's learning rates; by default 1


@dataclass(frozen=True)
class StepResult:
    """What one decision step led to."""

    observation: Observation  # for the next decision
    reward: Tensor  # [N] float32, the governor's penalty included; 0 of members that were finished before
    terminated: Tensor  # [N] bool: this step was the last
    active: Tensor  # [N] bool: this step was lived through; the others were finished before it
    outcome: ActionOutcome  # of the actions, all of them where there were several
    ticked: TickOutcome
    panicked: Tensor  # [N] bool: rolled back
    rolled_back: Tensor  # [N, S] bool: seeds that the governor ended
    training: TrainMetrics
    validation: ValidationMetrics


@dataclass(frozen=True)
class Begun:
    """The first half of a step, before its epoch is trained."""

    active: Tensor  # [N] bool: who was not finished
    outcome: ActionOutcome
    ticked: TickOutcome
    evidence: SlotEvidence  # less what ended or was just born

    @property
    def states(self) -> SlotStates:
        """The slots under which the epoch is trained."""
        return self.ticked.states

    @property
    def succeeded(self) -> Tensor:
        """Who got what they asked for.  # [N] bool"""
        return self.outcome.succeeded
