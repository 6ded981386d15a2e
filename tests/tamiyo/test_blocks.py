"""Controllers side by side decide what each would decide alone."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from esper.lifecycle.actions import Head, Op
from esper.simic.rollout import play
from esper.tamiyo.blocks import Blocks
from esper.tamiyo.controller import Controller
from esper.tamiyo.schedule import Schedule
from esper.tamiyo.scripted import RandomLegal, Static
from tests.controllers import Scheduled
from tests.simic.worlds import make_environment

CONTROLLERS: dict[str, Callable[[], Controller]] = {
    "static": Static,
    "random": RandomLegal,
    "scheduled": lambda: Scheduled(range(0, 99, 2)),
}


def test_a_block_lives_as_it_would_alone() -> None:
    ids = torch.arange(7, 10)
    blocks = Blocks({name: make() for name, make in CONTROLLERS.items()})
    together = play(make_environment(members=blocks.members(ids).tolist()), blocks, episode=3)
    spans = blocks.spans(together.num_members)
    for name, make in CONTROLLERS.items():
        alone = play(make_environment(members=ids.tolist()), make(), episode=3)
        np.testing.assert_array_equal(together.choices[:, spans[name]], alone.choices)
        np.testing.assert_allclose(together.accuracy[:, spans[name]], alone.accuracy, atol=1e-6)
        np.testing.assert_allclose(together.flops[spans[name]], alone.flops)


def test_a_block_that_decides_several_actions_at_once_does_not_disturb_the_others() -> None:
    """The others wait after their one action, and only those who look are charged for looking."""
    controllers: dict[str, Callable[[], Controller]] = {
        "static": Static,
        "schedule": lambda: Schedule([(0.2, "mlp_small"), (0.5, "norm", [1])]),
        "random": RandomLegal,
    }
    ids = torch.arange(2)
    blocks = Blocks({name: make() for name, make in controllers.items()})
    assert blocks.looking(6).tolist() == [False, False, False, False, True, True]
    assert blocks.looks
    environment = make_environment(members=blocks.members(ids).tolist())
    together = play(environment, blocks, episode=3)
    observation, masks = environment.observe(), environment.masks()
    lists = blocks.decide(observation, masks, 5)
    assert len(lists) == 4 * environment.num_slots
    for actions in lists[1:]:
        assert (actions[Head.OP][[0, 1, 4, 5]] == Op.WAIT).all()
    spans = blocks.spans(together.num_members)
    for name, make in controllers.items():
        alone = play(make_environment(members=ids.tolist()), make(), episode=3)
        np.testing.assert_array_equal(together.stage[:, spans[name]], alone.stage)
        np.testing.assert_allclose(together.accuracy[:, spans[name]], alone.accuracy, atol=1e-6)
        np.testing.assert_allclose(together.flops[spans[name]], alone.flops)


def test_members_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="do not divide into 2 equal blocks"):
        Blocks({"a": Static(), "b": Static()}).spans(5)


def test_no_controllers_are_refused() -> None:
    with pytest.raises(ValueError, match="name at least one"):
        Blocks({})
