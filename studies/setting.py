"""What training and evaluation share: the rules, the price of a parameter, the recipe of a network."""

from __future__ import annotations

import gc
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from esper.config import load_config
from esper.population.config import PopulationConfig
from esper.simic.config import EpisodeConfig
from esper.simic.steps import EnvironmentSpec
from esper.tasks.task import HostSpec, Task

RECIPE = Path(__file__).with_name("tamiyo.yaml")
CONFIG = load_config(RECIPE)
STEPS, GATES, REWARD = CONFIG.episode.steps, CONFIG.lifecycle.gates, CONFIG.reward


def recipe(batches: int, graphs: bool = True, chunk: int = 4096) -> PopulationConfig:
    """How every network of the study is trained, with so many minibatches between two decisions."""
    changes = {"batches_per_epoch": batches, "graphs": graphs, "rows_per_chunk": chunk}
    return CONFIG.population.model_copy(update=changes)


@dataclass(frozen=True)
class Setting:
    """Where and for how long networks are trained."""

    steps: int = STEPS
    batches: int = 24  # minibatches in a decision step
    device: str = "cpu"
    graphs: bool = True
    chunk: int = 4096  # members that go through the network together
    seed: int = 77

    def spec(self, task: Task, members: Tensor, **more: Any) -> EnvironmentSpec:
        """An environment of these members on a task; `more` goes into the spec."""
        return EnvironmentSpec(
            task=task,
            members=members,
            gamma=CONFIG.ppo.gamma,
            seed=self.seed,
            device=self.device,
            reward=REWARD,
            lifecycle=CONFIG.lifecycle,
            episode=more.pop("episode", EpisodeConfig(steps=self.steps)),
            population=recipe(self.batches, self.graphs, self.chunk),
            **more,
        )


def ungrown(spec: EnvironmentSpec) -> EnvironmentSpec:
    """The same environment where nothing will grow: it is ready sooner, with a single draw of every seed."""
    return replace(spec, population=spec.population.model_copy(update={"seed_weights": 1}))


def with_host(task: Task, **options: int) -> Task:
    """The same task with another size of host."""
    return replace(task, host=HostSpec(task.host.preset, {**task.host.options, **options}))


def tidy() -> None:
    """Give back the memory of programs that are over: their parts refer to each other in circles."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
