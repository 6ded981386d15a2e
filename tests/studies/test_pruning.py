"""Pruning by magnitude: the schedule, the masks, and what they leave."""

from __future__ import annotations

import torch

from esper.population.optimiser import RowWeights
from esper.simic.environment import GrowthEnvironment
from studies.pruning import FIXED_FROM, Masks, parameters_left, prunable_weights
from studies.setting import ungrown
from tests.studies.worlds import TINY, task


def test_the_schedule_begins_full_and_ends_at_the_target() -> None:
    left = [parameters_left(done / 100, 900, 300) for done in range(101)]
    assert left[0] == left[20] == 900
    assert set(left[round(100 * FIXED_FROM) + 1 :]) == {300}
    assert left == sorted(left, reverse=True)
    assert left[43] < 600  # cubic: most goes early


def test_the_largest_weights_stay_and_what_is_gone_stays_gone() -> None:
    masks = Masks(torch.ones(1, 5, dtype=torch.bool), torch.tensor([True, True, True, True, False]))
    masks.shrink(torch.tensor([[3.0, -4.0, 1.0, 2.0, 0.0]]), parameters=3)  # a bias and two weights
    assert masks.kept.tolist() == [[True, True, False, False, True]]
    masks.shrink(torch.tensor([[0.1, 0.2, 9.0, 9.0, 0.0]]), parameters=2)
    assert masks.kept.tolist() == [[False, True, False, False, True]]


def test_pruned_weights_and_their_moments_are_zero() -> None:
    rows = RowWeights(*(torch.ones(1, 3) for _ in range(3)), torch.ones(1))
    masks = Masks(torch.tensor([[True, False, True]]), torch.ones(3, dtype=torch.bool))
    masks.project(rows)
    for values in (rows.weights, rows.first, rows.second):
        assert values.tolist() == [[1.0, 0.0, 1.0]]


def test_matrices_can_be_pruned_and_biases_cannot() -> None:
    world = GrowthEnvironment(ungrown(TINY.spec(task(), torch.arange(1))))
    host = world.population.bodies.host
    matrices = sum(p.numel() for p in host.parameters() if p.ndim > 1)
    assert int(prunable_weights(world.population.bodies).sum()) == matrices
