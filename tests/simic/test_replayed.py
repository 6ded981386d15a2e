"""A decision path that is replayed makes the same decisions, to the bit."""

from __future__ import annotations

import math
from dataclasses import fields
from unittest.mock import PropertyMock, patch

import numpy as np
import pytest
import torch

from esper.population.population import Population
from esper.simic.agent.ppo import PPOAgent, PPOConfig
from esper.simic.config import lifecycle_for
from esper.simic.environment import StepResult
from esper.simic.learner import LearnedController
from esper.simic.rollout import EpisodeRecord, play
from esper.tamiyo.policy.network import TamiyoNet, TamiyoNetConfig
from esper.utils.graphs import MAX_GRAPHS, Graphed, GraphPool
from tests.cpu_graphs import graphs_on_cpu
from tests.simic.worlds import make_residual


def episodes(clock: str, replayed: bool) -> tuple[list[EpisodeRecord], int]:
    """Two episodes of an untrained policy in which members break, and how many functions were captured."""
    rules = lifecycle_for(8).model_copy(update={"allow_unfinished": True})
    with (
        graphs_on_cpu() as made,
        patch.object(Population, "replays", new_callable=PropertyMock, return_value=replayed),
    ):
        environment = make_residual(range(6), 8, clock, lifecycle=rules)
        torch.manual_seed(0)
        controller = LearnedController(PPOAgent(TamiyoNet(TamiyoNetConfig(width=16)), PPOConfig()))
        if replayed:
            controller._decision = Graphed(controller._decide, environment._apply.pool)

        def break_one(_: StepResult) -> None:
            if environment.clock in (3, 5):
                environment.population.hosts.weights[environment.clock % 2] = math.nan

        return [play(environment, controller, k, on_step=break_one) for k in range(2)], len(made)


@pytest.mark.parametrize("clock", ["steps", "compute"])
def test_replayed_decisions_are_the_decisions(clock: str) -> None:
    (plain, none), (replayed, made) = episodes(clock, False), episodes(clock, True)
    assert none == 0
    assert 4 <= made <= 8  # decision, rules, what follows an epoch, standing, prices; some in two makes
    assert all(record.panicked.any() for record in plain)
    for here, there in zip(replayed, plain, strict=True):
        for field in fields(EpisodeRecord):
            value = getattr(there, field.name)
            if isinstance(value, np.ndarray):
                np.testing.assert_array_equal(getattr(here, field.name), value, err_msg=field.name)


def test_what_is_given_back_is_not_overwritten() -> None:
    with graphs_on_cpu():
        double = Graphed(lambda x, scale: (x * scale, None, "as it is"), GraphPool())
        results = [double(torch.full((2,), float(k)), 2.0) for k in range(4)]
        assert [float(found[0]) for found, _, _ in results] == [0.0, 2.0, 4.0, 6.0]
        assert results[0][1:] == (None, "as it is")
        assert double(torch.ones(2), 3.0)[0].tolist() == [3.0, 3.0]  # another make
        assert double(torch.ones(3), scale=3.0)[0].tolist() == [3.0, 3.0, 3.0]
        for size in range(2 * MAX_GRAPHS):
            assert double(torch.ones(size), 2.0)[0].tolist() == [2.0] * size
        assert len(double._graphs) == MAX_GRAPHS
