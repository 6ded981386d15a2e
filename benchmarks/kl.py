"""KL over the heads: summed on the device, against the loop under review and against the fix it proposes.

`python -m benchmarks.kl` counts what each sends to the device and how often each would wait for it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.common import Case, Work, one_thread, thread_ms
from benchmarks.kl_shapes import STEPS, by_head, make_heads, python_floats, variants
from esper.simic.agent.losses import approximate_kl


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
