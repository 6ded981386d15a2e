"""Records of rows as plain tensors."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from esper.utils.rows import to_cpu

SHAPES = st.lists(st.integers(0, 3), max_size=3)
TYPES = st.sampled_from([torch.float32, torch.float64, torch.int64, torch.bool])


@given(st.lists(st.tuples(SHAPES, TYPES), max_size=8))
def test_tensors_of_any_types_and_shapes_come_to_the_cpu_as_copies(
    kinds: list[tuple[list[int], torch.dtype]],
) -> None:
    tensors = {str(k): torch.randn(shape).to(dtype) for k, (shape, dtype) in enumerate(kinds)}
    found = to_cpu(tensors)
    assert list(found) == list(tensors)
    for name, value in tensors.items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name], value)
        assert value.numel() == 0 or found[name].data_ptr() != value.data_ptr()
