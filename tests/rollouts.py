"""Rollouts of Tamiyo on random populations, for measurements of the learner."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from esper.lifecycle.actions import NUM_HEADS
from esper.simic.agent.ppo import PPOAgent
from esper.simic.agent.rollout_buffer import TamiyoRolloutBuffer, Transition
from esper.tamiyo.policy.action_masks import ActionMasks, compute_batch_masks
from esper.tamiyo.policy.features import batch_obs_to_features
from esper.tamiyo.policy.network import TamiyoInputs
from esper.utils.rows import map_tensors
from tests.scenes import random_observation


@dataclass(frozen=True)
class Scene:
    """What Tamiyo sees at each of T steps, on the device.  # [T, N, ...]"""

    inputs: TamiyoInputs
    masks: ActionMasks
    uniforms: Tensor  # [T, N, H]

    @staticmethod
    def random(members: int, slots: int, steps: int, device: torch.device | str = "cpu") -> Scene:
        observation = random_observation(np.random.default_rng(0), steps * members, slots)
        inputs = TamiyoInputs(*batch_obs_to_features(observation))
        masks = compute_batch_masks(observation.slots)
        uniforms = torch.rand(steps * members, NUM_HEADS, generator=torch.Generator().manual_seed(0))

        def place(tensor: Tensor) -> Tensor:
            return tensor.to(device).unflatten(0, (steps, members))

        return Scene(map_tensors(place, inputs), map_tensors(place, masks), place(uniforms))

    @property
    def steps(self) -> int:
        return len(self.uniforms)

    @property
    def members(self) -> int:
        return self.uniforms.shape[1]


def play(agent: PPOAgent, scene: Scene, buffer: TamiyoRolloutBuffer | None = None) -> TamiyoRolloutBuffer:
    """One rollout with made-up rewards; nothing in it waits for the device once a buffer is given."""
    state = agent.initial_state(scene.members)
    no = torch.zeros(scene.members, dtype=torch.bool, device=agent.device)
    if buffer is not None:
        buffer.reset()
    for t in range(scene.steps):
        step = step_of(agent, scene, t, state, no)
        buffer = buffer or TamiyoRolloutBuffer(scene.members, scene.steps, step[0], agent.device)
        buffer.add(step[0])
        state = step[1]
    assert buffer is not None
    return buffer


def step_of(agent: PPOAgent, scene: Scene, t: int, state: Tensor, no: Tensor) -> tuple[Transition, Tensor]:
    """One decision and what is stored of it; the memory after it."""
    inputs = map_tensors(lambda tensor: tensor[t], scene.inputs)
    masks = map_tensors(lambda tensor: tensor[t], scene.masks)
    decided, state = agent.act(inputs, masks, state, no, scene.uniforms[t])
    reward = inputs.features[:, 0] - decided.value
    ends = ~no if t == scene.steps - 1 else no
    return replace(decided, reward=reward, terminated=ends), state
