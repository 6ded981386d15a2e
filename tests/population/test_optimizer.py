"""Optimizers over rows against torch.optim, row by row."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from esper.population.config import PopulationConfig
from esper.population.optimizer import LARGE_ROW, RowWeights, clip_rows, learn_rows, step_rows

CPU = torch.device("cpu")


def random_rows(rows: int, width: int, seed: int) -> RowWeights:
    made = RowWeights.zeros(rows, width, CPU)
    made.weights.copy_(torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)))
    return made


def plain_optimizer(weight: Tensor, lr: float, config: PopulationConfig) -> torch.optim.Optimizer:
    if config.optimizer == "adamw":
        betas = (config.momentum, config.second_beta)
        return torch.optim.AdamW([weight], lr, betas, weight_decay=config.weight_decay)
    return torch.optim.SGD([weight], lr, momentum=config.momentum)


@settings(max_examples=25, deadline=None)
@given(
    optimizer=st.sampled_from(["adamw", "sgd"]),
    momentum=st.sampled_from([0.0, 0.5, 0.9]),
    decay=st.sampled_from([0.0, 0.1]),
    rates=st.lists(st.floats(1e-4, 0.1), min_size=3, max_size=3),
    active=st.lists(st.lists(st.booleans(), min_size=3, max_size=3), min_size=1, max_size=8),
    seed=st.integers(0, 1000),
)
def test_rows_with_their_own_rates_and_freezes_equal_torch_optim(
    optimizer: str,
    momentum: float,
    decay: float,
    rates: list[float],
    active: list[list[bool]],
    seed: int,
) -> None:
    """Float32, to 2e-6 of the weights; frozen rows keep every bit."""
    config = PopulationConfig(optimizer=optimizer, momentum=momentum, weight_decay=decay)  # type: ignore[arg-type]
    rows = random_rows(3, 5, seed)
    weights = [row.clone().requires_grad_() for row in rows.weights]
    plain = [plain_optimizer(w, lr, config) for w, lr in zip(weights, rates, strict=True)]
    generator = torch.Generator().manual_seed(seed + 1)
    for mask in active:
        gradient = torch.randn(3, 5, generator=generator)
        before = {name: value.clone() for name, value in rows.tensors().items()}
        step_rows(rows, gradient, torch.tensor(rates), torch.tensor(mask), config)
        for i, moves in enumerate(mask):
            if not moves:
                for name, value in rows.tensors().items():
                    assert torch.equal(value[i], before[name][i])
                continue
            weights[i].grad = gradient[i].clone()
            if optimizer == "sgd":  # plain SGD couples its decay; ours is decoupled
                with torch.no_grad():
                    weights[i].mul_(1.0 - rates[i] * decay)
            plain[i].step()
    torch.testing.assert_close(rows.weights, torch.stack(weights).detach(), atol=2e-6, rtol=2e-6)
    assert rows.steps.tolist() == [float(sum(column)) for column in zip(*active, strict=True)]


def test_large_rows_learn_as_small_ones_do() -> None:
    """Row 1 is clipped, row 2 frozen, row 3 belongs to a host whose gradient is not a number."""
    config, count = PopulationConfig(), LARGE_ROW + 3
    rows, plain = random_rows(4, count, 0), random_rows(4, count, 0)
    generator = torch.Generator().manual_seed(1)
    active, rates = torch.tensor([True, True, False, True]), torch.tensor([1e-2, 1e-3, 1e-2, 1e-2])
    for _ in range(5):
        gradient = torch.randn(4, count, generator=generator)
        gradient[0] *= 0.01
        norms = torch.linalg.vector_norm(gradient, dim=1)
        norms[3] = torch.nan
        step_rows(plain, clip_rows(gradient, norms, config.clip_norm), rates, active, config)
        learn_rows(rows, gradient, norms, rates, active, config)
    for name, value in rows.tensors().items():
        assert torch.equal(value[2], random_rows(4, count, 0).tensors()[name][2])
        torch.testing.assert_close(value, plain.tensors()[name], atol=2e-6, rtol=2e-6, equal_nan=True)
    assert bool(rows.weights[3].isnan().all())


@settings(max_examples=25, deadline=None)
@given(
    scales=st.lists(st.sampled_from([0.0, 1e-6, 1e-2, 1.0, 1e4]), min_size=1, max_size=4),
    limit=st.sampled_from([1e-3, 1.0, 5.0]),
)
def test_clipping_is_per_row_and_that_of_torch(scales: list[float], limit: float) -> None:
    generator = torch.Generator().manual_seed(4)
    gradient = torch.randn(len(scales), 6, generator=generator) * torch.tensor(scales).unsqueeze(1)
    clipped = clip_rows(gradient, gradient.norm(dim=1), limit)
    for i in range(len(scales)):
        parameter = torch.zeros(6, requires_grad=True)
        parameter.grad = gradient[i].clone()
        torch.nn.utils.clip_grad_norm_([parameter], limit)
        torch.testing.assert_close(clipped[i], parameter.grad)
    assert (clipped.norm(dim=1) <= limit * (1 + 1e-5)).all()


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_stays_in_its_row(optimizer: str, bad: float) -> None:
    config = PopulationConfig(optimizer=optimizer)  # type: ignore[arg-type]
    sick, well = random_rows(3, 4, 0), random_rows(3, 4, 0)
    gradient = torch.ones(3, 4)
    broken = gradient.clone()
    broken[0, 1] = bad
    everyone = torch.ones(3, dtype=torch.bool)
    for rows, g in ((sick, broken), (well, gradient)):
        step_rows(rows, clip_rows(g, g.norm(dim=1), 1.0), torch.full((3,), 0.1), everyone, config)
    for name, value in well.tensors().items():
        assert torch.equal(sick.tensors()[name][1:], value[1:])
    frozen = random_rows(3, 4, 0)
    step_rows(frozen, torch.full((3, 4), bad), torch.full((3,), 0.1), ~everyone, config)
    assert torch.equal(frozen.weights, random_rows(3, 4, 0).weights)
