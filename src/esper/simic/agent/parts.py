"""Gradients of parts of a minibatch as rows of one tensor, on their way between processes."""

from __future__ import annotations

from dataclasses import fields

import torch
from torch import Tensor, nn

from esper.simic.agent.losses import Counts, LossTerms
from esper.tamiyo.policy.protocol import Policy

HEAD_TERMS = ("head_kl", "head_entropy")  # one number for each head
SCALAR_TERMS = tuple(f.name for f in fields(LossTerms) if f.name not in (*HEAD_TERMS, "head_used"))


def part_length(policy: Policy) -> int:
    """How many numbers `pack_part` gives."""
    terms = len(SCALAR_TERMS) + len(HEAD_TERMS) * len(policy.head_names)
    return sum(parameter.numel() for parameter in policy.parameters()) + terms + 1


def pack_part(policy: Policy, terms: LossTerms, faulty: Tensor) -> Tensor:
    """The gradients that the parameters have, the terms, and whether a head had no choice.  # [K]"""
    gradients = [_gradient(parameter).flatten() for parameter in policy.parameters()]
    values = [getattr(terms, name).flatten() for name in (*SCALAR_TERMS, *HEAD_TERMS)]
    return torch.cat([*gradients, *values, faulty.float().view(1)])


def unpack_parts(policy: Policy, total: Tensor, counts: Counts) -> tuple[LossTerms, Tensor]:
    """The inverse of `pack_part` for the sum over all parts of a minibatch: gradients go to the parameters.

    Returns the terms of the minibatch, and whether any part had a head without a choice.  # total [K]
    """
    parameters, heads = list(policy.parameters()), len(policy.head_names)
    sizes = [p.numel() for p in parameters] + [1] * len(SCALAR_TERMS) + [heads] * len(HEAD_TERMS) + [1]
    pieces = list(total.split(sizes))
    for parameter in parameters:
        parameter.grad = pieces.pop(0).view_as(parameter).clone()
    scalars = {name: pieces.pop(0).view(()) for name in SCALAR_TERMS}
    by_head = {name: pieces.pop(0) for name in HEAD_TERMS}
    return LossTerms(**scalars, **by_head, head_used=counts.readers > 0), pieces.pop().view(()) > 0


def _gradient(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
