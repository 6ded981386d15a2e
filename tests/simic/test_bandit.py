"""Learning proofs: a bandit with eight heads, and values that do not run away."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from esper.lifecycle.actions import NUM_HEADS, Head, Op, head_sizes, relevance
from esper.simic.agent.ppo import PPOAgent, PPOConfig
from esper.simic.agent.rollout_buffer import TamiyoRolloutBuffer
from tests.simic.flat_policy import FlatMasks, FlatObservation, FlatPolicy, FlatPolicyConfig, padded_choices

SIZES = head_sizes(num_slots=3)
MEMBERS = 64


@dataclass(frozen=True)
class Bandit:
    """Each head has one good arm; the reward is the share of good arms among the heads that the op reads."""

    best: Tensor  # [H]
    masks: FlatMasks

    @staticmethod
    def make(seed: int) -> Bandit:
        generator = torch.Generator().manual_seed(seed)
        best = torch.stack([torch.randint(size, (), generator=generator) for size in SIZES])
        best[Head.OP] = Op.GERMINATE
        legal = padded_choices(SIZES)
        forbidden = torch.rand(legal.shape, generator=generator) < 0.2
        legal = (legal & ~forbidden).scatter(1, best.unsqueeze(1), True)
        return Bandit(best, FlatMasks(legal.expand(MEMBERS, -1, -1)))

    def pull(self, actions: Tensor) -> Tensor:
        """The reward.  # [N, H] → [N]"""
        good = (actions == self.best) & relevance(actions[:, Head.OP])
        return good.sum(1) / NUM_HEADS


@pytest.mark.parametrize("every_head_counts", [pytest.param(False, marks=pytest.mark.long), True])
def test_a_bandit_with_eight_heads_is_learned_in_every_head_that_counts(every_head_counts: bool) -> None:
    """Those that the best op reads, or all of them where every head is paid for at every pull."""
    updates = 40
    torch.manual_seed(0)
    bandit = Bandit.make(0)
    config = PPOConfig(
        learning_rate=1e-2, gamma=0.0, lam=0.0, minibatches=1, epochs=4, target_kl=0.2,
        entropy_start=0.02, entropy_end=0.001, entropy_updates=updates,
    )  # fmt: skip
    agent = PPOAgent(FlatPolicy(1, SIZES, FlatPolicyConfig(width=32)), config)
    generator = torch.Generator().manual_seed(0)
    observation = FlatObservation(torch.ones(MEMBERS, 1))
    fresh, ends = torch.zeros(MEMBERS, dtype=torch.bool), torch.ones(MEMBERS, dtype=torch.bool)
    buffer = None
    for _ in range(updates):
        for _ in range(4):
            uniforms = torch.rand(MEMBERS, NUM_HEADS, generator=generator)
            memory = agent.initial_state(MEMBERS)
            decision, _ = agent.act(observation, bandit.masks, memory, fresh, uniforms)
            good = decision.actions == bandit.best
            reward = good.float().mean(1) if every_head_counts else bandit.pull(decision.actions)
            step = replace(decision, reward=reward, terminated=ends)
            buffer = buffer or TamiyoRolloutBuffer(MEMBERS, 4, step)
            buffer.add(step)
        assert buffer is not None
        agent.update(buffer)
        buffer.reset()
    counts = relevance(bandit.best[Head.OP]) | every_head_counts
    share = good.float().mean(0)  # [H]
    assert (share[counts] >= 0.95).all(), share.tolist()


def test_a_fixed_horizon_end_that_pays_a_final_reward_is_terminal_and_values_stay_bounded() -> None:
    """Eight steps with the clock in sight; the last pays 1 if its choice was 1, so no return exceeds 1."""
    torch.manual_seed(0)
    members, steps = 64, 8
    policy = FlatPolicy(1, (2,), FlatPolicyConfig(width=16))
    agent = PPOAgent(policy, PPOConfig(learning_rate=1e-3, minibatches=1, epochs=1, target_kl=None))
    masks = FlatMasks(torch.ones(members, 1, 2, dtype=torch.bool))
    generator = torch.Generator().manual_seed(0)
    fresh = torch.zeros(members, dtype=torch.bool)
    buffer, highest = None, []
    for _ in range(150):
        values = []
        for t in range(steps):
            observation = FlatObservation(torch.full((members, 1), t / steps))
            uniforms = torch.rand(members, 1, generator=generator)
            decision, _ = agent.act(observation, masks, agent.initial_state(members), fresh, uniforms)
            last = torch.full((members,), t == steps - 1)
            reward = (last & (decision.actions[:, 0] == 1)).float()
            step = replace(decision, reward=reward, terminated=last, bootstrap_value=decision.value)
            buffer = buffer or TamiyoRolloutBuffer(members, steps, step)
            buffer.add(step)
            values.append(decision.value.max())
        highest.append(torch.stack(values).max().item())
        assert buffer is not None
        agent.update(buffer)
        buffer.reset()
    assert max(highest) <= 1.0
    assert highest[-1] > 0.8  # it has learned, so the bound means something
