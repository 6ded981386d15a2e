"""The population as a Gymnasium vector environment, and one member as an ordinary one: see `esper.gym`.

An action has a number for each head: slot, blueprint, style, tempo, alpha_target, alpha_speed, alpha_curve,
op, and with `rates=True` what is done to the learning rate. `infos["action_mask"]` [N, choices of all heads]
is True where a choice is legal. It judges every head alone; a slot on which the chosen op is not legal is an
action that fails: it costs the step and changes nothing. `infos["slot_by_op"]` [N, ops, slots] has the pairs.

An episode has a fixed number of steps and its clock is in the observation, so its end is a termination and
never a truncation. All members end together; the step after that resets them (autoreset mode NEXT_STEP). A
reset with a seed begins the run of that seed; a reset without one begins its next episode.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.spaces import Box, MultiDiscrete
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from esper.lifecycle.actions import NUM_BLUEPRINTS, Actions, Head, Rate, head_sizes
from esper.population.config import PopulationConfig
from esper.simic.config import EpisodeConfig, PPOConfig, lifecycle_for
from esper.simic.environment import EnvironmentSpec, GrowthEnvironment
from esper.simic.rollout import Bools, Floats
from esper.tamiyo.policy import features
from esper.tamiyo.policy.action_masks import ActionMasks
from esper.tasks import Task, load_task

_BLUEPRINT_COLUMNS = NUM_BLUEPRINTS + 1  # one for an empty slot


class GrowthVectorEnv(VectorEnv[Floats, Any, Any]):
    """N members that grow at once, one decision each per step."""

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP, "render_modes": []}  # noqa: RUF012

    def __init__(
        self,
        num_envs: int = 1,
        task: str | Task = "spirals",
        steps: int = 30,
        batches_per_epoch: int = 4,
        device: str = "cpu",
        rates: bool = False,
        rate_span: float = 1.0,
    ):
        self.num_envs = num_envs
        self._spec = EnvironmentSpec(
            task=load_task(task) if isinstance(task, str) else task,
            members=torch.arange(num_envs),
            gamma=PPOConfig().gamma,
            device=device,
            episode=EpisodeConfig(steps=steps, clock="steps", rates=rates, rate_span=rate_span),
            lifecycle=lifecycle_for(steps),
            population=PopulationConfig(batches_per_epoch=batches_per_epoch),
        )
        self._growth = GrowthEnvironment(self._spec)
        self._episode, self._over = -1, False
        slots = self._growth.num_slots
        self.single_observation_space = observation_space(slots, rates)
        self.single_action_space = MultiDiscrete([*head_sizes(slots), *[len(Rate)] * rates])
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Floats, dict[str, Any]]:
        """Start members of a run with this seed, or the next episode of the present run."""
        super().reset(seed=seed)
        if seed is not None and seed != self._growth.spec.seed:
            self._growth = GrowthEnvironment(replace(self._spec, seed=seed))
        self._episode = self._episode + 1 if seed is None else 0
        self._over = False
        return as_array(self._growth.reset(self._episode)), self._infos()

    def step(self, actions: Any) -> tuple[Floats, NDArray[np.float64], Bools, Bools, dict[str, Any]]:
        """Apply one decision of every member and train the epoch that follows."""
        if self._episode < 0:
            raise gymnasium.error.ResetNeeded("step came before reset; call reset first")
        nobody = np.zeros(self.num_envs, dtype=np.bool_)
        if self._over:
            observations, infos = self.reset()
            return observations, np.zeros(self.num_envs), nobody, nobody.copy(), infos
        choices = torch.as_tensor(np.asarray(actions), dtype=torch.long, device=self._growth.device)
        result = self._growth.step((Actions.of_columns if self._spec.episode.rates else Actions)(choices))
        ends = result.terminated.cpu().numpy()
        self._over = bool(ends.any())
        infos = self._infos() | {
            "succeeded": result.outcome.succeeded.cpu().numpy(),
            "executed_op": result.outcome.executed_op.cpu().numpy(),
        }
        rewards = result.reward.double().cpu().numpy()
        return as_array(result.observation), rewards, ends, nobody, infos

    def action_masks(self) -> Bools:
        """Return what is legal now, all heads side by side.  # [N, choices of all heads]"""
        return flat_masks(self._growth.masks())

    def _infos(self) -> dict[str, Any]:
        masks, rows = self._growth.masks(), self._growth.state
        return {
            "action_mask": flat_masks(masks),
            "slot_by_op": masks.slot_by_op.cpu().numpy(),
            "accuracy": rows.history.accuracy.cpu().numpy(),
            "parameters": self._growth.derived.parameters.cpu().numpy(),
        }


class GrowthEnv(gymnasium.Env[Floats, Any]):
    """One member of the population as an ordinary environment."""

    metadata = {"render_modes": []}  # noqa: RUF012

    def __init__(self, render_mode: str | None = None, **options: Any):
        self.render_mode = render_mode
        self._members = GrowthVectorEnv(num_envs=1, **options)
        self.observation_space = self._members.single_observation_space
        self.action_space = self._members.single_action_space

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Floats, dict[str, Any]]:
        super().reset(seed=seed)
        observations, infos = self._members.reset(seed=seed, options=options)
        return observations[0], _first(infos)

    def step(self, action: Any) -> tuple[Floats, float, bool, bool, dict[str, Any]]:
        observations, rewards, terminated, truncated, infos = self._members.step(np.asarray(action)[None])
        return observations[0], float(rewards[0]), bool(terminated[0]), bool(truncated[0]), _first(infos)

    def action_masks(self) -> Bools:
        """Return what is legal now, all heads side by side.  # [choices of all heads]"""
        return self._members.action_masks()[0]


def _first(infos: dict[str, Any]) -> dict[str, Any]:
    return {name: value[0] for name, value in infos.items()}


def observation_space(num_slots: int, rates: bool = False) -> Box:
    """Return the space of Tamiyo's features in their ranges, then the blueprint of every slot, one-hot."""
    columns = features.BASE_COLUMNS + features.RATE_COLUMNS * rates + features.SLOT_COLUMNS * num_slots
    ranges = [column.range for column in columns for _ in range(column.width)]
    low, high = np.array(ranges, dtype=np.float32).T
    blueprints = np.zeros(num_slots * _BLUEPRINT_COLUMNS, dtype=np.float32)
    return Box(np.concatenate([low, blueprints]), np.concatenate([high, blueprints + 1.0]), dtype=np.float32)


def as_array(observation: features.Observation) -> Floats:
    """Flatten an observation.  # [N, features + slots · (blueprints + 1)]"""
    seen, blueprints = features.batch_obs_to_features(observation, observation.training is not None)
    one_hot = torch.nn.functional.one_hot(blueprints + 1, _BLUEPRINT_COLUMNS).flatten(1)
    return torch.cat([seen, one_hot.to(seen.dtype)], dim=1).cpu().numpy()


def flat_masks(masks: ActionMasks) -> Bools:
    """Concatenate the masks of all heads in head order, the rate last.  # [N, choices of all heads]"""
    heads = [*(masks.head(head) for head in Head), *(() if masks.rate is None else (masks.rate,))]
    return torch.cat(heads, dim=1).cpu().numpy()
