"""The reward is a potential and nothing else."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from esper.simic.config import RewardConfig
from esper.simic.learner import Learner
from esper.simic.state import compute_reward, potential
from esper.simic.trainer import Trainer
from tests.simic.worlds import make_agent, make_spec


def pay(mode: str, phi: list[float], gamma: float) -> list[float]:
    """The rewards of a course of potentials Φ_0 … Φ_T."""
    values = torch.tensor(phi, dtype=torch.float64).unsqueeze(1)
    last = torch.arange(len(phi) - 1).unsqueeze(1) == len(phi) - 2
    return [
        float(compute_reward(mode, gamma, values[0], values[t], values[t + 1], last[t]))
        for t in range(len(phi) - 1)
    ]


def test_potential_is_accuracy_less_rent() -> None:
    config = RewardConfig(accuracy_weight=2.0, rent_weight=0.1)
    phi = potential(torch.tensor([0.5, 0.9]), torch.tensor([1.0, math.e**2]), config)
    torch.testing.assert_close(phi, torch.tensor([1.0, 1.6]))


@settings(deadline=None, max_examples=50)
@given(st.lists(st.floats(-3, 3), min_size=2, max_size=12), st.floats(0.5, 1.0))
def test_shaped_rewards_telescope(phi: list[float], gamma: float) -> None:
    paid = pay("shaped", phi, gamma)
    total = sum(gamma**t * r for t, r in enumerate(paid))
    assert total == pytest.approx(gamma ** len(paid) * phi[-1] - phi[0], abs=1e-9)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.floats(-3, 3), min_size=2, max_size=12))
def test_sparse_pays_the_whole_gain_once(phi: list[float]) -> None:
    paid = pay("sparse", phi, 0.9)
    assert paid[:-1] == [0.0] * (len(paid) - 1)
    assert paid[-1] == pytest.approx(phi[-1] - phi[0], abs=1e-9)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.floats(-3, 3), min_size=1, max_size=6), st.integers(1, 4))
def test_no_loop_of_actions_can_farm_it(loop: list[float], rounds: int) -> None:
    phi = [0.25, *[*loop, 0.25] * rounds]  # grow, shrink, and be back where it began
    assert sum(pay("shaped", phi, 1.0)) == pytest.approx(0.0, abs=1e-9)
    assert sum(pay("sparse", phi, 1.0)) == pytest.approx(0.0, abs=1e-9)


def test_a_run_with_two_discounts_is_refused() -> None:
    with pytest.raises(ValueError, match=r"gamma is 0.9 and the agent's is 0.995"):
        Trainer([replace(make_spec((0,)), gamma=0.9)], [Learner("agent", make_agent(), 6)], rounds=1)
