"""The advantages: every kernel against a scalar float64 loop, golden data and closed forms."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from esper.simic.agent.gae import GaeInputs, Kernel, compute_gae, loop_kernel
from tests.operations import count_operations

GOLDEN = Path(__file__).parents[1] / "data" / "gae.npz"
KERNELS: dict[str, Kernel] = {"loop": loop_kernel}
if importlib.util.find_spec("numba"):
    from esper.simic.agent.gae_kernels import numba_kernel

    KERNELS["numba"] = numba_kernel

every_kernel = pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)


def scalar_reference(rows: GaeInputs, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """One number at a time, in float64, straight from the definition."""
    advantages = torch.zeros(rows.rewards.shape, dtype=torch.float64)
    returns = torch.zeros_like(advantages)
    for n in range(len(advantages)):
        ahead = 0.0
        for t in range(int(rows.step_counts[n]) - 1, -1, -1):
            reward, value = float(rows.rewards[n, t]), float(rows.values[n, t])
            if rows.terminated[n, t]:
                ahead = reward - value
            elif rows.truncated[n, t]:
                ahead = reward + gamma * float(rows.next_values[n, t]) - value
            else:
                ahead = reward + gamma * float(rows.next_values[n, t]) - value + gamma * lam * ahead
            advantages[n, t], returns[n, t] = ahead, ahead + value
    return advantages, returns


def random_rows(seed: int, members: int, horizon: int, ends: float) -> GaeInputs:
    generator = torch.Generator().manual_seed(seed)

    def normal() -> Tensor:
        return torch.randn(members, horizon, generator=generator)

    def flags() -> Tensor:
        return torch.rand(members, horizon, generator=generator) < ends

    counts = torch.randint(0, horizon + 1, (members,), generator=generator)
    return GaeInputs(normal(), normal(), normal(), flags(), flags(), counts)


def assert_same(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    for ours, reference in zip(found, expected, strict=True):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours.double(), reference, atol=2e-5, rtol=1e-5)


@every_kernel
@settings(deadline=None, max_examples=40)
@given(
    seed=st.integers(0, 2**31),
    members=st.integers(1, 9),
    horizon=st.sampled_from([1, 2, 3, 8, 31, 64, 65]),
    ends=st.sampled_from([0.0, 0.1, 0.6, 1.0]),
    gamma=st.sampled_from([0.0, 0.9, 1.0]),
    lam=st.sampled_from([0.0, 0.95, 1.0]),
)
def test_gae_equals_a_slow_scalar_reference(
    kernel: Kernel, seed: int, members: int, horizon: int, ends: float, gamma: float, lam: float
) -> None:
    rows = random_rows(seed, members, horizon, ends)
    assert_same(kernel(rows, gamma, lam), scalar_reference(rows, gamma, lam))


@every_kernel
@pytest.mark.parametrize("batch", ["a", "b", "c", "d"])
def test_gae_equals_the_golden_data(kernel: Kernel, batch: str) -> None:
    with np.load(GOLDEN) as golden:
        data = {name: torch.from_numpy(golden[f"{batch}_{name}"]) for name in (
            "rewards", "values", "bootstrap_values", "terminated", "truncated", "step_counts",
            "gamma_lambda", "advantages", "returns",
        )}  # fmt: skip
    values = data["values"].float()
    following = torch.cat((values[:, 1:], torch.zeros(len(values), 1)), dim=1)
    rows = GaeInputs(
        data["rewards"].float(),
        values,
        torch.where(data["truncated"], data["bootstrap_values"].float(), following),
        data["terminated"],
        data["truncated"],
        data["step_counts"].long(),
    )
    gamma, lam = data["gamma_lambda"].tolist()
    assert_same(kernel(rows, gamma, lam), (data["advantages"], data["returns"]))


@every_kernel
def test_a_constant_value_function_makes_the_advantage_a_formula(kernel: Kernel) -> None:
    """With r = 1, v = c and no end: δ = 1 + γc − c, and A_t = δ·(1 − (γλ)^(T−t)) / (1 − γλ)."""
    gamma, lam, value, steps = 0.9, 0.8, 3.0, 12
    values, never = torch.full((1, steps), value), torch.zeros(1, steps, dtype=torch.bool)
    rows = GaeInputs(torch.ones(1, steps), values, values.clone(), never, never, torch.tensor([steps]))
    advantages, returns = kernel(rows, gamma, lam)
    delta, decay = 1 + gamma * value - value, gamma * lam
    formula = torch.tensor([delta * (1 - decay ** (steps - t)) / (1 - decay) for t in range(steps)])
    torch.testing.assert_close(advantages[0], formula, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(returns[0], formula + value, atol=1e-5, rtol=1e-5)


@every_kernel
def test_what_is_not_read_may_be_anything(kernel: Kernel) -> None:
    """Padding, and v' at a terminal, hold garbage in real buffers."""
    rows = random_rows(5, 6, 16, 0.2)
    expected = kernel(rows, 0.9, 0.9)
    padding = torch.arange(16) >= rows.step_counts.unsqueeze(1)
    for tensor in (rows.rewards, rows.values, rows.next_values):
        tensor[padding] = float("nan")
    rows.next_values[rows.terminated] = float("nan")
    for ours, reference in zip(kernel(rows, 0.9, 0.9), expected, strict=True):
        torch.testing.assert_close(ours, reference, rtol=0, atol=0)
        assert (ours[padding] == 0).all()


def test_the_number_of_operations_does_not_grow_with_terminals_or_members() -> None:
    counts = {
        (members, ends): count_operations(
            lambda n=members, e=ends: loop_kernel(random_rows(0, n, 32, e), 0.9, 0.9)
        )
        for members in (2, 128)
        for ends in (0.0, 0.9)
    }
    assert len(set(counts.values())) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("horizon", [1, 25, 150, 300])
def test_the_gpu_kernel_equals_the_scalar_reference(horizon: int) -> None:
    rows = random_rows(3, 33, horizon, 0.1)
    on_gpu = GaeInputs(*(tensor.cuda() for tensor in rows))
    found = compute_gae(on_gpu, gamma=0.99, lam=0.95)
    assert_same((found[0].cpu(), found[1].cpu()), scalar_reference(rows, 0.99, 0.95))
