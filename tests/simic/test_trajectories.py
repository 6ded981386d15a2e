from __future__ import annotations

from pathlib import Path

import numpy as np
from safetensors.numpy import load

from esper.builders import make_environment
from esper.config import load_config
from esper.lifecycle.actions import Blueprint, Head
from esper.runs.trajectories import NO_BLUEPRINT, UNMEASURED, TrajectoryFolder
from esper.simic.rollout import play
from esper.simic.telemetry import build_trajectories, describe_host
from tests.controllers import Scheduled
from tests.tiny import TINY


def test_trajectories_hold_what_the_episode_recorded(tmp_path: Path) -> None:
    environment = make_environment(load_config(overrides=[*TINY, "episode.steps=8"]))
    record = play(environment, Scheduled(range(0, 99, 2)), 0)
    folder = TrajectoryFolder(tmp_path)
    folder.write(build_trajectories(record, describe_host(environment.population), 5))
    columns = load(folder.read_bytes(5))
    np.testing.assert_array_equal(columns["stage"], record.stage)
    np.testing.assert_allclose(columns["alpha"] / 255, record.alpha, atol=0.002)
    np.testing.assert_array_equal(
        np.where(columns["blueprint"] == NO_BLUEPRINT, -1, columns["blueprint"].astype(int)), record.blueprint
    )
    np.testing.assert_array_equal(columns["op"], record.choices[:, :, Head.OP])
    measured = np.isfinite(record.contribution[:-1])
    np.testing.assert_array_equal(columns["contribution"] != UNMEASURED, measured)
    np.testing.assert_allclose(
        columns["contribution"][measured] / 100, record.contribution[:-1][measured], atol=0.006
    )
    np.testing.assert_array_equal(columns["parameters"], record.parameters)
    np.testing.assert_allclose(columns["spent"][-1], record.flops, rtol=1e-6)
    assert (np.diff(columns["spent"], axis=0) > 0).all()
    assert record.germinated.any()
    assert columns["seed_parameters"].shape == (environment.num_slots, len(Blueprint))


def test_the_parts_of_a_host_add_up_to_it() -> None:
    environment = make_environment(load_config(overrides=list(TINY)))
    host = environment.population.network.host
    parts = describe_host(environment.population)
    assert len(parts) == host.num_slots + 1
    assert parts[-1].name == "head"
    assert sum(part.parameters for part in parts) == environment.host_parameters
    assert all(part.layers for part in parts)
