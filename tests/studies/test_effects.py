"""Differences, their sizes and their intervals, by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from studies.effects import another_training, at_equal_parameters, cohens_d, effect, time_to, title
from studies.records import Arm


def arm(name: str, potential: list[float]) -> Arm:
    return Arm(name, potential, potential, [1] * len(potential), potential, [1.0], [0], [0.0], [0.0])


def test_cohens_d_by_hand() -> None:
    """Mean 2, deviation √((1 + 0 + 1) / 2) = 1."""
    assert cohens_d([1.0, 2.0, 3.0]) == pytest.approx(2.0)
    assert math.isnan(cohens_d([1.0, 1.0]))
    assert math.isnan(cohens_d([1.0]))


def test_one_more_training_may_lie_further_off_than_the_mean() -> None:
    """Three at 1, 2, 3: t(2) · 1 · √(1 + 1/3)."""
    assert another_training([1.0, 2.0, 3.0]) == pytest.approx(4.303 * math.sqrt(4 / 3), rel=1e-3)
    assert math.isnan(another_training([1.0]))


def test_an_effect_is_paired_by_member_and_told_over_seeds() -> None:
    ours = [arm("main-0", [0.5, 0.7, 0.6]), arm("main-1", [0.7, 0.9, 0.8])]
    found = effect(ours, [arm("static", [0.4, 0.5, 0.3])])
    gaps = np.array([0.2, 0.3, 0.4])  # seeds averaged, member by member
    assert found.mean == pytest.approx(0.3)
    assert found.half == pytest.approx(4.303 * gaps.std(ddof=1) / math.sqrt(3), rel=1e-3)
    assert found.size == pytest.approx(3.0)
    assert found.over_seeds == pytest.approx(12.706 * 0.1, rel=1e-3)  # seeds at .2 and .4


def test_seeds_are_paired_with_their_own_networks() -> None:
    ours = [arm("main-0", [1.0, 2.0]), arm("main-1", [5.0, 6.0])]
    finals = [arm("static-final of main-0", [0.5, 1.5]), arm("static-final of main-1", [4.5, 5.5])]
    found = effect(ours, finals)
    assert found.mean == pytest.approx(0.5)
    assert found.over_seeds == pytest.approx(0.0)


def test_titles_leave_the_seed_out() -> None:
    assert title("static-final of main-3, equal FLOPs") == "static-final of tamiyo, equal FLOPs"
    assert title("main-0, no ramp") == "tamiyo, no ramp"
    assert title("no_memory-0") == "no_memory-0"


def test_a_size_between_two_hosts_is_read_off_their_line() -> None:
    points = [(100.0, 0.5), (400.0, 0.7)]
    assert at_equal_parameters(points, 200.0) == pytest.approx(0.6)  # half-way in the logarithm
    assert math.isnan(at_equal_parameters(points, 50.0))
    assert math.isnan(at_equal_parameters(points[:1], 100.0))


def test_an_accuracy_is_reached_at_its_first_point() -> None:
    curve = Arm("a", [], [], [], [], [], [0, 10, 20], [0.1, 0.5, 0.6], [0.0, 3.0, 6.0])
    assert time_to(curve, 0.5).batches == 10
    assert time_to(curve, 0.55).flops == 6.0
    assert math.isnan(time_to(curve, 0.9).batches)
