"""The PPO objective as pure functions over rows of steps."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from esper.simic.agent.rollout_buffer import Sequences
from esper.tamiyo.policy.protocol import PolicyOutput


@dataclass(frozen=True)
class LossWeights:
    """The coefficients of one update."""

    clip: float
    value_clip: float | None
    value: float
    entropy: float | Tensor
    per_reader: bool = True  # else a head weighs as much as it is read: see `head_means`


@dataclass(frozen=True)
class LossTerms:
    """The loss and what it is made of; everything stays on the device."""

    loss: Tensor  # []
    policy_loss: Tensor  # []
    value_loss: Tensor  # []
    kl: Tensor  # [] of the whole action, per step
    clip_fraction: Tensor  # []
    head_kl: Tensor  # [H]
    head_entropy: Tensor  # [H]
    head_used: Tensor  # [H] bool: some step reads this head


def masked_mean(values: Tensor, weight: Tensor, dim: tuple[int, ...] = (0, 1)) -> Tensor:
    """The mean where weight is True; 0 where it never is. Nothing flows back from elsewhere."""
    total = torch.where(weight, values, 0.0).sum(dim)
    return total / weight.sum(dim).clamp(min=1)


def head_weights(output: PolicyOutput, batch: Sequences) -> Tensor:
    """Where a head earns credit: a real step, a choice, and a sampled op that reads it.  # [N, T, H] bool

    What became of the action does not matter. A gate may refuse it on one slot and not on another: whoever
    credited only what was executed would condition on the outcome, and the gradient would be biased.
    """
    acting = batch.valid & ~batch.steps.forced
    return output.relevant & acting.unsqueeze(-1)


def head_means(values: Tensor, weight: Tensor, per_reader: bool) -> Tensor:
    """Of each head, where weight is True; 0 for a head that no step reads.  # [N, T, H], [N, T, H] → [H]

    Per reader, all heads weigh alike, and the noise of a head that is hardly ever read weighs as much as the
    choice of the op. Over all steps that read any, the sum over heads has the gradient of the whole action's
    log-probability.
    """
    if per_reader:
        return masked_mean(values, weight)
    steps = weight.any(-1).sum()
    return torch.where(weight, values, 0.0).sum((0, 1)) / steps.clamp(min=1)


@torch.no_grad()
def approximate_kl(log_ratio: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """e^d − 1 − d: the KL of the whole action per acting step, and that of each head per step that reads it.

    The heads of one step add up (the chain rule of KL), so the whole is the sum over heads with the mask's
    weight.  # log_ratio, weight [N, T, H] → [], [H]
    """
    used = weight.float()
    estimate = log_ratio.expm1().sub_(log_ratio).mul_(used).flatten(0, 1)
    steps = (used.sum(-1) > 0).sum()
    head_steps = used.flatten(0, 1).sum(0)
    return estimate.sum() / steps.clamp(min=1), estimate.sum(0) / head_steps.clamp(min=1)


def ppo_loss(output: PolicyOutput, batch: Sequences, weights: LossWeights) -> LossTerms:
    """Clipped surrogate per head, value error, entropy."""
    weight = head_weights(output, batch)
    log_ratio = output.log_prob - batch.steps.log_prob  # [N, T, H]
    ratio = log_ratio.exp()
    advantage = batch.advantages.unsqueeze(-1)  # [N, T, 1]
    clipped = ratio.clamp(1 - weights.clip, 1 + weights.clip)
    surrogate = torch.minimum(ratio * advantage, clipped * advantage)
    policy_loss = -head_means(surrogate, weight, weights.per_reader).sum()

    value_loss = masked_mean(value_error(output.value, batch, weights.value_clip), batch.valid)
    entropy = head_means(output.entropy, weight, weights.per_reader)  # [H]
    kl, head_kl = approximate_kl(log_ratio, weight)
    outside = ((ratio.detach() - 1).abs() > weights.clip).float()
    return LossTerms(
        loss=policy_loss + weights.value * value_loss - weights.entropy * entropy.sum(),
        policy_loss=policy_loss.detach(),
        value_loss=value_loss.detach(),
        kl=kl,
        clip_fraction=masked_mean(outside, weight, dim=(0, 1, 2)),
        head_kl=head_kl,
        head_entropy=masked_mean(output.entropy.detach(), weight),
        head_used=weight.flatten(0, 1).any(0),
    )


def value_error(value: Tensor, batch: Sequences, clip: float | None) -> Tensor:
    """Half the squared error to the normalised returns, optionally clipped around the old value.  # [N, T]"""
    error = (value - batch.returns).square()
    if clip is not None:
        old = batch.steps.value
        error = torch.maximum(error, (old + (value - old).clamp(-clip, clip) - batch.returns).square())
    return 0.5 * error


def standardise(advantages: Tensor, weight: Tensor) -> Tensor:
    """Zero mean and unit scale over the steps that count.  # [N, T]"""
    dims = (0, 1)
    centred = advantages - masked_mean(advantages, weight, dims)
    scale = masked_mean(centred.square(), weight, dims).sqrt()
    return torch.where(weight, centred / scale.clamp(min=1e-8), 0.0)


def explained_variance(values: Tensor, returns: Tensor, weight: Tensor) -> Tensor:
    """1 is a perfect V, 0 is as good as a constant.  # []"""
    dims = (0, 1)
    residual, centred = returns - values, returns - masked_mean(returns, weight, dims)
    unexplained = masked_mean((residual - masked_mean(residual, weight, dims)).square(), weight, dims)
    return 1 - unexplained / masked_mean(centred.square(), weight, dims).clamp(min=1e-8)
