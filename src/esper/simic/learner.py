"""Tamiyo's policy as a controller, and as one that learns from what its decisions led to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from zlib import crc32

import torch
from torch import Tensor

from esper.lifecycle.actions import Actions, Op, Rate
from esper.simic.agent.ppo import PPOAgent
from esper.simic.agent.rollout_buffer import TamiyoRolloutBuffer, Transition
from esper.simic.config import LearnerConfig, RewardConfig
from esper.tamiyo.config import Conditions, TamiyoNetConfig
from esper.tamiyo.controller import Controller, EpisodeInfo
from esper.tamiyo.policy.action_masks import ActionMasks
from esper.tamiyo.policy.features import Observation, batch_obs_to_features
from esper.tamiyo.policy.network import TamiyoInputs, TamiyoNet
from esper.tamiyo.rates import RatePlans
from esper.tamiyo.schedule import BY_BUDGET, PacedSchedule
from esper.utils.graphs import Graphed, GraphPool
from esper.utils.streams import Stream, random_uniform

# What `learner.patience` adds to the bias of the op head, for each unit of it.
PATIENCE_BIAS = {Op.ADVANCE: 2.0, Op.FOSSILIZE: 1.0, Op.SET_ALPHA_TARGET: -1.0, Op.PRUNE: -2.0}


def make_policy(shape: TamiyoNetConfig, config: LearnerConfig, rates: bool = False) -> TamiyoNet:
    """Make a learner's first network; its weights are drawn from torch's global generator.

    rates: it sets the learning rate too.
    Under a policy that takes all legal ops alike most seeds are pruned before they are blended in, so that
    planting only costs: such a learner stops planting before it can learn to raise anything. Patience lets
    the first policy raise what it plants, by the bias of its op head.
    """
    network = TamiyoNet(shape, rates)
    with torch.no_grad():
        for op, bias in PATIENCE_BIAS.items():
            network.op_head.bias[op] += config.patience * bias
        if rates:  # a rate that falls cannot be raised again, so that an even first policy soon has no choice
            network.rate_head.bias[Rate.KEEP], network.rate_head.bias[Rate.DECAY] = 1.0, -2.0
    return network


class LearnedController(Controller):
    """Decide by an agent's policy: sample with numbers that belong to each member, or take the likeliest."""

    uses_metrics = True

    def __init__(self, agent: PPOAgent, deterministic: bool = False, conditions: Conditions | None = None):
        """Wrap an agent; conditions: those that it was trained under, where they are known."""
        self.agent, self.conditions = agent, conditions
        self.deterministic = deterministic
        self._decision = Graphed(self._decide, GraphPool() if agent.device.type == "cuda" else None)

    def begin(self, info: EpisodeInfo) -> None:
        """Forget the last episode; the next decision is the first of a new one."""
        self._info = info
        self._memory = self.agent.initial_state(info.num_members)
        self._decided: Transition | None = None

    def state_dict(self) -> dict[str, Tensor]:
        return {"memory": self._memory}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self._memory = state["memory"].to(self._memory.device)

    def decide(self, observation: Observation, masks: ActionMasks, step: int) -> Actions:
        """Return one legal action per member."""
        # The memory is cleared at the first decision of an episode, inside the recurrent cell.
        reset = torch.full_like(self._info.members, step == 0, dtype=torch.bool)
        info = self._info
        count = torch.full((), info.counter(step), dtype=torch.long, device=info.device)
        self._decided, self._memory = self._decision(
            observation, masks, self._memory, reset, info.members, count, info.seed
        )
        return Actions.of_columns(self._decided.actions)

    def _decide(
        self,
        observation: Observation,
        masks: ActionMasks,
        memory: Tensor,
        reset: Tensor,
        members: Tensor,
        count: Tensor,
        seed: int,
    ) -> tuple[Transition, Tensor]:
        """Compute the step and the memory after it; captured as a CUDA graph."""
        heads, rates = len(self.agent.policy.head_names), self.agent.policy.rates
        uniforms = None if self.deterministic else random_uniform(seed, members, Stream.ACTION, count, heads)
        inputs = TamiyoInputs(*batch_obs_to_features(observation, rates))
        return self.agent.act(inputs, masks, memory, reset, uniforms)


class Learner(LearnedController):
    """A learned controller that stores every transition of its episode, for `agent.update(learner.buffer)`.

    Two learners with the same members draw different random numbers, which depend on the name as well.
    `reward.control_variate` subtracts the rewards of ungrown control runs. While it imitates, a teacher acts.
    """

    def __init__(
        self,
        name: str,
        agent: PPOAgent,
        steps: int,
        config: LearnerConfig | None = None,
        reward: RewardConfig | None = None,
    ):
        """Make a learner; steps: the most decisions of an episode."""
        super().__init__(agent)
        self.config = config or LearnerConfig()
        self.name = name
        self.steps = steps
        self.reward = reward or RewardConfig()
        self._teacher = RatePlans() if agent.policy.rates else PacedSchedule(BY_BUDGET)
        self._buffer: TamiyoRolloutBuffer | None = None  # of the episode that is being played
        self._shape = (0, 0)  # members and slots that the buffer is for
        self._learned: TamiyoRolloutBuffer | None = None  # of a whole round, where it was played in parts

    @property
    def buffer(self) -> TamiyoRolloutBuffer:
        """Return the latest episode's transitions, of all joined shards; RuntimeError before the first."""
        buffer = self._learned or self._buffer
        if buffer is None:
            raise RuntimeError("nothing has been played yet; play an episode before learning from it")
        return buffer

    @property
    def plans(self) -> int:
        """Return how many plans the teacher of this round tries on the same member."""
        return self.config.plans if self.imitates and self.agent.policy.rates else 1

    @property
    def imitates(self) -> bool:
        """Whether a teacher acts in this round, and the policy learns to act alike."""
        return self.agent.updates < self.config.imitate

    def begin(self, info: EpisodeInfo) -> None:
        """Forget the last episode and its transitions."""
        if self.imitates:
            self._teacher.begin(info)
        # Not `hash`: that of a text differs from process to process.
        super().begin(replace(info, seed=crc32(f"{self.name} {info.seed}".encode())))
        self._owed = torch.zeros_like(info.members, dtype=torch.float32)  # [N] control rewards after the end
        self._finished_for = torch.zeros_like(info.members)  # steps since a member finished
        shape = (info.num_members, info.num_slots)
        self._learned = None
        if self._buffer is not None and shape == self._shape:
            self._buffer.reset()
        else:
            self._buffer, self._shape = None, shape

    def decide(self, observation: Observation, masks: ActionMasks, step: int) -> Actions:
        """Return one legal action per member: its own, or the teacher's."""
        actions = super().decide(observation, masks, step)
        if self.imitates and self._decided is not None:
            actions = self._teacher.decide(observation, masks, step)
            taught = actions.columns() if self.agent.policy.rates else actions.choices
            self._decided = replace(self._decided, actions=taught)
        return actions

    def record_step(
        self, reward: Tensor, terminated: Tensor, active: Tensor, control: Tensor | None = None
    ) -> None:
        """Store the latest decision with its outcome.

        reward [N] of the environment; terminated, active [N] bool: the step was a member's last, or one of
        its steps at all; control [N]: the rewards of the same members in this step without growth. All of
        these are subtracted, also those after a member has finished, which are charged to its last step:
        the sum does not depend on the actions, so it reduces variance and moves no optimum.
        """
        assert self._decided is not None, "there is no decision to record"
        if self.reward.control_variate:
            assert control is not None, "a control variate needs the rewards of the control runs"
            # What the control run earns after the end is discounted back to the member's last step.
            self._finished_for = torch.where(active, 0, self._finished_for + 1)
            discount = torch.pow(self.agent.config.gamma, self._finished_for.float())
            self._owed = self._owed + torch.where(active, 0.0, discount * control)
            reward = reward - control
        step = replace(self._decided, reward=reward, terminated=terminated)
        if self._buffer is None:
            members, pool = self._info.num_members, self._decision.pool
            self._buffer = TamiyoRolloutBuffer(members, self.steps, step, self.agent.device, pool)
        self._buffer.add(step, active)
        self._decided = None

    def finish_episode(self) -> None:
        """Charge the last steps with what the control runs earned after a member had finished.

        Rows that a drawn plan acted in are weighed by what the plan was worth.
        """
        if self.reward.control_variate:
            self.buffer.add_to_last_reward(-self._owed)
        if self.plans > 1:
            self.buffer.weigh_rows(self._info.members, self.config.temperature, self.agent.config.gamma)

    def load_rollouts(self, parts: Sequence[Mapping[str, Tensor]]) -> None:
        """Continue with the transitions of all shards, from the `tensors` of the buffer of each."""
        self._learned = self.buffer.concatenate(parts)
