"""What a network costs from the start, and how long it may train for what growth spent."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from esper.lifecycle.slot_states import SlotStates
from esper.simic.environment import GrowthEnvironment
from studies.finals import equal_budget, prices
from studies.setting import Setting, ungrown
from tests.studies.worlds import TINY, task


def test_the_budget_is_met_by_hand() -> None:
    """An epoch of 2 minibatches at 10 and a validation at 5 costs 25; 125 pays for 5 of them."""
    found = equal_budget(125.0, 10.0, 5.0, Setting(steps=4, batches=2))
    assert (found.steps, found.batches) == (5, 2)


def test_the_budget_of_no_growth_is_the_same_training() -> None:
    found = equal_budget(24 * (24 * 10.0 + 5.0), 10.0, 5.0, Setting(steps=24, batches=24))
    assert found.steps * (found.batches * 10.0 + 5.0) == 24 * (24 * 10.0 + 5.0)


@pytest.mark.parametrize("ratio", [0.8, 1.03, 1.4, 2.5])
def test_the_budget_is_met_to_within_a_percent(ratio: float) -> None:
    spent = ratio * 24 * (24 * 7.0 + 11.0)
    found = equal_budget(spent, 7.0, 11.0, Setting(steps=24, batches=24))
    assert found.steps * (found.batches * 7.0 + 11.0) == pytest.approx(spent, rel=0.01)


def test_prices_of_a_host_by_hand() -> None:
    """Two operations per weight of a Linear layer and sample; a training sample costs three passes."""
    spirals = task()
    world = GrowthEnvironment(ungrown(TINY.spec(spirals, torch.arange(2))))
    sizes = [spirals.input_shape[0], *[spirals.host.options["width"]] * 3, spirals.num_classes]
    forward = 2 * sum(a * b for a, b in pairwise(sizes))
    price = prices(world, spirals, SlotStates.empty(2, world.num_slots))
    np.testing.assert_allclose(price.batch, 3 * 64 * forward)
    np.testing.assert_allclose(price.validation, min(len(spirals.validation), 512) * forward)
