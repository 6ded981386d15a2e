"""The learner: buffer, advantages and PPO."""
