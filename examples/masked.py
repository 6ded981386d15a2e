"""Sorting: carry six items to six shelves, each to its own; which shelf is whose changes from day to day.

An action is (item, shelf). An item that is put away and a shelf that is full are masked: the environment
refuses them with an error, so that every step of the training proves the masks. Each item on its right shelf
earns 1. Choosing at random among what is legal earns 1 of 6; `python -m examples.masked` reaches 5.7.
"""

from __future__ import annotations

import sys
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv
from numpy.typing import NDArray

from esper.simic.agent.config import PPOConfig
from esper.simic.gym_training import GymConfig, progress_line, train
from examples.common import draw_curve, read_options, verdict

STATED = 5.7
ITEMS = 6
DAYS = 3


class Sorting(gymnasium.Env[NDArray[np.float32], NDArray[np.int64]]):
    """What is seen: the day as a one-hot, and which items and shelves are still free."""

    observation_space = spaces.Box(0.0, 1.0, (DAYS + 2 * ITEMS,), np.float32)
    action_space = spaces.MultiDiscrete([ITEMS, ITEMS])
    shelf_of = np.stack([np.random.default_rng(day).permutation(ITEMS) for day in range(DAYS)])

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        super().reset(seed=seed)
        self.day = int(self.np_random.integers(DAYS))
        self.free = np.ones((2, ITEMS), dtype=bool)
        return self._see(), self._legal()

    def step(
        self, action: NDArray[np.int64]
    ) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        item, shelf = (int(choice) for choice in action)
        if not (self.free[0, item] and self.free[1, shelf]):
            raise ValueError(f"item {item} or shelf {shelf} is taken; choose what the action_mask allows")
        self.free[0, item] = self.free[1, shelf] = False
        right = self.shelf_of[self.day, item] == shelf
        return self._see(), float(right), not self.free.any(), False, self._legal()

    def _see(self) -> NDArray[np.float32]:
        return np.concatenate([np.eye(DAYS)[self.day], self.free.reshape(-1)]).astype(np.float32)

    def _legal(self) -> dict[str, Any]:
        return {"action_mask": self.free.reshape(-1).copy()}  # items, then shelves


def main(arguments: list[str] | None = None) -> int:
    options = read_options("masked", __doc__, 400_000, arguments)
    config = GymConfig(
        total_steps=options.total_steps,
        rollout_steps=4 * ITEMS,
        window=400,
        enough=STATED,
        seed=options.seed,
        ppo=PPOConfig(
            gamma=0.99, lam=0.95, learning_rate=2e-3, target_kl=0.05, max_grad_norm=0.5,
            entropy_start=0.02, entropy_end=0.0, entropy_updates=150,
        ),
    )  # fmt: skip
    same_step = gymnasium.vector.AutoresetMode.SAME_STEP
    trained = train(SyncVectorEnv([Sorting] * 64, autoreset_mode=same_step), config, on_update=progress_line)
    draw_curve(options.picture, "Six items to their shelves", {"PPO": trained.curve}, STATED)
    return verdict(trained.mean_return, STATED, options.picture)


if __name__ == "__main__":
    sys.exit(main())
