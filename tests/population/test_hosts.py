"""Hosts: segments fit or say why not, and a causal host stays causal."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from esper.population.hosts import HOST_PRESETS, Host, build_host, cnn

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
    assert host.num_slots == len(host.joint_shapes) == slots
    assert host.widths == ((4, 4, 4, 8, 8, 8) if preset == "resnet" else (4,) * slots)
    x, _ = samples(preset, input_shape, classes, 2)
    for segment, shape in zip(host.segments, host.joint_shapes, strict=True):
        x = segment(x)
        assert tuple(x.shape[1:]) == shape


def test_the_dimensions_of_a_cnn_follow_from_its_input() -> None:
    assert build_host("cnn", (1, 40), 10).spatial_dims == 1
    assert build_host("cnn", (3, 8, 8), 10).spatial_dims == 2


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


def test_presets_have_no_buffers_and_no_dropout() -> None:
    for preset, input_shape, classes in PRESETS:
        host = build_host(preset, input_shape, classes)
        assert list(host.buffers()) == []
        assert not any(isinstance(module, nn.Dropout) for module in host.modules())


def two_segments(second_input: int = 4, second_width: int = 4) -> list[nn.Module]:
    return [nn.Conv1d(1, 4, 3, padding=1), nn.Conv1d(second_input, second_width, 3, padding=1)]


def pooled_head(width: int = 4, classes: int = 3) -> nn.Module:
    return nn.Sequential(nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(width, classes))


@pytest.mark.parametrize(
    ("segments", "head", "message"),
    [
        (
            two_segments(second_input=6),
            pooled_head(),
            r"segment 1 \(Conv1d\).*\[2, 4, 10\].*segment 0.*make its input",
        ),
        (
            two_segments(second_width=5),
            pooled_head(5),
            r"segment 1 gives shape \[2, 5, 10\].*5 wide.*width 4",
        ),
        (
            [nn.Sequential(nn.Conv1d(1, 4, 3), nn.Flatten())],
            nn.Linear(32, 3),
            r"segment 0 gives shape \[2, 32\].*3 axes.*flatten in the head",
        ),
        (two_segments(), nn.Identity(), r"the head gives shape \[2, 4, 10\].*\[batch, 5\]"),
        (two_segments(), pooled_head(classes=3), r"\[2, 3\].*\[batch, 5\]"),
    ],
)
def test_what_does_not_fit_is_named(segments: list[nn.Module], head: nn.Module, message: str) -> None:
    host = Host(segments, "cnn", head, 4, 1)
    with pytest.raises(ValueError, match=message):
        host.validate(torch.zeros(2, 1, 10), num_classes=5)


def test_widths_may_differ_between_joints() -> None:
    host = Host(two_segments(second_width=6), "cnn", pooled_head(6), (4, 6), 1).validate(
        torch.zeros(2, 1, 10)
    )
    assert host.joint_shapes == ((4, 10), (6, 10))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"topology": "rnn"}, r"topology is 'rnn'; allowed are cnn, mlp, transformer"),
        ({"segments": []}, r"segments is empty; give at least one"),
        ({"width": (4,)}, r"width is \(4,\) for 2 segments"),
        ({"width": 0}, r"width is 0 for 2 segments"),
        ({"spatial_dims": 3}, r"spatial_dims is 3 for a cnn host; allowed are \(1, 2\)"),
    ],
)
def test_bad_hosts_say_what_is_allowed(arguments: dict[str, object], message: str) -> None:
    good = {
        "segments": two_segments(),
        "topology": "cnn",
        "head": pooled_head(),
        "width": 4,
        "spatial_dims": 1,
    }
    with pytest.raises(ValueError, match=message):
        Host(**{**good, **arguments})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("vgg", (1, 8, 8), 10), r"host preset is 'vgg'; allowed are cnn, mlp, resnet, resmlp, gpt"),
        (("resnet", (8,), 10), r"input_shape is \[8\]; a resnet host takes"),
        (("cnn", (8,), 10), r"input_shape is \[8\]; a cnn host takes"),
        (("gpt", (1, 8), 10), r"input_shape is \[1, 8\]; a gpt host takes token indices"),
        (("mlp", (8,), 1), r"num_classes is 1; a host needs at least 2"),
    ],
)
def test_bad_presets_say_what_is_allowed(arguments: tuple[str, tuple[int, ...], int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_host(*arguments)


def test_bad_options_say_what_is_allowed() -> None:
    with pytest.raises(ValueError, match=r"width is 0 for the cnn host; it must be at least 1"):
        build_host("cnn", (1, 8, 8), 10, width=0)
    with pytest.raises(ValueError, match=r"width 6 does not divide into 4 heads"):
        build_host("gpt", (8,), 10, width=6)
    with pytest.raises(ValueError, match=r"the cnn host has no option 'widht'; allowed are width, depth"):
        build_host("cnn", (1, 8, 8), 10, widht=4)


def test_the_table_of_presets_is_open() -> None:
    HOST_PRESETS["wide"] = lambda input_shape, num_classes, width=32: cnn(input_shape, num_classes, width)
    try:
        assert build_host("wide", (1, 8, 8), 10).widths == (32, 32, 32)
    finally:
        del HOST_PRESETS["wide"]
