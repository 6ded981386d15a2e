"""Recall: one of four cues is shown at the first step and asked for ten steps later.

The last observation is the same whatever the cue was, so that a policy without a memory can only guess: a
return of 0.25 is its best. `python -m examples.memory` trains both and reaches 0.95 with a memory.
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
from esper.simic.gym_training import GymConfig, Trained, progress_line, train
from esper.tamiyo.policy.flat import FlatPolicyConfig
from examples.common import Options, draw_curve, read_options, verdict

STATED = 0.95
CUES = 4
DELAY = 10


class Recall(gymnasium.Env[NDArray[np.float32], np.int64]):
    """What is seen: the cue as a one-hot at the first step, and a flag at the step that asks for it."""

    observation_space = spaces.Box(0.0, 1.0, (CUES + 1,), np.float32)
    action_space = spaces.Discrete(CUES)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        super().reset(seed=seed)
        self.clock = 0
        self.cue = int(self.np_random.integers(CUES))
        return self._see(), {}

    def step(self, action: np.int64) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        asked = self.clock == DELAY
        self.clock += 1
        return self._see(), float(asked and action == self.cue), asked, False, {}

    def _see(self) -> NDArray[np.float32]:
        seen = np.zeros(CUES + 1, dtype=np.float32)
        if self.clock == 0:
            seen[self.cue] = 1.0
        seen[CUES] = self.clock == DELAY
        return seen


def run(options: Options, recurrent: bool) -> Trained:
    print("with a memory" if recurrent else "without a memory")
    config = GymConfig(
        total_steps=options.total_steps,
        rollout_steps=2 * (DELAY + 2),
        window=400,
        enough=STATED,
        seed=options.seed,
        policy=FlatPolicyConfig(width=32, depth=1, recurrent=recurrent),
        ppo=PPOConfig(
            gamma=0.99, lam=0.95, learning_rate=3e-3, target_kl=0.05, max_grad_norm=0.5,
            entropy_start=0.01, entropy_end=0.01,
        ),
    )  # fmt: skip
    return train(SyncVectorEnv([Recall] * 64), config, on_update=progress_line)


def main(arguments: list[str] | None = None) -> int:
    options = read_options("memory", __doc__, 150_000, arguments)
    remembers, guesses = run(options, recurrent=True), run(options, recurrent=False)
    curves = {"with a memory": remembers.curve, "without": guesses.curve}
    draw_curve(options.picture, f"A cue, recalled after {DELAY} steps", curves, STATED)
    print(f"without a memory {guesses.mean_return:.2f}: guessing earns {1 / CUES:.2f}")
    return verdict(remembers.mean_return, STATED, options.picture)


if __name__ == "__main__":
    sys.exit(main())
