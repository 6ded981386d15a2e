"""What networks that never change cost, and how long they may train for what growth spent."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from esper.simic.environment import GrowthEnvironment
from esper.tamiyo.scripted import Scheduled
from studies.finals import final_slots, train_fixed
from studies.records import play_and_test
from studies.setting import GATES
from tests.studies.worlds import TINY, task


def host_price() -> float:
    """A forward pass of the host: two operations per weight of a Linear layer and sample."""
    spirals = task()
    sizes = [spirals.input_shape[0], *[spirals.host.options["width"]] * 3, spirals.num_classes]
    return 2 * sum(a * b for a, b in pairwise(sizes))


def test_a_fixed_network_is_charged_for_its_training_alone() -> None:
    """A training sample costs three passes; as many minibatches as the setting has."""
    played = train_fixed(TINY, task(), torch.arange(2))
    assert played.record.num_steps * played.batches == TINY.steps * TINY.batches
    np.testing.assert_allclose(played.spent[-1], TINY.steps * TINY.batches * 3 * 64 * host_price())


def test_the_best_of_several_shares_one_budget() -> None:
    batch, samples = 3 * 64 * host_price(), min(len(task().validation), 512)
    budget = 40 * batch + 2 * samples * host_price()
    played = train_fixed(TINY, task(), torch.arange(2), budget=budget, restarts=2)
    np.testing.assert_allclose(played.spent[-1], budget)
    assert played.record.num_steps * played.batches == 40


def test_the_networks_of_growth_are_trained_from_the_start_for_the_same_compute() -> None:
    longer = replace(TINY, steps=16)  # so that a seed can be raised
    world = GrowthEnvironment(longer.spec(task(), torch.arange(2)))
    grown = play_and_test(world, Scheduled((0,), GATES))
    slots = final_slots(grown, [slice(0, 2)])
    played = train_fixed(longer, task(), torch.arange(2), slots, float(grown.spent[-1].mean()))
    assert played.spent[-1].mean() == pytest.approx(grown.spent[-1].mean(), rel=0.03)
    assert (played.record.parameters[0] == played.record.parameters[-1]).all()
    assert (played.record.parameters[-1] > world.host_parameters).all()
