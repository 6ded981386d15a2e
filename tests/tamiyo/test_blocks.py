"""Controllers side by side decide what each would decide alone."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from esper.simic.rollout import play
from esper.tamiyo.blocks import Blocks
from esper.tamiyo.controller import Controller
from esper.tamiyo.scripted import Periodic, RandomLegal, Static
from tests.simic.worlds import make_environment

CONTROLLERS: dict[str, Callable[[], Controller]] = {
    "static": Static,
    "random": RandomLegal,
    "periodic": lambda: Periodic(period=2),
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


def test_members_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="do not divide into 2 equal blocks"):
        Blocks({"a": Static(), "b": Static()}).spans(5)


def test_no_controllers_are_refused() -> None:
    with pytest.raises(ValueError, match="name at least one"):
        Blocks({})
