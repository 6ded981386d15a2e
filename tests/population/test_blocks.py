"""Residual blocks: attention to the past, branches that fold, and what does not."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from esper.population.blocks import (
    AttendToPast,
    Block,
    Branch,
    attention,
    convolutions,
    fold_units,
    perceptron,
)
from esper.population.hosts import Entered, Host

BLOCKS = {
    "perceptron": (lambda: perceptron(4, 6), (4,)),
    "attention": (lambda: attention(6, 3), (5, 6)),
    "signals": (lambda: convolutions(nn.Conv1d, 3, 4, 3), (3, 7)),
    "images": (lambda: convolutions(nn.Conv2d, 3, 5, 5), (3, 6, 6)),
}


@pytest.mark.parametrize(("time", "heads", "each"), [(5, 3, 2), (1, 1, 4), (7, 2, 3)])
def test_attention_to_the_past_is_that_of_torch(time: int, heads: int, each: int) -> None:
    qkv = torch.randn(2, time, 3 * heads * each, dtype=torch.float64)
    query, key, value = (part.unflatten(-1, (heads, each)).transpose(1, 2) for part in qkv.chunk(3, dim=-1))
    expected = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    found = AttendToPast(heads)(qkv)
    torch.testing.assert_close(found, expected.transpose(1, 2).flatten(-2), atol=1e-12, rtol=0)


@settings(max_examples=20, deadline=None)
@given(name=st.sampled_from(sorted(BLOCKS)), units=st.integers(1, 5), seed=st.integers(0, 1000))
def test_units_beside_a_block_fold_into_one_wider_block(name: str, units: int, seed: int) -> None:
    make, shape = BLOCKS[name]
    torch.manual_seed(seed)
    block = make().double()
    old, new = block.branch, block.branch.with_units(units).double()
    x = torch.randn(3, *shape, dtype=torch.float64)
    assert new(x).abs().max() == 0  # it says nothing yet
    nn.init.normal_(new.second.weight)
    wide = old.with_units(old.units + units).double()
    assert wide.units == old.units + units
    folded = fold_units(dict(old.named_parameters()), dict(new.named_parameters()), old.copies)
    wide.load_state_dict({key: value.detach() for key, value in folded.items()})
    torch.testing.assert_close(Block(wide)(x), block(x) + new(x), atol=1e-12, rtol=0)


@pytest.mark.parametrize(
    ("norm", "second"),
    [
        (nn.LayerNorm(4), nn.Linear(6, 4, bias=False)),
        (nn.LayerNorm(4, elementwise_affine=False), nn.Linear(6, 4)),
    ],
)
def test_what_would_not_fold_is_refused(norm: nn.Module, second: nn.Linear) -> None:
    with pytest.raises(ValueError, match="no parameters and its second layer no bias; use"):
        Branch(norm, nn.Linear(4, 6), nn.GELU(), second)


def test_groups_and_heads_that_do_not_divide_are_refused() -> None:
    norm = nn.GroupNorm(1, 4, affine=False)
    first = nn.Conv1d(4, 4, 3, padding=1, groups=2)
    grouped = Branch(norm, first, nn.ReLU(), nn.Conv1d(4, 4, 3, padding=1, bias=False))
    with pytest.raises(ValueError, match=r"convolution has 2 groups; units fold beside each other in 1"):
        grouped.with_units(2)
    with pytest.raises(ValueError, match=r"width 6 does not divide into 4 heads"):
        attention(6, 4)


@pytest.mark.parametrize(
    ("repeats", "message"),
    [
        ((1,), r"repeats is \(1,\) for 2 segments; give 0, 1 or 2 for each"),
        ((1, 3), r"repeats is \(1, 3\)"),
        ((2, 1), r"repeats is 2 at segment 0.*give 0 or 1"),
        ((1, 2), r"repeats is 2 at segment 1; a clone repeats two blocks where segment 1 is a Block"),
    ],
)
def test_two_blocks_are_repeated_only_where_two_stand_in_a_row(
    repeats: tuple[int, ...], message: str
) -> None:
    stem = Entered(nn.Linear(3, 4), perceptron(4, 2))
    behind = Entered(nn.Linear(4, 4), perceptron(4, 2))
    with pytest.raises(ValueError, match=message):
        Host([stem, behind], "mlp", nn.Linear(4, 2), 4, repeats=repeats)
    assert Host([stem, perceptron(4, 2)], "mlp", nn.Linear(4, 2), 4, repeats=(0, 2)).repeats == (0, 2)
