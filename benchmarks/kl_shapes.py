"""Three ways to sum the KL of the heads: as reviewed, as proposed, and ours."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from esper.lifecycle.actions import Head
from esper.simic.agent.losses import approximate_kl

STEPS = 150


def make_heads(members: int, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Log-ratios and causal masks as an update meets them.  # [N, T, H] each"""
    generator = torch.Generator().manual_seed(0)
    shape = (members, STEPS, len(Head))
    log_ratio = 0.1 * torch.randn(shape, generator=generator)
    return log_ratio.to(device), (torch.rand(shape, generator=generator) < 0.4).to(device)


def by_head(values: Tensor) -> dict[str, Tensor]:
    return {head.name: values[..., head].contiguous() for head in Head}


def on_device_loop(log_ratios: dict[str, Tensor], masks: dict[str, Tensor]) -> Tensor:
    """The code under review: a loop over heads that stays on the device."""
    any_ratio = next(iter(log_ratios.values()))
    total, weight = torch.zeros((), device=any_ratio.device), torch.zeros((), device=any_ratio.device)
    for key, log_ratio in log_ratios.items():
        mask = masks[key].float()
        total = total + ((log_ratio.exp() - 1 - log_ratio) * mask).sum()
        weight = weight + mask.sum()
    return total / weight.clamp(min=1e-8)


def python_floats(log_ratios: dict[str, Tensor], masks: dict[str, Tensor]) -> float:
    """The proposed fix: Python floats, and so two reads from the device for every head."""
    total, weight = 0.0, 0.0
    for key, log_ratio in log_ratios.items():
        mask = masks[key].float()
        total += ((log_ratio.exp() - 1 - log_ratio) * mask).sum().item()
        weight += mask.sum().item()
    return total / max(weight, 1e-8)


def variants(members: int, device: str = "cpu") -> dict[str, Callable[[], object]]:
    """The three, over the same numbers, ready to call."""
    log_ratio, mask = make_heads(members, device)
    ratios, masks = by_head(log_ratio), by_head(mask)
    return {
        "loop on the device (reviewed)": lambda: on_device_loop(ratios, masks),
        "Python floats (proposed)": lambda: python_floats(ratios, masks),
        "all heads at once (ours)": lambda: approximate_kl(log_ratio, mask),
    }
