"""The networks that controllers ended with, trained from the start: for as many steps, or as many FLOPs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import torch

from esper.lifecycle.slot_states import SlotStates
from esper.simic.compare import from_the_start
from esper.simic.config import EpisodeConfig
from esper.simic.costs import ForwardCosts, Work
from esper.simic.environment import GrowthEnvironment
from esper.simic.rollout import Doubles
from esper.tamiyo.blocks import part
from esper.tamiyo.controllers import Static
from esper.tasks.task import Task
from studies.records import Played, play_and_test
from studies.setting import Setting


def joined(slots: Sequence[SlotStates]) -> SlotStates:
    """The slots of several blocks as those of one population.  # each [n, S] → [blocks · n, S]"""
    fields = [states.tensors() for states in slots]
    return SlotStates(**{name: torch.cat([f[name] for f in fields]) for name in fields[0]})


def final_slots(played: Played, spans: Sequence[slice]) -> SlotStates:
    """What the members of some blocks ended with, as fossils."""
    return from_the_start(joined([part(played.record.final_slots, span) for span in spans]))


def train_from_the_start(setting: Setting, task: Task, slots: SlotStates, members: torch.Tensor) -> Played:
    """Networks that never change; what they are charged holds no measuring of seeds."""
    episode = EpisodeConfig(steps=setting.steps, measure_every=setting.steps)
    world = GrowthEnvironment(setting.spec(task, members, episode=episode))
    played = play_and_test(world, Static(), slots)
    price = prices(world, task, slots)
    epoch = price.batch * setting.batches + price.validation  # [N]
    return replace(played, spent=np.arange(setting.steps + 1)[:, None] * epoch[None, :])


@dataclass(frozen=True)
class Prices:
    """FLOPs of networks that never change."""

    batch: Doubles  # [N] one minibatch of training
    validation: Doubles  # [N] one validation


def prices(world: GrowthEnvironment, task: Task, slots: SlotStates) -> Prices:
    costs = ForwardCosts.of(world.population.bodies, task.train.inputs[:1], world.device)
    config, held = world.spec.population, slots.to(world.device)
    validation = min(len(task.validation), config.validation_samples)
    trained = costs.epoch(held, Work(training=config.batch_size, validation=0, ablate=False))
    measured = costs.epoch(held, Work(training=0, validation=validation, ablate=False))
    return Prices(trained.cpu().numpy(), measured.cpu().numpy())


def equal_budget(spent: float, price_of_batch: float, price_of_validation: float, like: Setting) -> Setting:
    """The steps, and minibatches in a step, that together cost what was spent.

    Steps lie between those of `like` and twice as many, minibatches between half and twice as many, so that
    the budget is met to within a percent where one of them alone would miss it by a step.
    """
    steps = range(like.steps, 2 * like.steps + 1)
    batches = range(max(1, like.batches // 2), 2 * like.batches + 1)

    def miss(pair: tuple[int, int]) -> float:
        return abs(pair[0] * (pair[1] * price_of_batch + price_of_validation) - spent)

    best = min(product(steps, batches), key=miss)
    return replace(like, steps=best[0], batches=best[1])
