"""Random germination at the rate of the trained controllers, found on members that are not judged."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from esper.simic.environment import GrowthEnvironment
from esper.simic.rollout import play
from esper.tamiyo.blocks import Blocks
from esper.tamiyo.controller import Controller
from esper.tamiyo.scripted import RandomLegal
from esper.tasks.task import Task
from studies.records import Calibration
from studies.setting import Setting

RATES = (0.05, 0.15, 0.4, 1.0)
EPISODE = 1 << 19  # neither an episode of training nor that of the evaluation


def calibrate(
    setting: Setting, task: Task, learned: Mapping[str, Controller], members: Tensor
) -> Calibration:
    """Play trained controllers beside random ones of several rates; nothing here opens the test split."""
    tried = {f"random {rate}": RandomLegal(rate) for rate in RATES}
    blocks = Blocks({**learned, **tried})
    world = GrowthEnvironment(setting.spec(task, blocks.members(members)))
    record = play(world, blocks, EPISODE)
    planted = {
        name: float(record.germinated[:, span].sum(axis=(0, 2)).mean())
        for name, span in blocks.spans(record.num_members).items()
    }
    wanted = float(np.mean([planted[name] for name in learned]))
    return match(wanted, [planted[name] for name in tried])


def match(wanted: float, germinations: list[float]) -> Calibration:
    """The rate that gives `wanted` germinations, between those that were tried.  # germinations of RATES"""
    rising = np.maximum.accumulate([0.0, *germinations])
    rate = float(np.interp(wanted, rising, [0.0, *RATES]))
    expected = float(np.interp(rate, [0.0, *RATES], rising))
    return Calibration(
        rate=round(rate, 4),
        wanted=round(wanted, 3),
        expected=round(expected, 3),
        rates=list(RATES),
        germinations=[round(g, 3) for g in germinations],
    )


def other_members(count: int) -> Tensor:
    return torch.arange(9000, 9000 + count)
