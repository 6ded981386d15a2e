"""Records of rows as plain tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from hypothesis import given
from hypothesis import strategies as st

from esper.utils.rows import tensors_of, to_cpu, where_rows

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


@dataclass(frozen=True)
class Inner:
    a: torch.Tensor
    b: torch.Tensor


@dataclass(frozen=True)
class Outer:
    inner: Inner
    c: torch.Tensor
    d: torch.Tensor | None = None


def outer(kinds: Sequence[torch.dtype], more: Sequence[list[int]], lacking: bool) -> Outer:
    a, b, c, d = (
        (10 * torch.randn(3, 2, *shape)).to(dtype) for dtype, shape in zip(kinds, more, strict=True)
    )
    return Outer(Inner(a, b), c, None if lacking else d)


@given(
    st.lists(TYPES, min_size=4, max_size=4),
    st.lists(st.lists(st.integers(1, 2), max_size=1), min_size=4, max_size=4),
    st.booleans(),
    st.booleans(),
    st.lists(st.booleans(), min_size=6, max_size=6),
)
def test_rows_and_slots_are_chosen_in_every_tensor_of_a_record(
    kinds: list[torch.dtype], more: list[list[int]], lacking: bool, by_slot: bool, flags: list[bool]
) -> None:
    where = torch.tensor(flags).view(3, 2) if by_slot else torch.tensor(flags[:3])
    yes, no = outer(kinds, more, lacking), outer(kinds, more, lacking)
    yes = replace(yes, c=no.c)  # the same tensor on both sides
    found, sides = tensors_of(where_rows(where, yes, no)), (tensors_of(no), tensors_of(yes))
    assert list(found) == list(sides[0])
    for name, value in found.items():
        for i in range(3):
            for s in range(2):
                side = sides[int(where[i, s] if by_slot else where[i])]
                assert torch.equal(value[i, s], side[name][i, s])
