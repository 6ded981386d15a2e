"""Action masks: the batched function against one member after another, stacked.

The baseline is the shape that a review of the earlier code quotes; it lives in the tests, where it is the
reference of the batched function.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from benchmarks.common import Case, Work
from esper.lifecycle.slot_config import SlotConfig
from esper.tamiyo.policy.action_masks import SlotMaskState, compute_batch_masks
from tests.scenes import random_states
from tests.tamiyo.masks_by_member import compute_action_masks, masks_one_by_one, to_mask_states


def masks_preallocated(
    batch_slot_states: list[list[SlotMaskState | None]], slot_config: SlotConfig, device: str = "cpu"
) -> dict[str, Tensor]:
    """The mend that the review proposes: batch tensors first, filled member by member."""
    first = compute_action_masks(batch_slot_states[0], slot_config, device)
    batch_masks = {key: mask.new_zeros(len(batch_slot_states), *mask.shape) for key, mask in first.items()}
    for i, slot_states in enumerate(batch_slot_states):
        single_masks = compute_action_masks(slot_states, slot_config, device)
        for key, mask in single_masks.items():
            batch_masks[key][i] = mask
    return batch_masks


def prepare(members: int, slots: int) -> Case:
    states = random_states(np.random.default_rng(0), members, slots)
    objects, config = to_mask_states(states), SlotConfig.grid(1, slots)
    return Case(lambda: compute_batch_masks(states, config), lambda: masks_one_by_one(objects, config))


def prepare_from_objects(members: int, slots: int) -> Case:
    objects = to_mask_states(random_states(np.random.default_rng(0), members, slots))
    config = SlotConfig.grid(1, slots)
    return Case(lambda: compute_batch_masks(objects, config), lambda: masks_one_by_one(objects, config))


def prepare_preallocated(members: int, slots: int) -> Case:
    objects = to_mask_states(random_states(np.random.default_rng(0), members, slots))
    config = SlotConfig.grid(1, slots)
    return Case(lambda: masks_preallocated(objects, config), lambda: masks_one_by_one(objects, config))


WORKS = (
    Work("masks", "arrays, all members at once, against one member after another", prepare),
    Work("masks_from_objects", "the same with per-slot objects as our input too", prepare_from_objects),
    Work("masks_preallocated", "the mend that the review proposes", prepare_preallocated, (128,), (3, 25)),
)
