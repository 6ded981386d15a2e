"""Features: one pass over arrays against nested loops with individual element writes.

The baseline is the shape that a review of the earlier code quotes; it lives in the tests, where it is the
reference of the batched function.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from benchmarks.common import Case, Work
from esper.lifecycle.slot_config import SlotConfig
from esper.tamiyo.policy.features import (
    BASE_FEATURE_SIZE,
    COLUMNS,
    SLOT_FEATURE_SIZE,
    batch_obs_to_features,
    column_slice,
)
from tests.scenes import random_observation
from tests.tamiyo.features_by_element import (
    MemberReport,
    features_one_by_one,
    slot_features,
    to_reports,
    write_base,
)


def features_by_slot(batch: list[MemberReport], slot_config: SlotConfig) -> Tensor:
    """The mend that the review proposes: a NumPy array for each slot, one write into the tensor."""
    at = {c.name: column_slice(c.name).start for c in COLUMNS}
    features = torch.zeros(len(batch), BASE_FEATURE_SIZE + SLOT_FEATURE_SIZE * slot_config.num_slots)
    for env_idx, member in enumerate(batch):
        write_base(features, env_idx, member, at)
    for slot_idx, slot_id in enumerate(slot_config.slot_ids):
        block = np.zeros((len(batch), SLOT_FEATURE_SIZE), dtype=np.float32)
        for env_idx, member in enumerate(batch):
            for column, value in slot_features(member.slots[slot_id], at):
                block[env_idx, column] = value
        start = BASE_FEATURE_SIZE + slot_idx * SLOT_FEATURE_SIZE
        features[:, start : start + SLOT_FEATURE_SIZE] = torch.from_numpy(block)
    return features


def prepare(members: int, slots: int) -> Case:
    observation = random_observation(np.random.default_rng(0), members, slots)
    config = SlotConfig.grid(1, slots)
    reports = to_reports(observation, config)
    return Case(lambda: batch_obs_to_features(observation), lambda: features_one_by_one(reports, config))


def prepare_by_slot(members: int, slots: int) -> Case:
    config = SlotConfig.grid(1, slots)
    reports = to_reports(random_observation(np.random.default_rng(0), members, slots), config)
    return Case(lambda: features_by_slot(reports, config), lambda: features_one_by_one(reports, config))


WORKS = (
    Work("features", "arrays, one pass, against nested loops with element writes", prepare),
    Work("features_by_slot", "the mend that the review proposes", prepare_by_slot, (128,), (9, 25)),
)
