"""Blueprints: shapes kept, silent at birth and alive in every parameter."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from esper.lifecycle.actions import TOPOLOGY_BLUEPRINTS, Blend, Blueprint, selectable_blueprints
from esper.population.blueprints import (
    AlibiAttention,
    BlendGate,
    attention_heads,
    blueprint,
    blueprint_factory,
    build_blueprint,
    parameter_count,
)
from tests.population.reference import ReferenceSeed

# (topology, spatial_dims, the shape of a sample at a joint of width C)
PLACES = [("cnn", 1), ("cnn", 2), ("mlp", 0), ("transformer", 0)]
CASES = [(t, d, b) for t, d in PLACES for b in sorted(selectable_blueprints(t))]


def activations(topology: str, dims: int, width: int, batch: int = 4) -> Tensor:
    shapes = {"cnn": (width, *[6] * dims), "mlp": (width,), "transformer": (7, width)}
    return torch.randn(batch, *shapes[topology], generator=torch.Generator().manual_seed(5))


def awakened(seed: nn.Module) -> nn.Module:
    """The same seed with every parameter moved away from where it was born."""
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for parameter in seed.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return seed


def test_every_blueprint_of_every_topology_is_registered_and_counted() -> None:
    for topology, names in TOPOLOGY_BLUEPRINTS.items():
        for name in names:
            seed = build_blueprint(name, topology, 6, int(topology == "cnn"))
            size = sum(p.numel() for p in seed.parameters())
            assert parameter_count(name, topology, 6, int(topology == "cnn")) == size


@pytest.mark.parametrize(("topology", "dims", "name"), CASES)
def test_a_seed_keeps_the_shape_and_is_silent_at_birth(topology: str, dims: int, name: Blueprint) -> None:
    for width in (3, 4, 6, 8, 13):
        h = activations(topology, dims, width)
        s = build_blueprint(name, topology, width, dims)(h)
        assert s.shape == h.shape
        assert torch.equal(s, torch.zeros_like(h))
        assert awakened(build_blueprint(name, topology, width, dims))(h).abs().max() > 1e-3


@pytest.mark.parametrize("name", sorted(selectable_blueprints("transformer")))
def test_a_transformer_seed_and_its_gate_do_not_hear_the_future(name: Blueprint) -> None:
    seed = ReferenceSeed(
        awakened(build_blueprint(name, "transformer", 8)).double(),
        Blend.GATE,
        awakened(BlendGate(8, 0)).double(),  # type: ignore[arg-type]
    )
    h = activations("transformer", 0, 8).double()
    changed = h.clone()
    changed[:, 4:] += 1.0
    torch.testing.assert_close(seed(h, 1.0)[:, :4], seed(changed, 1.0)[:, :4], atol=1e-12, rtol=0)


def test_alibi_attention_equals_a_loop_over_positions() -> None:
    """Each head: softmax of q·k/√d − slope·distance over the past; one key and one value for all heads."""
    seed = awakened(AlibiAttention(8, 0)).double().requires_grad_(False)
    h = activations("transformer", 0, 8, batch=2).double()
    unit = nn.functional.layer_norm(h, (8,))
    heads, size = 4, 2
    expected = torch.zeros_like(h)
    for b in range(2):
        query = (unit[b] @ seed.query.weight.T).reshape(7, heads, size)  # type: ignore[union-attr,operator]
        key, value = (unit[b] @ seed.key_value.weight.T).split(size, dim=1)  # type: ignore[union-attr,operator]
        for t in range(7):
            parts = []
            for head in range(heads):
                slope = 2.0 ** (-8.0 * (head + 1) / heads)
                score = [float(query[t, head] @ key[u]) / size**0.5 - slope * (t - u) for u in range(t + 1)]
                weights = torch.softmax(torch.tensor(score, dtype=torch.float64), dim=0)
                parts.append(weights @ value[: t + 1])
            expected[b, t] = torch.cat(parts) @ seed.out.weight.T  # type: ignore[union-attr,operator]
    torch.testing.assert_close(seed(h), expected)


def test_norm_is_a_mix_of_the_input_and_its_normalization() -> None:
    seed = build_blueprint(Blueprint.NORM, "mlp", 6)
    h = activations("mlp", 0, 6)
    with torch.no_grad():
        seed.scale.fill_(100.0)  # type: ignore[union-attr,operator]
    torch.testing.assert_close(h + seed(h), nn.functional.layer_norm(h, (6,)))


@pytest.mark.parametrize(("topology", "dims"), PLACES)
def test_a_gate_is_one_half_at_birth_and_has_one_parameter_per_channel_and_one(
    topology: str, dims: int
) -> None:
    h = activations(topology, dims, 8)
    gate = BlendGate(8, dims)
    assert sum(p.numel() for p in gate.parameters()) == 9
    assert torch.equal(gate(h), torch.full_like(gate(h), 0.5))
    assert (gate(h) * h).shape == h.shape
    once = gate(h).numel()
    assert once == (len(h) * 7 if topology == "transformer" else len(h))


def test_heads_are_the_largest_divisor_up_to_four() -> None:
    assert [attention_heads(w) for w in (1, 2, 3, 4, 5, 6, 7, 8, 9, 10)] == [1, 2, 3, 4, 1, 3, 1, 4, 3, 2]


@pytest.fixture
def restored_entry() -> Iterator[None]:
    """CONV_LIGHT as it was, whatever a test registers."""
    factory = blueprint_factory(Blueprint.CONV_LIGHT, "cnn")
    yield
    blueprint(Blueprint.CONV_LIGHT, {"cnn"})(factory)


@pytest.mark.usefixtures("restored_entry")
def test_one_decorated_class_replaces_a_body() -> None:
    @blueprint(Blueprint.CONV_LIGHT, topologies={"cnn"})
    class Scale(nn.Module):
        """A scale per channel."""

        def __init__(self, width: int, spatial_dims: int) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.zeros(width))

        def forward(self, h: Tensor) -> Tensor:
            return h * self.scale.reshape(-1, *[1] * (h.ndim - 2))

    assert isinstance(build_blueprint(Blueprint.CONV_LIGHT, "cnn", 6, 2), Scale)
    assert parameter_count(Blueprint.CONV_LIGHT, "cnn", 6, 2) == 6


@pytest.mark.usefixtures("restored_entry")
def test_a_module_of_another_shape_is_refused() -> None:
    @blueprint(Blueprint.CONV_LIGHT, topologies={"cnn"})
    def other(width: int, spatial_dims: int) -> nn.Module:
        return nn.Conv1d(width, width, 3)

    message = r"CONV_LIGHT \(Conv1d\) turns shape \[2, 4, 5\] into \[2, 4, 3\]; a seed keeps the shape"
    with pytest.raises(ValueError, match=message):
        build_blueprint(Blueprint.CONV_LIGHT, "cnn", 4, 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((Blueprint.LORA, "cnn", 8, 2), r"LORA is not for cnn hosts; allowed are CONV_LIGHT"),
        ((99, "mlp", 8, 0), r"blueprint 99 is not for mlp hosts"),
        ((Blueprint.NORM, "rnn", 8, 0), r"topology is 'rnn'; allowed are cnn, transformer, mlp"),
    ],
)
def test_bad_requests_say_what_is_allowed(arguments: tuple[int, str, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_blueprint(*arguments)


def test_a_class_for_the_wrong_topology_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"Linear registers CONV_LIGHT for topology 'mlp'; CONV_LIGHT exists for cnn"
    ):
        blueprint(Blueprint.CONV_LIGHT, {"mlp"})(nn.Linear)
