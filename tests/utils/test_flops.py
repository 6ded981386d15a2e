"""FLOPs that torch's own counter leaves out."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from esper.growing.progressive import count_flops
from esper.utils.errors import UserError
from esper.utils.flops import _recurrent_flops, flop_counter

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


@settings(deadline=None, max_examples=40)
@given(
    kind=st.sampled_from([nn.LSTM, nn.GRU, nn.RNN]),
    packed=st.booleans(),
    gradients=st.booleans(),
    layers=st.integers(1, 3),
    directions=st.integers(1, 2),
    sizes=st.tuples(size, size, size, size),
)
def test_recurrent_layers_count_each_matrix_for_each_step(
    kind: type[nn.RNNBase],
    packed: bool,
    gradients: bool,
    layers: int,
    directions: int,
    sizes: tuple[int, int, int, int],
) -> None:
    batch, time, width, hidden = sizes
    layer = kind(width, hidden, layers, batch_first=True, bidirectional=directions == 2)
    inputs = torch.randn(batch, time, width)
    lengths = torch.arange(batch) % time + 1 if packed else torch.full((batch,), time)
    if packed:
        inputs = nn.utils.rnn.pack_padded_sequence(inputs, lengths, batch_first=True, enforce_sorted=False)
    with torch.set_grad_enabled(gradients), flop_counter() as counter:
        layer(inputs)
    matrices = sum(p.numel() for p in layer.parameters() if p.ndim == 2)
    assert counter.get_total_flops() == 2 * int(lengths.sum()) * matrices


def test_the_recurrent_kernel_of_a_gpu_counts_the_same() -> None:
    """Its weights are a list, and a packed sequence has one axis less."""
    layer = nn.LSTM(3, 4, 2, bidirectional=True)
    matrices = sum(p.numel() for p in layer.parameters() if p.ndim == 2)
    shapes = [p.shape for p in layer.parameters()]
    assert _recurrent_flops(torch.Size([5, 7, 3]), shapes, 4, None) == 2 * 35 * matrices
    assert _recurrent_flops(torch.Size([35, 3]), shapes, 4, None) == 2 * 35 * matrices


@pytest.mark.skipif(torch.__version__ < (2, 9), reason="torch 2.8 has no such kernel for a CPU")
@settings(deadline=None, max_examples=30)
@given(experts=size, rows=size, width=size, out=size, ranks=st.sampled_from(["23", "22", "32", "33"]))
def test_products_of_groups_count_as_one_product_for_each(
    experts: int, rows: int, width: int, out: int, ranks: str
) -> None:
    """Groups of rows of the first factor, of what is summed over, of columns of the second; and stacked."""
    rows, width, out = 8 * rows, 8 * width, 8 * out  # what the kernel takes begins at 16 bytes
    a, b = torch.randn(experts, rows, width).bfloat16(), torch.randn(experts, width, out).bfloat16()
    offsets = torch.arange(1, experts + 1, dtype=torch.int32)
    behind = {  # one factor or both, with the groups behind each other
        "23": (a.flatten(0, 1), b, offsets * rows),
        "22": (a.movedim(0, 1).flatten(1, 2), b.flatten(0, 1), offsets * width),
        "32": (a, b.movedim(0, 1).flatten(1, 2), offsets * out),
        "33": (a, b, None),
    }
    first, second, ends = behind[ranks]
    with flop_counter() as counter:
        torch._grouped_mm(first, second, offs=ends)
    with FlopCounterMode(display=False) as apart:
        for one, other in zip(a, b, strict=True):
            one @ other
    assert counter.get_total_flops() == apart.get_total_flops() == 2 * experts * rows * width * out


def test_the_fast_path_is_what_it_was_before() -> None:
    before = torch.backends.mha.get_fastpath_enabled()
    with flop_counter():
        assert not torch.backends.mha.get_fastpath_enabled()
    assert torch.backends.mha.get_fastpath_enabled() == before
    with pytest.raises(UserError, match="does not run"):
        count_flops(nn.Linear(2, 2), torch.zeros(3))
    assert torch.backends.mha.get_fastpath_enabled() == before
