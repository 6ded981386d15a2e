"""Running scales against numpy over everything seen so far."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from esper.simic.agent.normalizers import ValueNormalizer
from esper.simic.agent.optimizer import VetoAdam


@settings(deadline=None, max_examples=30)
@given(
    sizes=st.lists(st.integers(0, 20), min_size=1, max_size=5),
    seed=st.integers(0, 1000),
    offset=st.sampled_from([0.0, 1e3]),
)
def test_the_scale_is_that_of_all_rows_seen_so_far(sizes: list[int], seed: int, offset: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    normalizer = ValueNormalizer()
    seen = []
    for size in sizes:
        rows = offset + 2 * torch.randn(size + 2, generator=generator)
        valid = torch.rand(size + 2, generator=generator) < 0.7
        normalizer.update(rows, valid)
        seen.append(rows[valid])
    everything = torch.cat(seen).double()
    assert normalizer.count == len(everything)
    if len(everything):
        torch.testing.assert_close(normalizer.mean, everything.mean().view(1), atol=1e-6, rtol=1e-9)
        torch.testing.assert_close(
            normalizer.variance, everything.var(correction=0).view(1), atol=1e-6, rtol=1e-6
        )
    else:
        assert torch.equal(normalizer.normalize(rows), rows)


def test_non_finite_rows_are_ignored() -> None:
    clean, dirty = ValueNormalizer(), ValueNormalizer()
    rows = torch.randn(8)
    spoiled = torch.cat((rows, torch.tensor([float("nan"), float("inf"), -float("inf")])))
    clean.update(rows, torch.ones(8, dtype=torch.bool))
    dirty.update(spoiled, torch.ones(11, dtype=torch.bool))
    for name, tensor in clean.state_dict().items():
        torch.testing.assert_close(dirty.state_dict()[name], tensor)


def test_normalize_and_denormalize_are_inverse() -> None:
    normalizer = ValueNormalizer()
    rows = 5 + 3 * torch.randn(64)
    normalizer.update(rows, torch.ones(64, dtype=torch.bool))
    normal = normalizer.normalize(rows)
    torch.testing.assert_close(normal.mean(), torch.zeros(()), atol=1e-5, rtol=0)
    torch.testing.assert_close(normal.std(correction=0), torch.ones(()), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(normalizer.denormalize(normal), rows)
    constant = ValueNormalizer()
    constant.update(torch.full((10,), 2.0), torch.ones(10, dtype=torch.bool))
    assert constant.normalize(torch.tensor([2.0])).item() == 0.0, "no division by 0"


@pytest.mark.parametrize("scale", [0.01, 1.0, 1000.0])
def test_a_new_scale_leaves_what_the_value_head_says(scale: float) -> None:
    torch.manual_seed(0)
    normalizer, head = ValueNormalizer(), nn.Linear(6, 1)
    memory = torch.randn(5, 6)
    for round_number in range(4):
        before = normalizer.denormalize(head(memory))
        returns = scale * (round_number + torch.randn(4, 7))
        normalizer.update_returns(returns, torch.ones(4, 7, dtype=torch.bool), head)
        torch.testing.assert_close(normalizer.denormalize(head(memory)), before, atol=1e-4 * scale, rtol=1e-4)
    assert normalizer.count == 4 * 4 * 7


def test_the_value_heads_moments_change_units_with_it() -> None:
    """Adam's moments after a change of units are those that the same errors give in the new units."""
    torch.manual_seed(0)
    normalizer, head = ValueNormalizer(), nn.Linear(6, 1)
    memory, returns = torch.randn(32, 6), 3 + 5 * torch.randn(32, 1)

    def moments_of_one_step() -> VetoAdam:
        adam = VetoAdam(head, learning_rate=1e-12, epsilon=1e-8)
        adam.zero_grad()
        (head(memory) - normalizer.normalize(returns)).square().mean().backward()
        adam.step(vetoed=torch.tensor(False))
        return adam

    adam = moments_of_one_step()
    factor = normalizer.update_returns(returns, torch.ones(32, 1, dtype=torch.bool), head)
    assert factor < 0.5
    adam.rescale(head, factor)
    for name, wanted in moments_of_one_step().state_dict().items():
        torch.testing.assert_close(adam.state_dict()[name], wanted, rtol=1e-4, atol=1e-6)
