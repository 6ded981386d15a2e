"""FLOPs that torch's own counter leaves out."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from esper.growing.progressive import count_flops
from esper.utils.errors import UserError
from esper.utils.flops import flop_counter

size = st.integers(1, 6)


@settings(deadline=None)  # the first call imports what counts
@given(batch=size, heads=size, groups=size, time=size, keys=size, width=size, value=size)
def test_attention_counts_its_two_products(
    batch: int, heads: int, groups: int, time: int, keys: int, width: int, value: int
) -> None:
    """Values as wide as keys and narrower, and heads that share them."""
    query = torch.randn(batch, heads * groups, time, width)
    key, narrow = torch.randn(batch, heads, keys, width), torch.randn(batch, heads, keys, value)
    with flop_counter() as counter:
        F.scaled_dot_product_attention(query, key, torch.randn_like(key), enable_gqa=groups > 1)
    products = batch * heads * groups * time * keys
    assert counter.get_total_flops() == 4 * products * width
    with flop_counter() as counter:
        F.scaled_dot_product_attention(query, key, narrow, enable_gqa=groups > 1)
    assert counter.get_total_flops() == 2 * products * (width + value)


@pytest.mark.parametrize("norm_first", [False, True])
def test_a_transformer_encoder_counts_as_its_products_do(norm_first: bool) -> None:
    layer = nn.TransformerEncoderLayer(32, 2, 48, 0.1, batch_first=True, norm_first=norm_first)
    model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    products = 4 * 32 * 32 + 2 * 32 * 48  # of a token: queries, keys, values, outputs, and the perceptron
    attention = 2 * 7 * 32
    assert count_flops(model, torch.randn(5, 7, 32)) == 3 * 5 * 7 * 2 * (products + attention)


def test_the_fast_path_is_what_it_was_before() -> None:
    before = torch.backends.mha.get_fastpath_enabled()
    with flop_counter():
        assert not torch.backends.mha.get_fastpath_enabled()
    assert torch.backends.mha.get_fastpath_enabled() == before
    with pytest.raises(UserError, match="does not run"):
        count_flops(nn.Linear(2, 2), torch.zeros(3))
    assert torch.backends.mha.get_fastpath_enabled() == before
