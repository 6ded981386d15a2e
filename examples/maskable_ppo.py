"""sb3-contrib's MaskablePPO, unchanged, as the controller of growing networks.

    pip install 'esper-lite[gym]' stable-baselines3 sb3-contrib
    python -m examples.maskable_ppo --steps 2000

MaskablePPO masks every head alone; an op on a slot where it is not legal fails and costs its step.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
from sb3_contrib import MaskablePPO
from stable_baselines3.common.vec_env import VecEnv

import esper.gym


class AsVecEnv(VecEnv):
    """A Gymnasium vector environment for Stable-Baselines3, which resets in the very step that ends."""

    def __init__(self, envs: gymnasium.vector.VectorEnv) -> None:
        super().__init__(envs.num_envs, envs.single_observation_space, envs.single_action_space)
        self.envs = envs
        self._actions: Any = None
        self._returns = np.zeros(envs.num_envs)
        self.episode_returns: list[float] = []

    def reset(self) -> Any:
        observations, self._infos = self.envs.reset(seed=self._seeds[0])
        self._reset_seeds()
        return observations

    def step_async(self, actions: Any) -> None:
        self._actions = actions

    def step_wait(self) -> Any:
        observations, rewards, terminated, truncated, self._infos = self.envs.step(self._actions)
        self._returns += rewards
        dones = terminated | truncated
        infos: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]
        if dones.any():  # all members end together
            for i in range(self.num_envs):
                infos[i] = {
                    "terminal_observation": observations[i],
                    "TimeLimit.truncated": bool(truncated[i]),
                }
            self.episode_returns += self._returns.tolist()
            self._returns[:] = 0.0
            observations, _, _, _, self._infos = self.envs.step(self._actions)  # resets
        return observations, rewards, dones, infos

    def close(self) -> None:
        self.envs.close()

    def env_method(self, method_name: str, *args: Any, indices: Any = None, **kwargs: Any) -> list[Any]:
        if method_name != "action_masks":
            raise AttributeError(f"the members have no method {method_name!r}; they have action_masks")
        return list(self._infos["action_mask"])

    def has_attr(self, attr_name: str) -> bool:
        return attr_name == "action_masks"

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        return [getattr(self.envs, attr_name, None)] * self.num_envs

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        setattr(self.envs, attr_name, value)

    def env_is_wrapped(self, wrapper_class: type, indices: Any = None) -> list[bool]:
        return [False] * self.num_envs


def main(arguments: Sequence[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1920, help="decisions, all members together")
    parser.add_argument("--members", type=int, default=16)
    parser.add_argument("--horizon", type=int, default=15, help="epochs in an episode")
    chosen = parser.parse_args(arguments)
    members, horizon = chosen.members, chosen.horizon
    envs = gymnasium.make_vec(
        esper.gym.ENVIRONMENT_ID,
        num_envs=members,
        task="spirals",
        steps=horizon,
        batches_per_epoch=2,
    )
    adapted = AsVecEnv(envs)
    learner = MaskablePPO(
        "MlpPolicy", adapted, n_steps=2 * horizon, batch_size=240, gamma=1.0, ent_coef=0.01, seed=0
    )
    learner.learn(chosen.steps)
    rounds = np.array(adapted.episode_returns).reshape(-1, members).mean(axis=1)
    for index, value in enumerate(rounds, start=1):
        print(f"round {index}: mean return {value:+.4f}")
    return [float(value) for value in rounds]


if __name__ == "__main__":
    main()
