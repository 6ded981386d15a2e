"""What training and evaluation share: the rules, the price of a parameter, the recipe of a network."""

from __future__ import annotations

import gc
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from esper.lifecycle.config import GateConfig, LifecycleConfig
from esper.population.config import PopulationConfig
from esper.simic.agent.ppo import PPOAgent, PPOConfig
from esper.simic.config import EpisodeConfig, RewardConfig
from esper.simic.environment import EnvironmentSpec
from esper.tamiyo.policy.network import TamiyoNet, TamiyoNetConfig
from esper.tasks.task import HostSpec, Task

STEPS = 24
GATES = GateConfig(training_epochs=2, blending_epochs=2)
RULES = LifecycleConfig(gates=GATES)
PPO = PPOConfig(  # few rounds of many members: large steps, held by the KL
    gamma=1.0,
    lam=1.0,  # rewards telescope, so that long returns are no noisier, and growth pays late
    learning_rate=3e-3,
    head_average="steps",  # a head that few steps read weighs little: `studies.simulated` says why
    epochs=6,
    minibatches=4,
    target_kl=0.15,
    entropy_start=0.005,
    entropy_end=0.002,
    entropy_updates=20,
)
REWARD = RewardConfig(rent_weight=0.01)  # a network e times as large must be a point better
POLICY = TamiyoNetConfig(width=128)


def recipe(batches: int, graphs: bool = True, chunk: int = 4096) -> PopulationConfig:
    """How every network of the study is trained, with so many minibatches between two decisions."""
    return PopulationConfig(
        batch_size=64,
        batches_per_epoch=batches,
        validation_samples=512,
        host_lr=3e-2,
        seed_lr=1e-2,
        graphs=graphs,
        rows_per_chunk=chunk,
    )


def make_agent(seed: int, device: str) -> PPOAgent:
    torch.manual_seed(seed)
    return PPOAgent(TamiyoNet(POLICY), PPO, device, seed=seed)


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
            gamma=PPO.gamma,
            seed=self.seed,
            device=self.device,
            reward=REWARD,
            lifecycle=RULES,
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
