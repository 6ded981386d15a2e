"""Controllers side by side decide what each would decide alone."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import numpy as np
import torch

from esper.lifecycle.actions import Blueprint, Head, Op
from esper.simic.learner import LearnedController
from esper.simic.rollout import Episode, play
from esper.tamiyo import scripted
from esper.tamiyo.controller import Blocks, Controller
from esper.tamiyo.schedule import PacedSchedule, Schedule, ScheduleLine
from esper.tamiyo.scripted import Heuristic, RandomLegal, Static
from tests.controllers import Scheduled
from tests.simic.worlds import make_agent, make_environment

CONTROLLERS: dict[str, Callable[[], Controller]] = {
    "static": Static,
    "random": RandomLegal,
    "scheduled": lambda: Scheduled(range(0, 99, 2)),
}


def test_a_block_lives_as_it_would_alone_also_beside_one_that_decides_several_actions_at_once() -> None:
    """The others wait after their one action, and only those who look are charged for looking."""
    lines = [ScheduleLine(0.2, Blueprint.MLP_SMALL), ScheduleLine(0.5, Blueprint.NORM, slots=(1,))]
    controllers: dict[str, Callable[[], Controller]] = {**CONTROLLERS, "schedule": lambda: Schedule(lines)}
    ids = torch.arange(7, 9)
    blocks = Blocks({name: make() for name, make in controllers.items()})
    assert blocks.metric_users(8).tolist() == [False] * 2 + [True] * 4 + [False] * 2
    assert blocks.uses_metrics
    environment = make_environment(members=blocks.members(ids).tolist())
    together = play(environment, blocks, episode=3)
    lists = blocks.decide(environment.observe(), environment.masks(), 5)
    assert len(lists) == 4 * environment.num_slots
    for actions in lists[1:]:
        assert (actions[Head.OP][:6] == Op.WAIT).all()
    spans = blocks.spans(together.num_members)
    for name, make in controllers.items():
        alone = play(make_environment(members=ids.tolist()), make(), episode=3)
        if name != "schedule":
            np.testing.assert_array_equal(together.choices[:, spans[name]], alone.choices)
        np.testing.assert_array_equal(together.stage[:, spans[name]], alone.stage)
        np.testing.assert_allclose(together.accuracy[:, spans[name]], alone.accuracy, atol=1e-6)
        np.testing.assert_allclose(together.flops[spans[name]], alone.flops)


@mock.patch.multiple(scripted, PLATEAU_POINTS=100, REST_EPOCHS=1)  # so that the heuristic acts in 8 steps
def test_an_episode_resumed_with_any_controller_goes_on_to_the_same_bits() -> None:
    """At a saved state that nothing changes afterwards, by controllers that never saw the steps before."""

    def begin() -> Episode:
        blocks = Blocks(
            {
                "heuristic": Heuristic(),
                "schedule": Schedule.parse("mlp_small@0.1x2+norm@0.5"),
                "paced": PacedSchedule.parse("mlp_small@0.1+norm@0.5"),
                "learned": LearnedController(make_agent()),
                **{name: make() for name, make in CONTROLLERS.items()},
            }
        )
        members = blocks.members(torch.arange(2)).tolist()
        return Episode(make_environment(members=members, steps=8), blocks, 1)

    whole, saved = begin(), {}
    while not whole.environment.done:
        whole.step()
        if whole.environment.clock in (1, 3, 5):
            saved[whole.environment.clock] = (whole.state_dict(), whole.environment.state_dict())
    wanted = whole.record().tensors()
    assert list(saved) == [1, 3, 5]
    for episode, environment in saved.values():
        resumed = begin()
        resumed.environment.load_state_dict(environment)
        resumed.load_state_dict(episode)
        while not resumed.environment.done:
            resumed.step()
        found = resumed.record().tensors()
        for name, value in wanted.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=0, equal_nan=True, msg=name)
