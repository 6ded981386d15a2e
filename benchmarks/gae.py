"""The advantages: all members at once against one member after another, one step after another.

The baseline is the shape that a review of the earlier code quotes: a Python loop over members and steps on
scalar tensors, with a fresh zero cloned at every terminal.

`python -m benchmarks.gae` compares our own kernels, from which `compute_gae` takes the fastest.
"""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

from benchmarks.common import Case, Work, one_thread, thread_ms
from esper.simic.agent.gae import GaeInputs, Kernel, compute_gae, loop_kernel, scan_kernel
from tests.operations import count_operations

STEPS = 150
GAMMA, LAMBDA = 0.995, 0.98


def make_rows(members: int, steps: int = STEPS, device: str = "cpu") -> GaeInputs:
    """Full rows with an end now and then."""
    generator = torch.Generator().manual_seed(0)
    floats = [torch.randn(members, steps, generator=generator) for _ in range(3)]
    flags = [torch.rand(members, steps, generator=generator) < 0.01 for _ in range(2)]
    rows = GaeInputs(*floats, *flags, torch.full((members,), steps))
    return GaeInputs(*(tensor.to(device) for tensor in rows))


def member_by_member(rows: GaeInputs, gamma: float = GAMMA, lam: float = LAMBDA) -> tuple[Tensor, Tensor]:
    """What the earlier buffer did."""
    advantages, returns = torch.zeros_like(rows.rewards), torch.zeros_like(rows.rewards)
    zero = torch.zeros(())
    for member, steps in enumerate(rows.step_counts.tolist()):
        last_gae = zero.clone()
        for t in reversed(range(steps)):
            if rows.terminated[member, t]:
                last_gae = zero.clone()
            going_on = 1.0 - float(rows.terminated[member, t])
            linked = going_on * (1.0 - float(rows.truncated[member, t]))
            delta = rows.rewards[member, t] + gamma * rows.next_values[member, t] * going_on
            delta = delta - rows.values[member, t]
            last_gae = delta + gamma * lam * linked * last_gae
            advantages[member, t] = last_gae
            returns[member, t] = last_gae + rows.values[member, t]
    return advantages, returns


def mended(rows: GaeInputs, gamma: float = GAMMA, lam: float = LAMBDA) -> tuple[Tensor, Tensor]:
    """The mend that the review proposes: ends as a mask made before the loop, and no clone."""
    advantages, returns = torch.zeros_like(rows.rewards), torch.zeros_like(rows.rewards)
    going_on = (~rows.terminated).float()
    linked = going_on * (~rows.truncated).float()
    for member, steps in enumerate(rows.step_counts.tolist()):
        last_gae = torch.zeros(())
        for t in reversed(range(steps)):
            delta = rows.rewards[member, t] + gamma * rows.next_values[member, t] * going_on[member, t]
            delta = delta - rows.values[member, t]
            last_gae = delta + gamma * lam * linked[member, t] * last_gae
            advantages[member, t] = last_gae
            returns[member, t] = last_gae + rows.values[member, t]
    return advantages, returns


def prepare(members: int, slots: int) -> Case:
    rows = make_rows(members)
    return Case(
        ours=lambda: compute_gae(rows, gamma=GAMMA, lam=LAMBDA), baseline=lambda: member_by_member(rows)
    )


def prepare_mended(members: int, slots: int) -> Case:
    rows = make_rows(members)
    return Case(ours=lambda: mended(rows), baseline=lambda: member_by_member(rows))


WORKS = (
    Work("gae", f"advantages over {STEPS} steps", prepare, members=(16, 64, 128), slots=(1,)),
    Work("gae_mended", "the mend that the review proposes", prepare_mended, members=(16,), slots=(1,)),
)


def main() -> None:
    kernels: dict[str, Kernel] = {"loop over T": loop_kernel, "doubling scan": scan_kernel}
    if importlib.util.find_spec("numba"):
        from esper.simic.agent.gae_numba import numba_kernel

        kernels["numba"] = numba_kernel
    print(f"{'kernel':<16}{'members':>8}{'ms':>9}{'operations':>12}")
    for members in (16, 128, 1024):
        rows = make_rows(members)
        for name, kernel in kernels.items():
            with one_thread():
                ms = thread_ms(lambda k=kernel, r=rows: k(r, GAMMA, LAMBDA))
            operations = count_operations(lambda k=kernel, r=rows: k(r, GAMMA, LAMBDA))
            print(f"{name:<16}{members:>8}{ms:>9.3f}{operations:>12}")


if __name__ == "__main__":
    main()
