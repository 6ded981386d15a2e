"""Hosts and their residual blocks: what fits and folds, and what is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from esper.population.blocks import (
    Block,
    CausalAttention,
    attention_block,
    conv_block,
    fold_units,
    mlp_block,
)
from esper.population.hosts import Host, build_host

PRESETS = [
    ("cnn", (1, 12), 5),
    ("cnn", (2, 8, 8), 4),
    ("mlp", (7,), 3),
    ("mlp", (1, 4, 4), 3),
    ("resnet", (1, 12), 5),
    ("resnet", (2, 8, 8), 4),
    ("resmlp", (7,), 3),
    ("gpt", (9,), 11),
]


def samples(preset: str, input_shape: tuple[int, ...], classes: int, batch: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    if preset == "gpt":
        tokens = torch.randint(classes, (2, batch, *input_shape), generator=generator)
        return tokens[0], tokens[1]
    return torch.randn(batch, *input_shape, generator=generator), torch.randint(
        classes, (batch,), generator=generator
    )


@pytest.mark.parametrize(("preset", "input_shape", "classes"), PRESETS)
def test_a_preset_records_its_joints(preset: str, input_shape: tuple[int, ...], classes: int) -> None:
    host = build_host(preset, input_shape, classes, width=4, depth=3)
    slots = 3 * {"resnet": 2, "gpt": 2}.get(preset, 1)  # two stages, or attention and perceptron
    assert host.num_slots == len(host.slot_shapes) == slots
    assert host.widths == ((4, 4, 4, 8, 8, 8) if preset == "resnet" else (4,) * slots)
    x, _ = samples(preset, input_shape, classes, 2)
    for segment, shape in zip(host.segments, host.slot_shapes, strict=True):
        x = segment(x)
        assert tuple(x.shape[1:]) == shape


@pytest.mark.parametrize(("preset", "input_shape", "classes"), PRESETS)
def test_a_sample_does_not_hear_its_batch(preset: str, input_shape: tuple[int, ...], classes: int) -> None:
    host = build_host(preset, input_shape, classes).double()
    inputs, _ = samples(preset, input_shape, classes, 5)
    inputs = inputs if preset == "gpt" else inputs.double()
    torch.testing.assert_close(host(inputs)[2:3], host(inputs[2:3]))


def test_a_gpt_host_does_not_hear_the_future() -> None:
    host = build_host("gpt", (8,), 11).double()
    tokens = torch.randint(11, (2, 8))
    changed = tokens.clone()
    changed[:, 5:] = (changed[:, 5:] + 1) % 11
    before, after = host(tokens), host(changed)
    torch.testing.assert_close(before[:, :5], after[:, :5], atol=1e-12, rtol=0)
    assert (before[:, 5:] - after[:, 5:]).abs().max() > 1e-6


BLOCKS = {
    "perceptron": (lambda: mlp_block(4, 6), (4,)),
    "attention": (lambda: attention_block(6, 3), (5, 6)),
    "signals": (lambda: conv_block(nn.Conv1d, 3, 4, 3), (3, 7)),
    "images": (lambda: conv_block(nn.Conv2d, 3, 5, 5), (3, 6, 6)),
}


@pytest.mark.parametrize(("time", "heads", "each"), [(5, 3, 2), (1, 1, 4), (7, 2, 3)])
def test_attention_to_the_past_is_that_of_torch(time: int, heads: int, each: int) -> None:
    qkv = torch.randn(2, time, 3 * heads * each, dtype=torch.float64)
    query, key, value = (part.unflatten(-1, (heads, each)).transpose(1, 2) for part in qkv.chunk(3, dim=-1))
    expected = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    found = CausalAttention(heads)(qkv)
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
    ("make", "message"),
    [
        (lambda: build_host("vgg", (1, 8, 8), 10), r"host preset is 'vgg'; allowed are cnn, mlp, resnet"),
        (lambda: build_host("resnet", (8,), 10), r"input_shape is \[8\]; a resnet host takes"),
        (lambda: build_host("gpt", (1, 8), 10), r"\[1, 8\]; a gpt host takes token indices"),
        (lambda: build_host("mlp", (8,), 1), r"num_classes is 1; a host needs at least 2"),
        (lambda: build_host("cnn", (1, 8, 8), 10, width=0), r"width is 0 for the cnn host; it must be"),
        (lambda: build_host("gpt", (8,), 10, width=6), r"width 6 does not divide into 4 heads"),
        (
            lambda: build_host("resnet", (1, 8, 8), 10, kernel=2),
            r"segment 0 .* an even kernel",
        ),
        (lambda: build_host("cnn", (1, 8, 8), 10, widht=4), r"no option 'widht'; allowed are width, depth"),
    ],
)
def test_bad_hosts_say_what_is_allowed(make: Callable[[], Host], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
