"""CartPole: balance a pole on a cart, 500 steps at most.

`python -m examples.cartpole` reaches a mean return of 475 over 100 episodes, where the task counts as solved.
An episode that lives to the end is cut, not lost: the learner bootstraps from the final observation.
"""

from __future__ import annotations

import sys

import gymnasium

from esper.simic.agent.config import PPOConfig
from esper.simic.gym_training import GymConfig, progress_line, train
from examples.common import draw_curve, read_options, verdict

STATED = 475.0


def main(arguments: list[str] | None = None) -> int:
    options = read_options("cartpole", __doc__, 300_000, arguments)
    config = GymConfig(
        total_steps=options.total_steps,
        rollout_steps=64,
        enough=STATED,
        seed=options.seed,
        ppo=PPOConfig(
            gamma=0.99, lam=0.95, learning_rate=1e-3, epochs=8, target_kl=0.03, max_grad_norm=0.5,
            entropy_start=0.01, entropy_end=0.0, entropy_updates=50,
        ),
    )  # fmt: skip
    trained = train(gymnasium.make_vec("CartPole-v1", num_envs=32), config, on_update=progress_line)
    draw_curve(options.picture, "CartPole-v1", {"PPO": trained.curve}, STATED)
    return verdict(trained.mean_return, STATED, options.picture)


if __name__ == "__main__":
    sys.exit(main())
