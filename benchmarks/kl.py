"""KL over the heads: summed on the device, against the loop under review and against the fix it proposes.

`python -m benchmarks.kl` counts what each sends to the device and how often each would wait for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.common import Case, Work, one_thread, thread_ms
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


def prepare(members: int, slots: int) -> Case:
    log_ratio, mask = make_heads(members)
    ratios, masks = by_head(log_ratio), by_head(mask)
    return Case(ours=lambda: approximate_kl(log_ratio, mask), baseline=lambda: python_floats(ratios, masks))


WORKS = (Work("kl", f"KL of eight heads over {STEPS} steps", prepare, slots=(1,)),)


class _Reads(TorchDispatchMode):
    """Counts operations, and those that read a number back to Python."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0
        self.reads = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += 1
        self.reads += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def variants(members: int, device: str = "cpu") -> dict[str, Callable[[], object]]:
    log_ratio, mask = make_heads(members, device)
    ratios, masks = by_head(log_ratio), by_head(mask)
    return {
        "loop on the device (reviewed)": lambda: on_device_loop(ratios, masks),
        "Python floats (proposed)": lambda: python_floats(ratios, masks),
        "all heads at once (ours)": lambda: approximate_kl(log_ratio, mask),
    }


def main() -> None:
    print(f"{'members':>8}  {'variant':<32}{'CPU ms':>8}{'operations':>12}{'reads':>7}")
    for members in (16, 128):
        for name, call in variants(members).items():
            with one_thread():
                ms = thread_ms(call)
            with _Reads() as counted:
                call()
            print(f"{members:>8}  {name:<32}{ms:>8.3f}{counted.operations:>12}{counted.reads:>7}")


if __name__ == "__main__":
    main()
