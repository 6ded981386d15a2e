"""Returns that can be foreseen are foreseen, noise is not."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from esper.simic.environment import GrowthEnvironment
from esper.simic.rollout import play
from esper.tamiyo.blocks import Blocks
from esper.tamiyo.scripted import RandomLegal, Static
from studies.foresight import COLUMNS, Foresight, Lives, Witness, foresee, read, table, watch
from tests.simic.worlds import make_spec

STEPS, MEMBERS = 4, 128


def lives(rng: np.random.Generator, visible: bool) -> Lives:
    """The world pays in every step, growth in the last; a feature shows what it will earn, or does not."""
    gain = rng.normal(size=MEMBERS)
    world = rng.normal(size=(STEPS, MEMBERS))
    rewards = world.copy()
    rewards[-1] += gain
    shown = np.broadcast_to(gain if visible else rng.normal(size=MEMBERS), (STEPS, MEMBERS))
    features = np.stack((shown, rng.normal(size=(STEPS, MEMBERS))), axis=-1)
    return Lives(features, np.zeros_like(features), rewards, world)


@pytest.mark.parametrize("visible", [True, False])
def test_what_lies_beyond_the_twin_is_foreseen_where_it_shows(visible: bool) -> None:
    rng = np.random.default_rng(0)
    found = foresee("made", [lives(rng, visible) for _ in range(3)], range(MEMBERS), gamma=1.0)
    assert found.trajectories == 3 * MEMBERS
    assert found.by_the_twin == pytest.approx(1 - 1 / (1 + 2.5), abs=0.1)  # 1 of growth, 1 to 4 of the world
    for share in (found.beyond, found.beyond_with_twin):
        assert share > 0.9 if visible else share < 0.1
    assert found.plain < (found.beyond if visible else 0.1)


def test_a_witness_sees_what_its_block_sees_and_changes_nothing() -> None:
    spec = make_spec(members=(1, 2, 1, 2), steps=3)
    plain = play(GrowthEnvironment(spec), Blocks({"twins": Static(), "ours": RandomLegal(0.5)}), 0)
    blocks = Blocks({"twins": Witness(Static()), "ours": Witness(RandomLegal(0.5))})
    found = watch(GrowthEnvironment(spec), blocks, 0)
    np.testing.assert_array_equal(found.rewards, plain.reward[:, 2:])
    np.testing.assert_array_equal(found.twin_rewards, plain.reward[:, :2])
    assert found.features.shape == found.twin_features.shape
    assert found.features.shape[:2] == (3, 2)
    np.testing.assert_array_equal(found.features[0], found.twin_features[0])  # nothing has grown yet
    assert torch.equal(spec.members, torch.tensor([1, 2, 1, 2]))


def test_the_table_has_a_line_for_every_family(tmp_path: Path) -> None:
    path = tmp_path / "foresight.json"
    assert read(path) == {}
    row = Foresight("signals", 480, 0.95, 0.71, 0.03, 0.17)
    path.write_text(json.dumps([row.__dict__]))
    assert read(path) == {"signals": row}
    assert table([row]).splitlines()[2] == "| signals | 480 | 0.95 | 0.71 | 0.03 | 0.17 |"
    assert len(COLUMNS) == 6
