"""The same PPO agent on any Gymnasium vector environment (extra `gym`).

    env = gymnasium.make_vec("CartPole-v1", num_envs=32)
    trained = train(env, GymConfig(total_steps=200_000), on_update=progress_line)

Discrete and MultiDiscrete actions, each with an optional `action_mask` in the infos. Rows of the rollout are
environments: an episode may end anywhere in a row and the next one begins there, with a fresh memory.
"""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from esper.foundation.errors import require
from esper.foundation.settings import Config
from esper.foundation.streams import Stream, random_uniform
from esper.simic.agent.config import PPOConfig
from esper.simic.agent.metrics import UpdateMetrics
from esper.simic.agent.ppo import PPOAgent
from esper.simic.agent.rollout_buffer import TamiyoRolloutBuffer
from esper.tamiyo.policy.flat import FlatMasks, FlatObservation, FlatPolicy, FlatPolicyConfig, padded_choices

Array = NDArray[Any]


class GymConfig(Config):
    """How long to train, on what scale, and with which policy and learner."""

    total_steps: int = Field(
        default=200_000, ge=1, description="environment steps, all environments together"
    )
    rollout_steps: int = Field(default=128, ge=1, description="steps of each environment between two updates")
    window: int = Field(default=100, ge=1, description="finished episodes over which the return is averaged")
    enough: float | None = Field(
        default=None, description="stop once a full window's mean return reaches this; none never stops early"
    )
    seed: int = Field(
        default=0, ge=0, description="of the environments, the policy's weights and its actions"
    )
    policy: FlatPolicyConfig = Field(default_factory=FlatPolicyConfig)
    ppo: PPOConfig = Field(default_factory=PPOConfig)


@dataclass(frozen=True)
class Point:
    """Where training stands after an update."""

    steps: int  # environment steps so far; those in which an environment only reset itself do not count
    episodes: int  # finished so far
    mean_return: float  # over the window's last episodes; NaN before the first has ended
    seconds: float  # of wall time since the start
    update: UpdateMetrics


@dataclass(frozen=True)
class Trained:
    """What training leaves behind."""

    agent: PPOAgent
    curve: tuple[Point, ...]
    returns: tuple[float, ...]  # of the window's last episodes

    @property
    def mean_return(self) -> float:
        """Over the window's last episodes; NaN before the first has ended."""
        return _mean(self.returns)


def train(
    env: Any,
    config: GymConfig | None = None,
    device: torch.device | str = "cpu",
    on_update: Callable[[Point], None] | None = None,
) -> Trained:
    """PPO from the first step to the last. `env` is a gymnasium.vector.VectorEnv."""
    config = config or GymConfig()
    world = GymWorld(env, config.seed, device, config.window)
    agent = make_agent(world, config, device)
    curve: list[Point] = []
    state, buffer, started = agent.initial_state(world.num_envs), None, time.perf_counter()
    while world.steps < config.total_steps and not world.has_earned(config.enough):
        for _ in range(config.rollout_steps):
            seen, masks, fresh = world.observation, world.masks, world.fresh
            decided, state = agent.act(seen, masks, state, fresh, world.uniforms())
            outcome = world.step(decided.actions)
            cut = _value_at_cuts(agent, outcome, state)
            step = decided.led_to(outcome.reward, outcome.terminated, outcome.truncated, cut)
            if buffer is None:
                buffer = TamiyoRolloutBuffer(world.num_envs, config.rollout_steps, step, state, device)
            buffer.add(step, active=outcome.real)
        assert buffer is not None
        update = agent.update(buffer, bootstrap_values=agent.value(world.observation, state, world.fresh))
        buffer.reset(state)
        seconds = time.perf_counter() - started
        curve.append(Point(world.steps, world.episodes, _mean(world.returns), seconds, update))
        if on_update is not None:
            on_update(curve[-1])
    return Trained(agent, tuple(curve), tuple(world.returns))


def make_agent(world: GymWorld, config: GymConfig, device: torch.device | str = "cpu") -> PPOAgent:
    """A flat policy of the environment's size; its weights follow from the config's seed alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        policy = FlatPolicy(world.num_features, world.head_sizes, config.policy)
    return PPOAgent(policy, config.ppo, device, config.seed)


@dataclass(frozen=True)
class Outcome:
    """What one step of every environment led to."""

    reward: Tensor  # [N] float32
    terminated: Tensor  # [N] bool
    truncated: Tensor  # [N] bool
    led_to: FlatObservation  # [N, F] where the step itself ended: at an end the final observation
    real: Tensor | None  # [N] bool: False where an environment only reset itself; None: all are real


class GymWorld:
    """A vector environment as the agent sees it, with its way of resetting settled here.

    NextStep: the step after an end ignores the action and returns the next episode's first observation. It is
    no transition, so it is marked as not real. SameStep: the first observation comes with the end, and the
    final one lies in the infos.
    """

    def __init__(
        self, env: Any, seed: int = 0, device: torch.device | str = "cpu", window: int = 100
    ) -> None:
        """window: how many of the latest returns are kept."""
        self.env = env
        self.num_envs: int = env.num_envs
        self.device = torch.device(device)
        self.seed = seed
        self.resets_later = _resets_later(env)
        self.head_sizes, self._first = _heads(env.single_action_space)
        self.num_features = _num_features(env.single_observation_space)
        self._choices = padded_choices(self.head_sizes).numpy()  # [H, C]
        self._all_legal = FlatMasks(self._tensor(np.tile(self._choices, (self.num_envs, 1, 1))))
        self._members = torch.arange(self.num_envs, device=self.device)
        self._draws = 0
        self.steps = 0  # of all environments together; a step that only resets does not count
        self.episodes = 0  # that have ended
        self.returns: deque[float] = deque(maxlen=window)  # of the latest of these
        self._earned = np.zeros(self.num_envs)  # in the episodes that are under way

        observation, infos = env.reset(seed=seed)
        self._resting = np.zeros(self.num_envs, dtype=bool)  # the next step only resets these
        self.fresh = self._tensor(~self._resting)  # [N] the next action opens an episode
        self.observation = self._observe(observation)
        self.masks = self._masks(infos)

    def uniforms(self) -> Tensor:
        """Numbers for the next actions: functions of the seed, the environment and the step.  # [N, H]"""
        self._draws += 1
        return random_uniform(self.seed, self._members, Stream.ACTION, self._draws, len(self.head_sizes))

    def step(self, actions: Tensor) -> Outcome:
        """Act in every environment.  # actions [N, H]"""
        choices = actions.cpu().numpy() + self._first
        single = not self.env.single_action_space.shape
        observation, reward, terminated, truncated, infos = self.env.step(
            choices[:, 0] if single else choices
        )
        ended, real = terminated | truncated, ~self._resting
        self._count(reward, ended, real)
        self.observation = self._observe(observation)
        if self.resets_later:
            led_to, opens, self._resting = self.observation, self._resting, ended
        else:
            led_to, opens = self._observe(_with_final(observation, ended, infos)), ended
        self.fresh = self._tensor(opens)
        self.masks = self._masks(infos)
        return Outcome(
            reward=self._tensor(reward.astype(np.float32)),
            terminated=self._tensor(terminated),
            truncated=self._tensor(truncated),
            led_to=led_to,
            real=None if real.all() else self._tensor(real),
        )

    def has_earned(self, enough: float | None) -> bool:
        """Whether the latest episodes, as many as are kept, reach a mean return; never where it is None."""
        full = len(self.returns) == self.returns.maxlen
        return enough is not None and full and _mean(self.returns) >= enough

    def _count(self, reward: Array, ended: Array, real: Array) -> None:
        self._earned += np.where(real, reward, 0.0)
        self.returns.extend(self._earned[ended].tolist())
        self._earned[ended] = 0.0
        self.episodes += int(ended.sum())
        self.steps += int(real.sum())

    def _observe(self, observation: Array) -> FlatObservation:
        return FlatObservation(self._tensor(observation.reshape(self.num_envs, -1).astype(np.float32)))

    def _masks(self, infos: Mapping[str, Any]) -> FlatMasks:
        """What is legal next; everything, where an environment says nothing or is about to reset itself."""
        speaks = infos.get("_action_mask", np.ones(self.num_envs, dtype=bool)) & ~self._resting
        if "action_mask" not in infos or not speaks.any():
            return self._all_legal
        rows, given = np.nonzero(speaks)[0], [_flat_mask(mask) for mask in infos["action_mask"][speaks]]
        size = sum(self.head_sizes)
        wrong = [mask.size for mask in given if mask.size != size]
        if wrong:
            raise ValueError(
                f"an action_mask has {wrong[0]} entries; the action space has heads of sizes "
                f"{self.head_sizes}: give one array of {size} entries, head after head, "
                "or a tuple of one array per head"
            )
        legal = np.tile(self._choices, (self.num_envs, 1, 1))  # [N, H, C]
        legal[rows[:, None], *np.nonzero(self._choices)] = np.stack(given)
        return FlatMasks(self._tensor(legal))

    def _tensor(self, array: Array) -> Tensor:
        return torch.from_numpy(np.array(array)).to(self.device)


def progress_line(point: Point) -> None:
    """One line that rewrites itself in a terminal; a line for each update elsewhere."""
    speed = point.steps / max(point.seconds, 1e-9)
    line = (
        f"{point.steps:>9,} steps  {point.episodes:>7,} episodes  return {point.mean_return:8.2f}"
        f"  entropy {point.update.entropy:4.2f}  KL {point.update.kl:6.4f}  {speed:7,.0f} steps/s"
    )
    terminal = sys.stdout.isatty()
    print(f"\r{line}" if terminal else line, end="" if terminal else "\n", flush=True)


def _value_at_cuts(agent: PPOAgent, outcome: Outcome, state: Tensor) -> Tensor:
    """V of where the step led, for the truncated; nobody reads it elsewhere.  # [N]"""
    if not outcome.truncated.any():
        return torch.zeros_like(outcome.reward)
    return agent.value(outcome.led_to, state, torch.zeros_like(outcome.truncated))


def _mean(returns: Sequence[float] | deque[float]) -> float:
    return sum(returns) / len(returns) if returns else math.nan


def _resets_later(env: Any) -> bool:
    """Whether a new episode begins one step after the end (NextStep), or with it (SameStep)."""
    mode = env.metadata.get("autoreset_mode")
    ways = {"NextStep": True, "SameStep": False}
    name = getattr(mode, "value", mode)
    if name not in ways:
        raise ValueError(
            f"the environment's metadata['autoreset_mode'] is {mode!r}; it must be NextStep or SameStep: "
            "choose one when you make the vector environment"
        )
    return ways[name]


def _spaces() -> Any:
    return require("gymnasium", "gym", "esper.simic.gym_training").spaces


def _heads(space: Any) -> tuple[tuple[int, ...], Array]:
    """The number of choices of each head, and the first choice of each as the environment counts.  # [H]"""
    spaces = _spaces()
    if isinstance(space, spaces.Discrete):
        return (int(space.n),), np.array([space.start])
    if isinstance(space, spaces.MultiDiscrete) and space.nvec.ndim == 1:
        return tuple(int(n) for n in space.nvec), np.asarray(space.start)
    raise ValueError(f"the action space is {space}; it must be Discrete, or MultiDiscrete with one axis")


def _num_features(space: Any) -> int:
    if not isinstance(space, _spaces().Box):
        raise ValueError(
            f"the observation space is {space}; it must be a Box: "
            "wrap the environment in gymnasium.wrappers.vector.FlattenObservation"
        )
    return math.prod(space.shape)


def _with_final(observation: Array, ended: Array, infos: Mapping[str, Any]) -> Array:
    """The observations with those of the ended episodes replaced by their final ones.  # [N, ...]"""
    if not ended.any():
        return observation
    led_to = observation.copy()
    led_to[ended] = np.stack(list(infos["final_obs"][ended]))
    return led_to


def _flat_mask(mask: Any) -> Array:
    """One environment's mask, head after head; Gymnasium itself writes a tuple of one array per head."""
    parts = mask if isinstance(mask, tuple) else (mask,)
    return np.concatenate([np.asarray(part).reshape(-1) for part in parts]).astype(bool)
