"""The learning rate as a decision: what may be done to it, and what that does.

A member trains at the rate of its recipe times `scale`, and from the share `decay_at` of its budget on the
rate falls linearly to 0 at the end. Masks and the executor both ask `legal_rates`, so they cannot disagree.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from esper.lifecycle.actions import Rate
from esper.utils.devices import lookup
from esper.utils.rows import RowRecord

LEAST_SCALE, MOST_SCALE = 2.0**-7, 2.0**7  # of the recipe's rate: beyond, nothing was ever worth training
_factor = lookup([{Rate.DOUBLE: 2.0, Rate.HALVE: 0.5}.get(rate, 1.0) for rate in Rate])


@dataclass(frozen=True)
class Rates(RowRecord):
    """The learning rates of N members, each field [N] float32."""

    scale: Tensor  # times the rate of the recipe
    decay_at: Tensor  # the share of the budget from which the rate falls; infinite where the recipe decides


def legal_rates(rates: Rates, spent: Tensor) -> Tensor:
    """Return True where a choice is legal: KEEP always, the others until the rate falls.

    A scale stays within LEAST_SCALE and MOST_SCALE. spent [N]: share of the budget → [N, choices] bool
    """
    flat = spent.to(rates.decay_at.dtype) < rates.decay_at
    scale = rates.scale.unsqueeze(1) * _factor(torch.arange(len(Rate), device=spent.device))  # [N, choices]
    legal = (scale >= LEAST_SCALE) & (scale <= MOST_SCALE) & flat.unsqueeze(1)
    legal[:, Rate.KEEP] = True
    return legal


def change_rates(rates: Rates, choice: Tensor, spent: Tensor) -> Rates:
    """Carry out one choice per member; what is illegal or out of range changes nothing in its row.  # [N]"""
    safe = choice.clamp(0, len(Rate) - 1)
    legal = legal_rates(rates, spent).gather(1, safe.unsqueeze(1)).squeeze(1) & (safe == choice)
    done = torch.where(legal, safe, int(Rate.KEEP))
    return Rates(
        scale=rates.scale * _factor(done),
        decay_at=torch.where(done == Rate.DECAY, spent.to(rates.decay_at.dtype), rates.decay_at),
    )
