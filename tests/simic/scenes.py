"""Small rollouts for the tests of the learner."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from esper.simic.agent.ppo import PPOAgent, PPOConfig
from esper.simic.agent.rollout_buffer import Sequences, TamiyoRolloutBuffer, Transition
from esper.tamiyo.policy.network import PolicyOutput
from tests.simic.flat_policy import FlatMasks, FlatObservation, FlatPolicy, FlatPolicyConfig, padded_choices

FEATURES = 5
HEAD_SIZES = (3, 4, 2)


def transition(members: int, seed: int = 0, **fields: Tensor) -> Transition:
    """A random transition of a flat policy with three heads; any field can be given."""
    generator = torch.Generator().manual_seed(seed)
    no = torch.zeros(members, dtype=torch.bool)
    heads = len(HEAD_SIZES)
    made = Transition(
        observation=FlatObservation(torch.randn(members, FEATURES, generator=generator)),
        masks=FlatMasks(padded_choices(HEAD_SIZES).expand(members, -1, -1)),
        actions=torch.randint(0, 2, (members, heads), generator=generator),
        log_prob=-torch.rand(members, heads, generator=generator),
        forced=no,
        value=torch.randn(members, generator=generator),
        reward=torch.randn(members, generator=generator),
        terminated=no,
        truncated=no,
        bootstrap_value=torch.randn(members, generator=generator),
        reset=no,
    )
    return replace(made, **fields)


def make_agent(recurrent: bool = True, seed: int = 0, **config: object) -> PPOAgent:
    torch.manual_seed(seed)
    shape = FlatPolicyConfig(width=16, recurrent=recurrent)
    return PPOAgent(FlatPolicy(FEATURES, HEAD_SIZES, shape), PPOConfig.model_validate(config), seed=seed)


@dataclass(frozen=True)
class Rollout:
    """A filled buffer and how it was filled."""

    buffer: TamiyoRolloutBuffer
    transitions: list[Transition]


def collect(
    agent: PPOAgent,
    members: int = 6,
    steps: int = 7,
    seed: int = 0,
    reset_at: tuple[int, ...] = (),
    horizon: int | None = None,
) -> Rollout:
    """Act on random observations; fresh memory before the steps in `reset_at`; the last step is terminal."""
    generator = torch.Generator().manual_seed(seed)
    state = agent.initial_state(members)
    masks = FlatMasks(padded_choices(HEAD_SIZES).expand(members, -1, -1))
    transitions = []
    buffer = None
    for t in range(steps):
        observation = FlatObservation(torch.randn(members, FEATURES, generator=generator))
        reset = torch.full((members,), t in reset_at)
        uniforms = torch.rand(members, len(HEAD_SIZES), generator=generator)
        decided, state = agent.act(observation, masks, state, reset, uniforms)
        made = replace(
            decided,
            reward=torch.randn(members, generator=generator),
            terminated=torch.full((members,), t == steps - 1),
        )
        transitions.append(made)
        if buffer is None:
            buffer = TamiyoRolloutBuffer(members, horizon or steps, made)
        buffer.add(made)
    assert buffer is not None
    return Rollout(buffer, transitions)


def evaluate(agent: PPOAgent, batch: Sequences) -> PolicyOutput:
    """What the present weights say about stored actions."""
    steps, memory = batch.steps, agent.initial_state(len(batch.valid))
    return agent.policy.sequence(steps.observation, steps.masks, memory, steps.reset, actions=steps.actions)


def prepared(agent: PPOAgent, buffer: TamiyoRolloutBuffer) -> Sequences:
    """A rollout as the update sees it, in the network's units."""
    buffer.compute_advantages_and_returns(agent.config.gamma, agent.config.lam)
    return agent._prepare(buffer.get_batched_sequences())[0]
