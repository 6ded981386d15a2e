"""Copies to and from the places of what is replayed."""

from __future__ import annotations

from functools import partial
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from esper.utils.graphs import CopyPlan, Graphed, GraphPool, copy_all, run_beside


def test_values_are_copied_however_they_lie_and_the_odd_ones_alone() -> None:
    values = [
        torch.arange(6.0).view(2, 3),
        torch.arange(6.0).view(3, 2).T,  # turned
        torch.tensor([[7.0], [8.0]]).expand(2, 3),
        torch.arange(6.0).view(2, 3) + 10,
        torch.tensor([True, False]),
    ]
    places = [torch.zeros(value.shape, dtype=value.dtype) for value in values]
    together, copy = [], torch._foreach_copy_
    with patch("torch._foreach_copy_", lambda there, here: (together.append(len(there)), copy(there, here))):
        copy_all(places, values)
    assert all(torch.equal(place, value) for place, value in zip(places, values, strict=True))
    assert together == [2, 1]  # one launch for each type, without the two that lie otherwise


def test_values_that_lie_otherwise_than_the_first_are_copied_all_the_same() -> None:
    first = [torch.arange(6.0).view(2, 3), torch.arange(2)]
    copies = CopyPlan(places := [torch.zeros_like(value) for value in first], first)
    later = [torch.arange(6.0).view(3, 2).T, torch.tensor(5).expand(2)]
    copies(places, later)
    assert all(torch.equal(place, value) for place, value in zip(places, later, strict=True))


@pytest.mark.gpu
def test_what_fails_while_it_is_captured_leaves_the_device_as_it_was() -> None:
    def too_much(x: Tensor) -> Tensor:
        if torch.cuda.is_current_stream_capturing():
            return torch.rand(1 << 45, device="cuda")
        return x

    pool, x = GraphPool(), torch.ones(2, device="cuda")
    failing, sound = Graphed(too_much, pool), Graphed(lambda x: x + torch.rand_like(x), pool)
    failing(x)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        failing(x)
    assert not torch.cuda.is_current_stream_capturing()
    assert torch.rand(2, device="cuda").shape == (2,)  # random numbers are drawn outside of captures again,
    drawn = [sound(x) for _ in range(3)]  # and inside
    assert all((value >= 1).all() for value in drawn)
    assert not torch.equal(drawn[1], drawn[2])


@pytest.mark.gpu
def test_calls_beside_each_other_compute_what_they_compute_one_after_another() -> None:
    """Forward and backward, layer behind layer, with memory that is wanted again at once."""
    weights = torch.randn(6, 256, 256, device="cuda") / 16

    def layers(x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.detach().requires_grad_()
        own, h = weights.detach().requires_grad_(), x
        for _ in range(8):
            h = h * 1.0  # whose memory goes back to the pool once both have read it
            calls = [partial(_some_products, h, own[k], 1 + 3 * k) for k in range(6)]
            h = torch.tanh(torch.stack(run_beside(calls, [h, own])).mean(0))
        return torch.autograd.grad(h.square().sum(), [x, own])

    graphed = Graphed(layers, GraphPool())
    for seed in range(6):
        x = torch.randn(512, 256, device="cuda", generator=torch.Generator("cuda").manual_seed(seed))
        for value, expected in zip(graphed(x), layers(x), strict=True):
            assert torch.equal(value, expected)


def _some_products(x: Tensor, w: Tensor, count: int) -> Tensor:
    for _ in range(count):
        x = torch.tanh(x @ w)
    return x
