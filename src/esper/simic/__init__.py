"""The trainer: rewards, the rollout buffer, PPO, and the run."""
