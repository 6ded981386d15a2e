"""The population as Gymnasium knows environments."""

from __future__ import annotations

import subprocess
import sys
import warnings

import numpy as np
import pytest

gymnasium = pytest.importorskip("gymnasium")

from gymnasium.utils.env_checker import check_env  # noqa: E402
from gymnasium.vector import AutoresetMode  # noqa: E402

import esper.gym  # noqa: E402
from esper.lifecycle.actions import NUM_HEADS, Head, Op, Rate, head_sizes  # noqa: E402
from esper.lifecycle.rates import legal_rates  # noqa: E402
from tests.waiting import MINUTE  # noqa: E402

OPTIONS = {"task": "spirals", "steps": 4, "batches_per_epoch": 1}


@pytest.fixture
def envs() -> gymnasium.vector.VectorEnv:
    return gymnasium.make_vec(esper.gym.ENVIRONMENT_ID, num_envs=3, **OPTIONS)


def legal_actions(masks: np.ndarray, sizes: tuple[int, ...], seed: int) -> np.ndarray:
    """One choice per head that its mask allows."""
    draw = np.random.default_rng(seed)
    heads = np.split(masks, np.cumsum(sizes)[:-1], axis=1)
    return np.stack([[draw.choice(np.flatnonzero(row)) for row in head] for head in heads], axis=1)


@pytest.mark.parametrize("rates", [False, True])
def test_gymnasiums_own_checker_finds_nothing(rates: bool) -> None:
    env = gymnasium.make(esper.gym.ENVIRONMENT_ID, disable_env_checker=True, rates=rates, **OPTIONS)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check_env(env.unwrapped)
    assert [str(warning.message) for warning in caught] == []


def test_spaces_masks_and_info() -> None:
    long_enough = {**OPTIONS, "steps": 6}  # to plant a seed and raise it
    envs = gymnasium.make_vec(esper.gym.ENVIRONMENT_ID, num_envs=3, **long_enough)
    observations, infos = envs.reset(seed=1)
    sizes = head_sizes(2)
    assert envs.single_action_space.nvec.tolist() == [2, 16, 4, 3, 3, 4, 5, 6] == list(sizes)
    assert envs.observation_space.contains(observations)
    assert infos["action_mask"].shape == (3, sum(sizes))
    ops = infos["action_mask"][:, -sizes[Head.OP] :]
    assert ops[:, [Op.WAIT, Op.GERMINATE]].all()
    assert not ops[:, [Op.PRUNE, Op.FOSSILIZE, Op.ADVANCE, Op.SET_ALPHA_TARGET]].any()
    assert np.array_equal(infos["slot_by_op"].any(axis=2), ops)


def test_seeding_repeats_a_run_and_episodes_differ(envs: gymnasium.vector.VectorEnv) -> None:
    def play(seed: int | None) -> list[np.ndarray]:
        observations, infos = envs.reset(seed=seed)
        seen = [observations]
        for t in range(4):
            actions = legal_actions(infos["action_mask"], head_sizes(3), t)
            observations, rewards, *_, infos = envs.step(actions)
            seen += [observations, rewards]
        return seen

    first, next_episode, again, other = play(7), play(None), play(7), play(8)
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not np.array_equal(first[0], next_episode[0])
    assert not np.array_equal(first[0], other[0])


def test_the_end_and_the_step_after_it() -> None:
    envs = gymnasium.make_vec(esper.gym.ENVIRONMENT_ID, num_envs=2, **OPTIONS)
    assert envs.metadata["autoreset_mode"] == AutoresetMode.NEXT_STEP
    envs.reset(seed=0)
    waits = np.zeros((2, 8), dtype=np.int64)
    ends = [envs.step(waits)[2:4] for _ in range(4)]
    terminated, truncated = (np.stack(part) for part in zip(*ends, strict=True))
    assert terminated.tolist() == [[False] * 2] * 3 + [[True] * 2]
    assert not truncated.any()
    observations, rewards, terminated, truncated, infos = envs.step(waits)  # resets; the actions are ignored
    assert not rewards.any()
    assert not terminated.any()
    assert not truncated.any()
    assert infos["action_mask"].any()
    assert observations[0, 0] == 0.0  # the clock stands at the beginning again


def test_an_illegal_pair_costs_the_step_and_changes_nothing(envs: gymnasium.vector.VectorEnv) -> None:
    envs.reset(seed=0)
    action = np.zeros((3, 8), dtype=np.int64)
    action[:, Head.OP] = Op.FOSSILIZE
    *_, infos = envs.step(action)
    assert not infos["succeeded"].any()
    assert (infos["executed_op"] == Op.WAIT).all()


def test_with_rates_there_is_a_head_for_the_learning_rate() -> None:
    envs = gymnasium.make_vec(
        esper.gym.ENVIRONMENT_ID, num_envs=3, rates=True, rate_span=100.0, **{**OPTIONS, "steps": 6}
    )
    sizes = (*head_sizes(2), len(Rate))
    assert envs.single_action_space.nvec.tolist() == list(sizes)
    observations, infos = envs.reset(seed=1)
    growth = envs._growth
    for t in range(6):
        assert envs.observation_space.contains(observations)
        assert infos["action_mask"].shape == (3, sum(sizes))
        assert growth.state.rates is not None
        legal = legal_rates(growth.state.rates, growth.derived.spent).numpy()
        np.testing.assert_array_equal(infos["action_mask"][:, -len(Rate) :], legal)
        before = growth.state.rates.scale.clone()
        actions = legal_actions(infos["action_mask"], sizes, t)
        actions[:, :NUM_HEADS] = 0
        observations, *_, infos = envs.step(actions)
        factors = np.array([1.0, 2.0, 0.5, 1.0])[actions[:, -1]]
        np.testing.assert_allclose(growth.state.rates.scale, before.numpy() * factors, rtol=1e-6)


def test_step_before_reset_is_refused() -> None:
    envs = gymnasium.make_vec(esper.gym.ENVIRONMENT_ID, num_envs=2, **OPTIONS)
    with pytest.raises(gymnasium.error.ResetNeeded, match="call reset first"):
        envs.step(np.zeros((2, 8), dtype=np.int64))


def test_registration_is_late_and_needs_no_torch() -> None:
    late = "import sys, esper; assert 'gymnasium' not in sys.modules"
    known = "import gymnasium, sys, esper; assert 'esper/Growth-v0' in gymnasium.registry"
    for code in (late, known + "; assert 'torch' not in sys.modules"):
        subprocess.run([sys.executable, "-c", code], check=True, timeout=MINUTE)


def test_maskable_ppo_trains_on_it_unchanged() -> None:
    pytest.importorskip("sb3_contrib")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from examples.maskable_ppo import main

        rounds = main(["--steps", "32", "--members", "4", "--horizon", "4"])
    assert len(rounds) == 2
    assert np.isfinite(rounds).all()
