"""What the baseline takes away is what the advantages lack."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from esper.simic.rollout import play
from esper.simic.telemetry import explained_by_baseline, returns_to_go
from esper.tamiyo.scripted import Static
from tests.simic.worlds import make_environment, make_trainer


@given(st.integers(1, 6), st.integers(1, 4), st.floats(0, 1), st.integers(0, 99))
def test_returns_to_go_are_the_sums_that_they_stand_for(
    steps: int, members: int, gamma: float, seed: int
) -> None:
    rewards = np.random.default_rng(seed).normal(size=(steps, members))
    found = returns_to_go(rewards, gamma)
    for t in range(steps):
        powers = gamma ** np.arange(steps - t)
        np.testing.assert_allclose(found[t], powers @ rewards[t:], atol=1e-12)


@pytest.mark.parametrize("twins", [True, False])
def test_the_advantages_hold_what_the_baseline_left(twins: bool) -> None:
    trainer = make_trainer(twins=twins)
    told = trainer.play_round()["agent"]
    expected = play(make_environment(), Static(), 0).reward if twins else None
    gamma, buffer = told.record.gamma, trainer.learners["agent"].buffer
    share = explained_by_baseline(buffer, told.record, expected)
    buffer.compute_advantages_and_returns(gamma, lam=1.0)
    left = buffer.advantages.double().var(correction=0)
    assert share == pytest.approx(1 - float(left) / returns_to_go(told.record.reward, gamma).var(), rel=1e-3)
    assert told.summary.extra["explained_by_baseline"] == pytest.approx(share, abs=1e-4)
