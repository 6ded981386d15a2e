"""Copies to and from the places of what is replayed."""

from __future__ import annotations

from unittest.mock import patch

import torch

from esper.foundation.replay import Copies, copy_all


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
    copies = Copies(places := [torch.zeros_like(value) for value in first], first)
    later = [torch.arange(6.0).view(3, 2).T, torch.tensor(5).expand(2)]
    copies(places, later)
    assert all(torch.equal(place, value) for place, value in zip(places, later, strict=True))
