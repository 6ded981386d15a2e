"""PPO update of Tamiyo: sequences and all heads at once, against step after step and head after head.

The baseline is the shape of the earlier update with the same network: the sequence is unrolled by one call
for each step, each head's distribution stands by itself, and the KL of each head is read back to Python.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor
from torch.distributions import Categorical

from benchmarks.common import Case, Work
from esper.foundation.rows import map_tensors
from esper.lifecycle.actions import Head, relevance
from esper.simic.agent.ppo import PPOAgent, PPOConfig
from esper.simic.agent.rollout_buffer import Sequences
from esper.tamiyo.policy.network import TamiyoNet, TamiyoNetConfig, pad_masks
from tests.rollouts import Scene, play

STEPS = 25
ONE_EPOCH = PPOConfig(epochs=1, minibatches=1, target_kl=None)


class StepByStep:
    """One epoch of PPO over a rollout, as a list of heads and a loop over steps."""

    def __init__(self, net: TamiyoNet) -> None:
        self.net = net
        self.optimiser = torch.optim.Adam(net.parameters(), lr=3e-4)

    def update(self, batch: Sequences) -> float:
        steps = batch.steps
        read = relevance(steps.actions[..., Head.OP])  # [N, T, H]
        columns, state = [], batch.initial_state
        for t in range(batch.valid.shape[1]):
            heads, value, state = self._step(batch, t, state)
            columns.append((heads, value))
        loss = torch.zeros(())
        kl, weight = 0.0, 0.0
        for head in Head:
            mask = (read[..., head] & batch.valid & ~steps.forced).float()
            log_prob = torch.stack([column[0][head][0] for column in columns], dim=1)
            entropy = torch.stack([column[0][head][1] for column in columns], dim=1)
            log_ratio = log_prob - steps.log_prob[..., head]
            ratio = log_ratio.exp()
            surrogate = torch.min(ratio * batch.advantages, ratio.clamp(0.8, 1.2) * batch.advantages)
            count = mask.sum().clamp(min=1)
            loss = loss - (surrogate * mask).sum() / count - 0.05 * (entropy * mask).sum() / count
            kl += ((ratio - 1 - log_ratio) * mask).sum().item()
            weight += mask.sum().item()
        value = torch.stack([column[1] for column in columns], dim=1)
        loss = loss + 0.25 * (((value - batch.returns) ** 2) * batch.valid).sum() / batch.valid.sum()
        self.optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.net.parameters(), 5.0)
        self.optimiser.step()
        return kl / max(weight, 1e-8)

    def _step(
        self, batch: Sequences, t: int, state: Tensor
    ) -> tuple[list[tuple[Tensor, Tensor]], Tensor, Tensor]:
        """Log-prob and entropy of each head at one step, with a Categorical for each."""
        net, at = self.net, slice(t, t + 1)
        inputs = map_tensors(lambda tensor: tensor[:, at], batch.steps.observation)
        masks = map_tensors(lambda tensor: tensor[:, at], batch.steps.masks)
        actions = batch.steps.actions[:, at]
        seen = net._see(inputs, state, batch.steps.reset[:, at])
        op = actions[..., Head.OP]
        embedded = net.op_embedding(op)
        slot_logits = net._slot_logits(seen, embedded)[:, 0, 0]
        slot_legal = masks.slot_by_op[:, 0].gather(1, op.unsqueeze(-1).expand(-1, -1, slot_logits.shape[-1]))[
            :, 0
        ]
        reads_slot = torch.ones_like(actions[..., :1], dtype=torch.bool)
        details = net._detail_logits(seen, embedded, actions[..., :1], reads_slot)[:, 0]
        legal = [slot_legal, *pad_masks(masks)[:, 0].unbind(1), masks.op[:, 0]]
        logits = [slot_logits, *details.unbind(1), net.op_head(seen.memory)[:, 0]]
        heads = []
        for head in Head:
            distribution = Categorical(logits=logits[head].masked_fill(~legal[head], -1e8))
            heads.append((distribution.log_prob(actions[:, 0, head]), distribution.entropy()))
        return heads, net._value(seen.memory)[:, 0], seen.state


def prepare(members: int, slots: int) -> Case:
    torch.manual_seed(0)
    net = TamiyoNet(TamiyoNetConfig(width=128))
    agent = PPOAgent(net, ONE_EPOCH)
    buffer = play(agent, Scene.random(members, slots, STEPS))
    buffer.compute_advantages_and_returns(ONE_EPOCH.gamma, ONE_EPOCH.lam)
    batch, baseline = buffer.get_batched_sequences(), StepByStep(copy.deepcopy(net))
    return Case(ours=lambda: agent.update(buffer), baseline=lambda: baseline.update(batch))


WORKS = (Work("update", f"one epoch of PPO over {STEPS} steps, width 128", prepare, (16, 64, 128), (3,)),)
