"""Copies to and from the places of what is replayed."""

from __future__ import annotations

from unittest.mock import patch

import torch

from esper.foundation.replay import copy_all


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
