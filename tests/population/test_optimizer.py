"""Optimizers over rows against torch.optim, row by row."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from esper.population.config import PopulationConfig
from esper.population.optimizer import RowWeights, clip_rows, step_rows

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


def test_a_rewritten_row_is_clean_and_its_neighbours_keep_every_bit() -> None:
    config = PopulationConfig()
    rows = random_rows(3, 4, 0)
    for _ in range(3):
        step_rows(rows, torch.ones(3, 4), torch.full((3,), 0.1), torch.ones(3, dtype=torch.bool), config)
    before = {name: value.clone() for name, value in rows.tensors().items()}
    rows.rewrite_rows(torch.tensor([1]), torch.full((1, 4), 7.0))
    assert rows.weights[1].tolist() == [7.0] * 4
    for name in ("first", "second", "steps"):
        assert getattr(rows, name)[1].abs().max() == 0
    for name, value in rows.tensors().items():
        assert torch.equal(value[[0, 2]], before[name][[0, 2]])


def trained_rows(rows: int, width: int, seed: int) -> RowWeights:
    made = random_rows(rows, width, seed)
    for _ in range(3):
        gradient = torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))
        step_rows(made, gradient, torch.full((rows,), 0.1), torch.arange(rows) != 0, PopulationConfig())
    return made


def test_a_slice_is_a_view_and_what_is_fetched_is_a_copy_that_can_be_put_back() -> None:
    rows = trained_rows(4, 3, 0)
    rows.slice(1, 3).weights.fill_(2.0)
    assert rows.weights[1:3].eq(2.0).all()
    before = {name: value.clone() for name, value in rows.tensors().items()}
    taken = RowWeights.zeros(2, 3, rows.weights.device)
    taken.fetch(rows, torch.tensor([3, 1]))
    for value in taken.tensors().values():
        value.add_(1.0)
    assert all(torch.equal(value, before[name]) for name, value in rows.tensors().items())
    rows.put(torch.tensor([3, 1]), taken)
    for name, value in rows.tensors().items():
        assert torch.equal(value[[0, 2]], before[name][[0, 2]])
        assert torch.equal(value[[1, 3]], before[name][[1, 3]] + 1.0)


def test_a_row_moves_from_a_column_on_with_its_optimizer() -> None:
    rows = trained_rows(4, 5, 1)
    before = {name: value.clone() for name, value in rows.tensors().items()}
    rows.move_rows(torch.tensor([2]), torch.tensor([0]), start=3)
    for name in ("weights", "first", "second"):
        value = getattr(rows, name)
        assert torch.equal(value[0], torch.cat([before[name][2, 3:], torch.zeros(3)]))
        assert torch.equal(value[1:], before[name][1:])
    assert rows.steps.tolist() == [3.0] * 4
