"""Tamiyo's policy as a controller, and as a controller that learns."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from esper.foundation.streams import Stream
from esper.lifecycle.actions import Actions, Head
from esper.simic.agent.ppo import Decision, PPOAgent
from esper.simic.agent.rollout_buffer import TamiyoRolloutBuffer
from esper.simic.environment import StepResult
from esper.tamiyo.controllers import Scene
from esper.tamiyo.policy.action_masks import ActionMasks
from esper.tamiyo.policy.features import batch_obs_to_features
from esper.tamiyo.policy.network import TamiyoInputs
from esper.tamiyo.policy.observation import Observation


@dataclass(frozen=True)
class _Pending:
    """A decision whose reward is not known yet."""

    decision: Decision
    inputs: TamiyoInputs
    masks: ActionMasks
    reset: Tensor  # [N] bool


@dataclass(frozen=True)
class Consequence:
    """What a decision led to, as far as a learner asks."""

    reward: Tensor  # [N]
    terminated: Tensor  # [N] bool

    @staticmethod
    def of(result: StepResult) -> Consequence:
        return Consequence(result.reward, result.terminated)


class LearnedController:
    """Samples from the policy with numbers that belong to each member, or takes the likeliest choices."""

    def __init__(self, agent: PPOAgent, deterministic: bool = False):
        self.agent = agent
        self.deterministic = deterministic

    def begin(self, scene: Scene) -> None:
        self._scene = scene
        self._memory = self.agent.initial_state(scene.num_members)
        self._pending: _Pending | None = None

    def decide(self, observation: Observation, masks: ActionMasks, step: int) -> Actions:
        inputs = self.see(observation)
        reset = torch.full_like(self._scene.members, self.forgets(step), dtype=torch.bool)
        uniforms = None if self.deterministic else self._scene.draw(Stream.ACTION, step, len(Head))
        decision = self.agent.act(inputs, masks, self._memory, reset, uniforms)
        self._memory = decision.state
        self._pending = _Pending(decision, inputs, masks, reset)
        return Actions(decision.actions)

    def see(self, observation: Observation) -> TamiyoInputs:
        """What the policy is shown of an observation."""
        return TamiyoInputs(*batch_obs_to_features(observation))

    def forgets(self, step: int) -> bool:
        """Whether the memory is cleared before this step."""
        return step == 0


class LearningController(LearnedController):
    """Also remembers every transition of the episode, for `agent.update(controller.buffer)`."""

    def __init__(self, agent: PPOAgent, steps: int):
        super().__init__(agent)
        self.steps = steps
        self._buffer: TamiyoRolloutBuffer | None = None
        self._expected: Tensor | None = None

    @property
    def buffer(self) -> TamiyoRolloutBuffer:
        if self._buffer is None:
            raise RuntimeError("nothing has been played yet; play an episode before learning from it")
        return self._buffer

    def begin(self, scene: Scene) -> None:
        super().begin(scene)
        self._steps_seen = 0
        if self._buffer is not None:
            self._buffer.reset()

    def expect(self, rewards: Tensor) -> None:
        """What each step of the coming episode pays whatever is done; it is left out of what is learned.

        rewards [T, N]: those of the same members in the same episode with no growth at all. They do not
        depend on the actions, so that they take noise away and move no optimum.
        """
        self._expected = rewards

    def remember(self, result: StepResult) -> None:
        """Store what the latest decision led to."""
        self.learn_from(Consequence.of(result))

    def learn_from(self, consequence: Consequence) -> None:
        """Store the latest decision with what it led to."""
        pending = self._pending
        if pending is None:
            raise RuntimeError("there is no decision to remember; call decide before remember")
        transition = pending.decision.transition(
            pending.inputs,
            pending.masks,
            pending.reset,
            self.pay(consequence, self._steps_seen),
            consequence.terminated,
        )
        if self._buffer is None:
            self._buffer = TamiyoRolloutBuffer(
                self._scene.num_members, self.steps, transition, self._memory, self.agent.device
            )
        self._buffer.add(transition)
        self._steps_seen += 1
        self._pending = None

    def pay(self, consequence: Consequence, step: int) -> Tensor:
        """The reward that is learned from.  # [N]"""
        if self._expected is None:
            return consequence.reward
        return consequence.reward - self._expected[step]
