"""A change of the lifecycle holds for its members and for no others."""

from __future__ import annotations

import numpy as np
import torch

from esper.lifecycle.stages import Stage
from esper.simic.rollout import Floats, Ints, play
from esper.tamiyo.scripted import Scheduled
from studies.ablations import CHANGES, AblatedEnvironment
from tests.simic.worlds import QUICK, make_spec


def lived(change: str) -> tuple[AblatedEnvironment, Ints, Floats]:
    """Members 0 and 1 live plainly, their twins 2 and 3 under a change: alphas and stages when they train."""
    spec = make_spec(members=(0, 1, 0, 1), steps=6)
    world = AblatedEnvironment(spec, {change: torch.tensor([False, False, True, True])})
    record = play(world, Scheduled((0,), gates=QUICK.gates), episode=1)
    return world, record.seen_stage[1:], record.alpha.max(axis=2)


def test_without_isolation_a_seed_is_heard_in_its_first_epoch() -> None:
    _, stage, alpha = lived("no isolation")
    assert (stage[0, :2].max(axis=1) == Stage.GERMINATED).all()
    assert (stage[0, 2:].max(axis=1) == Stage.BLENDING).all()
    assert (alpha[1, 2:] > 0).all()  # what the ramp had reached by the next action
    assert (alpha[1, :2] == 0).all()
    assert (alpha[1, 2:] < 1).all()  # the ramp stays


def test_without_a_ramp_alpha_is_nothing_or_all() -> None:
    _, _, alpha = lived("no ramp")
    assert ((alpha[-1, :2] > 0) & (alpha[-1, :2] < 1)).all()  # plain members are on their way
    seen = np.unique(alpha[:, 2:])
    assert set(seen.tolist()) <= {0.0, 1.0}
    assert 1.0 in seen


def test_a_fresh_optimiser_has_forgotten_its_steps() -> None:
    world, _, _ = lived("fresh optimiser")
    steps = world.population.hosts.steps
    assert (steps[2:] < steps[:2]).all()
    assert (steps[2:] > 0).all()


def test_without_a_change_nothing_changes() -> None:
    spec = make_spec(members=(0, 1), steps=5)
    nobody = {name: torch.zeros(2, dtype=torch.bool) for name in CHANGES}
    plain = play(AblatedEnvironment(spec, {}), Scheduled((0,), gates=QUICK.gates), episode=1)
    same = play(AblatedEnvironment(spec, nobody), Scheduled((0,), gates=QUICK.gates), episode=1)
    np.testing.assert_array_equal(plain.accuracy, same.accuracy)
    np.testing.assert_array_equal(plain.alpha, same.alpha)
