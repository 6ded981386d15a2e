"""The PPO objective as pure functions over rows of steps."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from esper.simic.agent.rollout_buffer import Sequences
from esper.simic.config import PPOConfig
from esper.tamiyo.policy.network import PolicyOutput


@dataclass(frozen=True)
class LossTerms:
    """The loss and what it is made of; everything stays on the device."""

    loss: Tensor  # []
    policy_loss: Tensor  # []
    value_loss: Tensor  # []
    kl: Tensor  # [] of the whole action, per step
    clip_fraction: Tensor  # []
    head_entropy: Tensor  # [H]
    head_used: Tensor  # [H] bool: some step reads this head


def masked_mean(values: Tensor, weight: Tensor) -> Tensor:
    """Return the mean where weight is True, 0 where it never is; no gradient from elsewhere.  # []"""
    return torch.where(weight, values, 0.0).sum((0, 1)) / weight.sum().clamp(min=1)


@torch.no_grad()
def approximate_kl(log_ratio: Tensor, weight: Tensor) -> Tensor:
    """Estimate the KL of the whole action per acting step; its heads add up.  # [N, T, H] twice → []"""
    # Schulman's k3 estimator (joschu.net/blog/kl-approx.html): e^d − 1 − d with d = ln(π / π_old), never < 0.
    estimate = log_ratio.expm1().sub_(log_ratio).mul_(weight.float())
    return estimate.sum() / weight.any(-1).sum().clamp(min=1)


def ppo_loss(
    output: PolicyOutput,
    batch: Sequences,
    config: PPOConfig,
    entropy_coefficient: float | Tensor,
    imitate: bool = False,
) -> LossTerms:
    """Compute clipped surrogate per head, value error and entropy.

    imitate: the actions are a teacher's; their log-probability is raised by the weights of the rows.
    """
    # A head earns credit in a real step with a choice, if the sampled op reads it. What became of the action
    # does not matter. A gate may refuse it on one slot and not on another: whoever credited only what was
    # executed would condition on the outcome, and the gradient would be biased. A forced step has one legal
    # op: its log-probability is 0 whatever the weights are.
    weight = output.relevant & (batch.valid & ~batch.steps.forced).unsqueeze(-1)  # [N, T, H]
    readers = weight.sum((0, 1)).clamp(min=1)  # [H] steps that read each head
    # Means over all steps that read any head: their sum over heads has the gradient of the whole action's
    # log-probability. Means over each head's readers would weigh the noise of a rarely read head as much.
    acting = weight.any(-1).sum().clamp(min=1)
    # An imitator has no old policy: the teacher acted. The ratio is then 1 and KL and clipping are idle.
    old = output.log_prob.detach() if imitate else batch.steps.log_prob
    log_ratio = output.log_prob - old  # [N, T, H]
    ratio = log_ratio.exp()
    advantage = batch.advantages.unsqueeze(-1)  # [N, T, 1]
    # L = min(r·A, clip(r, 1 − ε, 1 + ε)·A), for each head by its own ratio.
    clipped = ratio.clamp(1 - config.clip, 1 + config.clip)
    earned = torch.minimum(ratio * advantage, clipped * advantage)
    surrogate = output.log_prob * batch.weights.view(-1, 1, 1) if imitate else earned
    policy_loss = -(torch.where(weight, surrogate, 0.0).sum((0, 1)) / acting).sum()

    # ½ (V − R)², both in units of the value normalizer.
    value_loss = masked_mean(0.5 * (output.value - batch.returns).square(), batch.valid)
    entropy = torch.where(weight, output.entropy, 0.0).sum((0, 1))  # [H]
    outside = ((ratio.detach() - 1).abs() > config.clip).float()
    entropy_bonus = entropy_coefficient * (entropy / acting).sum()
    if config.entropy_floor:
        missing = (config.entropy_floor - entropy / readers).clamp(min=0.0)  # [H]
        entropy_bonus = entropy_bonus - (missing * weight.any(1).any(0)).sum()
    return LossTerms(
        loss=policy_loss + config.value_coefficient * value_loss - entropy_bonus,
        policy_loss=policy_loss.detach(),
        value_loss=value_loss.detach(),
        kl=approximate_kl(log_ratio, weight),
        clip_fraction=(outside * weight).sum() / weight.sum().clamp(min=1),
        head_entropy=entropy.detach() / readers,
        head_used=weight.any(1).any(0),
    )


def standardize(advantages: Tensor, weight: Tensor) -> Tensor:
    """Shift and scale to zero mean and unit variance over the steps that count.  # [N, T]"""
    centered = advantages - masked_mean(advantages, weight)
    scale = masked_mean(centered.square(), weight).sqrt()
    return torch.where(weight, centered / scale.clamp(min=1e-8), 0.0)


def explained_variance(values: Tensor, returns: Tensor, weight: Tensor) -> Tensor:
    """Return the explained variance: 1 is a perfect V, 0 is as good as a constant.  # []"""
    residual, centered = returns - values, returns - masked_mean(returns, weight)
    # 1 − Var(R − V) / Var(R)
    unexplained = masked_mean((residual - masked_mean(residual, weight)).square(), weight)
    return 1 - unexplained / masked_mean(centered.square(), weight).clamp(min=1e-8)
