"""Networks that never change: what growth ended with, from the start, and hosts that had more compute."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from esper.comparing import ControllerRun, from_the_start, prices_of, run_fixed
from esper.lifecycle.slot_states import SlotStates
from esper.simic.environment import GrowthEnvironment
from esper.simic.rollout import Doubles
from esper.tamiyo.blocks import part
from esper.tasks.task import Task
from studies.records import Played
from studies.setting import Setting


def joined(slots: Sequence[SlotStates]) -> SlotStates:
    """The slots of several blocks as those of one population.  # each [n, S] → [blocks · n, S]"""
    fields = [states.tensors() for states in slots]
    return SlotStates(**{name: torch.cat([f[name] for f in fields]) for name in fields[0]})


def final_slots(played: Played, spans: Sequence[slice]) -> SlotStates:
    """What the members of some blocks ended with, as fossils."""
    return from_the_start(joined([part(played.record.final_slots, span) for span in spans]))


def train_fixed(
    setting: Setting,
    task: Task,
    members: torch.Tensor,
    slots: SlotStates | None = None,
    budget: float | None = None,
    restarts: int = 1,
) -> Played:
    """Networks that never change, for `budget` FLOPs a member, or for the minibatches of the setting.

    They are charged for no validation, but for the one that chooses the best of several restarts.
    """
    world = GrowthEnvironment(setting.spec(task, members))
    usual = setting.steps * setting.batches * float(prices_of(world, slots).batch.mean())
    return as_played(run_fixed(world, "fixed", budget or usual, slots, restarts), setting)


def as_played(run: ControllerRun, setting: Setting) -> Played:
    """A run as the study keeps it."""
    batches = round(run.epochs * setting.batches / run.record.num_steps)  # of all restarts together
    return Played(run.record, run.test.accuracy, run.record.spent, batches)


def training_alone(world: GrowthEnvironment) -> Doubles:
    """What bare hosts had spent on training by each step of an episode.  # [T + 1, N]"""
    batches = np.arange(world.steps + 1) * world.spec.population.batches_per_epoch
    return np.asarray(batches[:, None] * prices_of(world).batch, dtype=np.float64)
