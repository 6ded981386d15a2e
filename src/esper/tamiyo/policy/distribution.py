"""One masked distribution for all heads: the same function samples, stores, updates and reports.

Heads with different numbers of choices are padded to C; padding is never legal. Everything is FP32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from esper.utils.devices import device_table

LOWEST = torch.finfo(torch.float32).min


@dataclass(frozen=True)
class ActionEvaluation:
    """What the heads say about given actions; all [..., H]."""

    log_prob: Tensor  # float32, 0 where the head is not read
    entropy: Tensor  # Shannon's, divided by ln(legal choices): 1 is uniform; 0 where the head is not read
    fault: Tensor  # bool: the head is read, and its choice is not legal, as where nothing is


class MaskedHeads:
    """H categorical heads over the legal among C padded choices.

    The softmax is spelled out: torch's own is slow on short rows, and so is exp of what a mask pushed away.
    """

    def __init__(self, logits: Tensor, legal: Tensor) -> None:
        """Compute probabilities; logits, legal [..., H, C], legal boolean."""
        self.legal = legal.float()
        self.num_legal = self.legal.sum(-1)  # [..., H] float32
        logits, illegal = logits.float(), ~legal
        # Softmax over the legal choices alone, shifted by their maximum so that exp never overflows.
        highest = logits.detach().masked_fill(illegal, LOWEST).amax(-1, keepdim=True)
        shifted = (logits - highest).masked_fill(illegal, 0.0)
        weights = shifted.exp() * self.legal
        total = weights.sum(-1, keepdim=True).clamp(min=1.0)  # at least 1, but for a row with nothing legal
        self.probs = weights / total  # [..., H, C]; 0 where illegal
        self.log_probs = shifted - total.log()  # [..., H, C]; finite and meaningless where illegal

    def sample(self, uniforms: Tensor) -> Tensor:
        """Sample by inverse CDF from uniforms [..., H] in [0, 1); a legal choice whatever the rounding.

        The first legal choice whose cumulated probability exceeds u; the last legal one if rounding leaves
        none; 0 if nothing is legal.  # [..., H] int64
        """
        # Scale u by the total, which rounding may leave below 1.
        cumulated = self.probs.cumsum(-1)
        beyond = cumulated > uniforms.unsqueeze(-1) * cumulated[..., -1:]
        first, last = _search_keys(self.legal.device, self.legal.shape[-1])
        return (torch.where(beyond, first, last) * self.legal).argmax(-1)

    def mode(self) -> Tensor:
        """Return the likeliest legal choice; 0 if nothing is legal.  # [..., H] int64"""
        return self.probs.argmax(-1)

    def evaluate(self, actions: Tensor, relevant: Tensor) -> ActionEvaluation:
        """Return log-prob and entropy of the heads that are read.  # actions, relevant [..., H]"""
        index = actions.unsqueeze(-1)
        log_prob = self.log_probs.gather(-1, index).squeeze(-1)
        allowed = self.legal.gather(-1, index).squeeze(-1) > 0
        # H / ln n; a single legal choice has H = 0, so ln 2 is as good a divisor as any.
        entropy = -(self.probs * self.log_probs).sum(-1) / self.num_legal.clamp(min=2).log()
        return ActionEvaluation(
            log_prob=log_prob.masked_fill(~(relevant & allowed), 0.0),
            entropy=entropy.masked_fill(~relevant, 0.0),
            fault=relevant & ~allowed,
        )


@device_table
def _search_keys(choices: int) -> Tensor:
    """Return keys whose largest legal one marks the sample.

    A choice beyond u has key 2C − i, so that the first of them wins; one before u has i + 1, so that the
    last of them wins, and only when none is beyond.  # [2, C]
    """
    index = torch.arange(choices, dtype=torch.float32)
    return torch.stack((2 * choices - index, index + 1))
