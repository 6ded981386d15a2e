"""The learner on Gymnasium environments: ends, cuts, masks, and that it learns."""

from __future__ import annotations

import sys
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from numpy.typing import NDArray
from torch import Tensor

from esper.foundation.rows import map_tensors
from esper.simic.agent.config import PPOConfig
from esper.simic.agent.rollout_buffer import Sequences, TamiyoRolloutBuffer
from esper.simic.gym_training import GymConfig, GymWorld, Point, make_agent, train
from esper.tamiyo.policy.flat import FlatObservation, FlatPolicy, FlatPolicyConfig

MODES = [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP]
Floats = NDArray[np.float32]


class Clock(gymnasium.Env[Floats, np.int64]):
    """Shows 1, 2, 3, ... and pays what it shows next; ends or is cut after `length` steps."""

    observation_space = spaces.Box(0, np.inf, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, length: int, cut: bool) -> None:
        self.length, self.cut = length, cut

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Floats, dict[str, Any]]:
        self.time = 1
        return np.array([1.0], np.float32), {}

    def step(self, action: np.int64) -> tuple[Floats, float, bool, bool, dict[str, Any]]:
        self.time += 1
        over = self.time == self.length + 1
        return np.array([self.time], np.float32), self.time, over and not self.cut, over and self.cut, {}


class Doors(gymnasium.Env[Floats, NDArray[np.int64]]):
    """Two heads of 3 and 2 doors, counted from 5 and 0; the open ones change, and a closed one raises."""

    observation_space = spaces.Box(0, 1, (1, 1), np.float32)
    action_space = spaces.MultiDiscrete([3, 2], start=[5, 0])

    def __init__(self, as_tuple: bool) -> None:
        self.as_tuple = as_tuple

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Floats, dict[str, Any]]:
        super().reset(seed=seed)
        self.time = 0
        return self._next()

    def step(self, action: NDArray[np.int64]) -> tuple[Floats, float, bool, bool, dict[str, Any]]:
        first, second = (int(choice) for choice in action)
        assert self.first[first - 5]
        assert self.second[second]
        self.time += 1
        seen, info = self._next()
        return seen, 1.0, self.time == 4, False, info

    def _next(self) -> tuple[Floats, dict[str, Any]]:
        self.first, self.second = self.np_random.random(3) < 0.4, self.np_random.random(2) < 0.4
        self.first[self.np_random.integers(3)] = self.second[self.np_random.integers(2)] = True
        if self.time == 4:  # nothing is legal once it is over
            self.first[:], self.second[:] = False, False
        both = (self.first, self.second)
        return np.zeros((1, 1), np.float32), {"action_mask": both if self.as_tuple else np.concatenate(both)}


class Arms(gymnasium.Env[Floats, np.int64]):
    """Two arms; the second pays."""

    observation_space = spaces.Box(0, 1, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Floats, dict[str, Any]]:
        return np.ones(1, np.float32), {}

    def step(self, action: np.int64) -> tuple[Floats, float, bool, bool, dict[str, Any]]:
        return np.ones(1, np.float32), float(action == 1), True, False, {}


def config_of(steps: int, recurrent: bool) -> GymConfig:
    return GymConfig(
        total_steps=1, rollout_steps=steps, policy=FlatPolicyConfig(width=4, recurrent=recurrent),
        ppo=PPOConfig(gamma=0.5, lam=0.0, epochs=1, minibatches=1, normalise_values=False),
    )  # fmt: skip


def rollout_of(monkeypatch: pytest.MonkeyPatch, env: SyncVectorEnv, config: GymConfig) -> Sequences:
    """A copy of the first rollout of a training, as the learner was given it."""
    kept: list[Sequences] = []
    original = TamiyoRolloutBuffer.get_batched_sequences

    def keep(self: TamiyoRolloutBuffer) -> Sequences:
        kept.append(map_tensors(Tensor.clone, original(self)))
        return original(self)

    monkeypatch.setattr(TamiyoRolloutBuffer, "get_batched_sequences", keep)
    train(env, config)
    return kept[0]


def value_by_clock(self: Any, observation: Any, state: Tensor, resets: Tensor) -> Tensor:
    """In place of V(s) wherever a bootstrap asks for it: 100 times what the clock shows."""
    return 100.0 * observation.features[..., 0]


@pytest.mark.parametrize("mode", MODES)
def test_a_cut_bootstraps_from_the_true_final_observation_and_an_end_does_not(
    monkeypatch: pytest.MonkeyPatch, mode: AutoresetMode
) -> None:
    monkeypatch.setattr(FlatPolicy, "value", value_by_clock)
    env = SyncVectorEnv([lambda: Clock(3, cut=True), lambda: Clock(3, cut=False)], autoreset_mode=mode)
    rollout = rollout_of(monkeypatch, env, config_of(steps=9, recurrent=False))
    seen, values = rollout.steps.observation.features[..., 0], rollout.steps.value
    # λ = 0: the return is r + 0.5·V(next), and the step from t to t + 1 earns t + 1. Row 0 is cut on its way
    # to the clock 4, whose V is 400; row 1 ends there.
    for row, last in ((0, 4 + 0.5 * 400), (1, 4.0)):
        at = rollout.valid[row] & (seen[row] == 3)
        assert at.sum() >= 2
        torch.testing.assert_close(rollout.returns[row][at], torch.full((int(at.sum()),), last))
    # Inside an episode V(next) is what the network said when it acted there.
    inside = (rollout.valid & (seen < 3))[:, :-1] & rollout.valid[:, 1:]
    expected = rollout.steps.reward[:, :-1] + 0.5 * values[:, 1:]
    torch.testing.assert_close(rollout.returns[:, :-1][inside], expected[inside])


@pytest.mark.parametrize("mode", MODES)
def test_the_bootstrap_of_a_cut_remembers_the_episode(
    monkeypatch: pytest.MonkeyPatch, mode: AutoresetMode
) -> None:
    env, config = SyncVectorEnv([lambda: Clock(3, cut=True)], autoreset_mode=mode), config_of(9, True)
    untrained = make_agent(GymWorld(env), config).policy
    steps = rollout_of(monkeypatch, env, config).steps
    episode = FlatObservation(torch.tensor([[[1.0], [2.0], [3.0], [4.0]]]))
    values = untrained.value(episode, untrained.initial_state(1), torch.zeros(1, 4, dtype=torch.bool))
    cuts = steps.bootstrap_value[steps.truncated]
    assert len(cuts) >= 2
    torch.testing.assert_close(cuts, values[:, 3].expand_as(cuts))


@pytest.mark.parametrize("mode", MODES)
def test_steps_that_only_reset_are_not_learned_from_and_memory_is_fresh_after_them(
    monkeypatch: pytest.MonkeyPatch, mode: AutoresetMode
) -> None:
    env = SyncVectorEnv([lambda: Clock(2, cut=False), lambda: Clock(3, cut=True)], autoreset_mode=mode)
    rollout = rollout_of(monkeypatch, env, config_of(steps=8, recurrent=True))
    counts = rollout.valid.sum(1).tolist()
    # NextStep loses one of three and one of four steps; the eighth step of row 1 is such a one.
    assert counts == ([6, 6] if mode == AutoresetMode.NEXT_STEP else [8, 8])
    for row, length in enumerate((2, 3)):
        seen = rollout.steps.observation.features[row, : counts[row], 0].tolist()
        assert seen == [1 + t % length for t in range(counts[row])]
        assert rollout.steps.reset[row, : counts[row]].tolist() == [clock == 1 for clock in seen]
        assert rollout.steps.reward[row, : counts[row]].tolist() == [clock + 1 for clock in seen]


def test_an_unfinished_row_bootstraps_from_where_the_rollout_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FlatPolicy, "value", value_by_clock)
    env = SyncVectorEnv([lambda: Clock(50, cut=False)])
    rollout = rollout_of(monkeypatch, env, config_of(steps=5, recurrent=False))
    assert rollout.returns[0, -1].item() == pytest.approx(6 + 0.5 * 600)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("as_tuple", [False, True])
def test_masks_are_respected_in_every_form_and_mode(mode: AutoresetMode, as_tuple: bool) -> None:
    env = SyncVectorEnv([lambda: Doors(as_tuple)] * 3, autoreset_mode=mode)
    curve: list[Point] = []
    trained = train(env, GymConfig(total_steps=200, rollout_steps=16), on_update=curve.append)
    assert trained.mean_return == 4.0
    assert [point.steps for point in curve] == sorted({point.steps for point in curve})
    assert curve[-1].steps >= 200


def test_actions_are_functions_of_the_seed() -> None:
    def kinds(seed: int) -> list[float]:
        config = GymConfig(total_steps=80, rollout_steps=10, seed=seed)
        return [point.mean_return for point in train(SyncVectorEnv([Arms] * 4), config).curve]

    assert kinds(3) == kinds(3)
    assert kinds(3) != kinds(4)


def test_two_arms_are_learned_and_enough_is_enough() -> None:
    config = GymConfig(
        total_steps=50_000, rollout_steps=16, enough=0.95, policy=FlatPolicyConfig(width=8),
        ppo=PPOConfig(learning_rate=1e-2, target_kl=0.2, entropy_start=0.0),
    )  # fmt: skip
    trained = train(SyncVectorEnv([Arms] * 8), config)
    assert trained.mean_return >= 0.95
    assert trained.curve[0].mean_return < 0.9
    assert trained.curve[-1].steps < 20_000


def test_observation_and_action_shapes_reach_the_policy() -> None:
    world = GymWorld(SyncVectorEnv([lambda: Doors(False)] * 2))
    assert (world.num_features, world.head_sizes) == (1, (3, 2))
    assert make_agent(world, GymConfig()).policy.head_names == ("head 0", "head 1")


class Odd(Arms):
    """Anything may be wrong with it."""

    def __init__(self, **fields: Any) -> None:
        for name, value in fields.items():
            setattr(self, name, value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"action_space": spaces.Box(0, 1)}, "must be Discrete, or MultiDiscrete"),
        ({"observation_space": spaces.Discrete(3)}, "FlattenObservation"),
    ],
)
def test_spaces_that_do_not_fit_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GymWorld(SyncVectorEnv([lambda: Odd(**fields)]))


def test_a_mask_of_the_wrong_size_is_refused() -> None:
    class Wrong(Doors):
        def _next(self) -> tuple[Floats, dict[str, Any]]:
            return np.zeros((1, 1), np.float32), {"action_mask": np.ones(4, bool)}

    with pytest.raises(ValueError, match=r"has 4 entries; the action space has heads of sizes \(3, 2\)"):
        GymWorld(SyncVectorEnv([lambda: Wrong(False)]))


def test_an_environment_that_does_not_reset_itself_is_refused() -> None:
    env = SyncVectorEnv([Arms], autoreset_mode=AutoresetMode.DISABLED)
    with pytest.raises(ValueError, match="must be NextStep or SameStep"):
        GymWorld(env)


def test_without_gymnasium_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    env = SyncVectorEnv([Arms])
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(ImportError, match=r"esper-lite\[gym\]"):
        GymWorld(env)
