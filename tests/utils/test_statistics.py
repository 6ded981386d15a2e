"""Intervals against scipy and known values, and honest verdicts."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from esper.utils.statistics import clear_of_zero, learning_verdict, mean_interval, t_quantile


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 400))
def test_t_quantile_against_scipy(degrees: int) -> None:
    assert t_quantile(degrees) == pytest.approx(float(stats.t.ppf(0.975, degrees)), abs=3e-3)


def test_mean_interval_of_known_values() -> None:
    mean, half = mean_interval([1.0, 2.0, 3.0, float("nan")])
    assert mean == 2.0
    assert half == pytest.approx(4.302653 * 1.0 / math.sqrt(3))
    assert math.isnan(mean_interval([])[0])
    assert math.isnan(mean_interval([1.0])[1])


def test_several_intervals_that_hold_at_once_are_wider() -> None:
    assert clear_of_zero(1.0, 0.9, count=10)
    assert not clear_of_zero(1.0, 0.9, count=10, comparisons=5)
    assert t_quantile(9, 5) == pytest.approx(3.25, abs=0.005), "99.5 % of Student's t with 9 degrees"


@pytest.mark.parametrize(
    ("returns", "says"),
    [
        ([0.0, 0.1] * 2, "too few"),
        ([0.0, 0.01] * 4 + [0.5, 0.51] * 4, "The return rose from +0.005"),
        ([0.5, 0.51] * 4 + [0.0, 0.01] * 4, "The return fell"),
        ([0.0, 0.5] * 8, "did not clearly rise"),
        ([float("nan")] * 20, "too few"),
        ([0.1], "1 round is too few"),
    ],
)
def test_the_verdict_is_honest(returns: list[float], says: str) -> None:
    assert says in learning_verdict(returns)
