"""Blueprints: the architectures of seeds.

A blueprint is an ordinary `nn.Module` that is built from (width, spatial_dims) and keeps the shape of its
input. It returns s = seed(h) alone; how s joins the activation h is the slot's matter. At birth s is 0,
because a last scale or a last layer starts at 0; nothing that sits before a normalization or a nonlinearity
does, so every parameter has a gradient after at most one step of training.

The numbering of blueprints is part of every policy, so their names are fixed; their bodies are not. One
decorated class gives a blueprint another body in a topology:

    @blueprint(Blueprint.CONV_LIGHT, topologies={"cnn"}, parameters=lambda c, d: 5**d * c * c + 2 * c)
    class WideConvolution(nn.Module):
        '''Kernel 5, SiLU, norm.'''
        def __init__(self, width: int, spatial_dims: int) -> None: ...
        def forward(self, h: Tensor) -> Tensor: ...
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from esper.lifecycle.actions import TOPOLOGY_BLUEPRINTS, Blueprint
from esper.population.blocks import causal_mask
from esper.population.hosts import CONVOLUTIONS, CausalAttention, GlobalMean
from esper.population.registry import (
    BlueprintEntry,
    BlueprintRow,
    blueprint,
    blueprint_entry,
    blueprint_table,
    build_blueprint,
    parameter_count,
)

__all__ = [
    "BlendGate",
    "BlueprintEntry",
    "BlueprintRow",
    "blueprint",
    "blueprint_entry",
    "blueprint_table",
    "build_blueprint",
    "gate_parameter_count",
    "parameter_count",
]

ATTENTION_HEADS = 4
SQUEEZE_REDUCTION = 4
LORA_RANK = 8
LORA_LARGE_RANK = 32


def _conv(spatial_dims: int, c_in: int, c_out: int, kernel: int = 3, groups: int = 1) -> nn.Module:
    """A convolution that keeps the resolution, without bias."""
    if spatial_dims not in CONVOLUTIONS:
        raise ValueError(
            f"spatial_dims is {spatial_dims}; cnn blueprints exist for 1 (signals) and 2 (images)"
        )
    return CONVOLUTIONS[spatial_dims](c_in, c_out, kernel, padding=kernel // 2, groups=groups, bias=False)


def _norm(width: int, scale: float = 1.0) -> nn.GroupNorm:
    """A normalization over channels and space together, with its scale at the given value."""
    norm = nn.GroupNorm(1, width)
    nn.init.constant_(norm.weight, scale)
    return norm


def _zero_linear(d_in: int, d_out: int, bias: bool = True) -> nn.Linear:
    layer = nn.Linear(d_in, d_out, bias=bias)
    for parameter in layer.parameters():
        nn.init.zeros_(parameter)
    return layer


def attention_heads(width: int) -> int:
    """The largest divisor of the width that is at most four."""
    return max(h for h in range(1, ATTENTION_HEADS + 1) if width % h == 0)


def squeezed_width(width: int) -> int:
    return max(1, width // SQUEEZE_REDUCTION)


def bottleneck_width(width: int) -> int:
    return max(8, width // 4)


# For every topology.


@blueprint(Blueprint.NOOP, topologies=TOPOLOGY_BLUEPRINTS, parameters=lambda c, d: 0)
class Noop(nn.Module):
    """Nothing: s = 0."""

    def __init__(self, width: int, spatial_dims: int) -> None:
        super().__init__()

    def forward(self, h: Tensor) -> Tensor:
        return torch.zeros_like(h)


class NormMix(nn.Module):
    """s = tanh(scale)·(norm(h) − h)."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        self.scale = nn.Parameter(torch.zeros(1))

    def forward(self, h: Tensor) -> Tensor:
        mixed: Tensor = torch.tanh(self.scale) * (self.norm(h) - h)
        return mixed


@blueprint(Blueprint.NORM, topologies={"cnn"}, parameters=lambda c, d: 2 * c + 1)
class ChannelNormMix(NormMix):
    """A learned mix of h and its normalization over channels and space."""

    def __init__(self, width: int, spatial_dims: int) -> None:
        super().__init__(_norm(width))


@blueprint(Blueprint.NORM, topologies={"mlp", "transformer"}, parameters=lambda c, d: 2 * c + 1)
class LayerNormMix(NormMix):
    """A learned mix of h and its layer normalization."""

    def __init__(self, width: int, spatial_dims: int) -> None:
        super().__init__(nn.LayerNorm(width))


# For convolutional hosts; "3×3" is a kernel of 3 along each of spatial_dims axes.


@blueprint(Blueprint.CONV_LIGHT, topologies={"cnn"}, parameters=lambda c, d: 3**d * c * c + 2 * c)
class ConvLight(nn.Sequential):
    """One 3×3 convolution, SiLU, norm."""

    def __init__(self, width: int, spatial_dims: int) -> None:
        super().__init__(_conv(spatial_dims, width, width), nn.SiLU(), _norm(width, scale=0.0))


@blueprint(Blueprint.CONV_HEAVY, topologies={"cnn"}, parameters=lambda c, d: 2 * (3**d * c * c + 2 * c))
class ConvHeavy(nn.Sequential):
    """Two 3×3 convolutions, each with SiLU and a norm."""

    def __init__(self, width: int, spatial_dims: int) -> None:
        super().__init__(
            _conv(spatial_dims, width, width),
            nn.SiLU(),
            _norm(width),
            _conv(spatial_dims, width, width),
            nn.SiLU(),
            _norm(width, scale=0.0),
        )


@blueprint(Blueprint.CONV_SMALL, topologies={"cnn"}, parameters=lambda c, d: c * c + 2 * c)
class ConvSmall(nn.Sequential):
    """One 1×1 convolution, SiLU, norm."""

    def __init__(self, width: int, spatial_dims: int) -> None:
        super().__init__(_conv(spatial_dims, width, width, kernel=1), nn.SiLU(), _norm(width, scale=0.0))


@blueprint(Blueprint.DEPTHWISE, topologies={"cnn"}, parameters=lambda c, d: c * c + (3**d + 2) * c)
class Depthwise(nn.Sequential):
    """A depthwise 3×3 and a 1×1 convolution, SiLU, norm."""

    def __init__(self, width: int, spatial_dims: int) -> None:
        super().__init__(
            _conv(spatial_dims, width, width, groups=width),
            _conv(spatial_dims, width, width, kernel=1),
            nn.SiLU(),
            _norm(width, scale=0.0),
        )


@blueprint(
    Blueprint.BOTTLENECK,
    topologies={"cnn"},
    parameters=lambda c, d: 2 * c * bottleneck_width(c) + 3**d * bottleneck_width(c) ** 2 + 2 * c,
)
class Bottleneck(nn.Sequential):
    """1×1 down to max(8, C/4), 3×3, 1×1 up, norm."""

    def __init__(self, width: int, spatial_dims: int) -> None:
        narrow = bottleneck_width(width)
        super().__init__(
            _conv(spatial_dims, width, narrow, kernel=1),
            nn.SiLU(),
            _conv(spatial_dims, narrow, narrow),
            nn.SiLU(),
            _conv(spatial_dims, narrow, width, kernel=1),
            _norm(width, scale=0.0),
        )


@blueprint(
    Blueprint.ATTENTION,
    topologies={"cnn"},
    parameters=lambda c, d: 2 * c * squeezed_width(c) + squeezed_width(c) + c,
)
class SqueezeExcite(nn.Module):
    """Squeeze and excite, reduction 4: s = h·tanh(e), so that h + s scales each channel by 0 to 2."""

    def __init__(self, width: int, spatial_dims: int) -> None:
        super().__init__()
        narrow = squeezed_width(width)
        self.excite = nn.Sequential(
            GlobalMean(), nn.Linear(width, narrow), nn.SiLU(), _zero_linear(narrow, width)
        )

    def forward(self, h: Tensor) -> Tensor:
        scale = torch.tanh(self.excite(h))  # [B, C]
        return h * scale.reshape(*scale.shape, *[1] * (h.ndim - 2))


# For hosts over features [..., D].


class _LowRank(nn.Sequential):
    """Down to a rank and up again, with SiLU between.

    A purely linear pair at a joint would be absorbed by the layer that follows it and teach the host nothing.
    """

    def __init__(self, width: int, rank: int) -> None:
        super().__init__(nn.Linear(width, rank, bias=False), nn.SiLU(), _zero_linear(rank, width, bias=False))


@blueprint(Blueprint.LORA, topologies={"mlp", "transformer"}, parameters=lambda c, d: 2 * LORA_RANK * c)
class Lora(_LowRank):
    """Down to rank 8 and up again, SiLU between."""

    def __init__(self, width: int, spatial_dims: int) -> None:
        super().__init__(width, LORA_RANK)


@blueprint(
    Blueprint.LORA_LARGE, topologies={"mlp", "transformer"}, parameters=lambda c, d: 2 * LORA_LARGE_RANK * c
)
class LoraLarge(_LowRank):
    """Down to rank 32 and up again, SiLU between."""

    def __init__(self, width: int, spatial_dims: int) -> None:
        super().__init__(width, LORA_LARGE_RANK)


class _Perceptron(nn.Sequential):
    def __init__(self, width: int, expansion: int) -> None:
        super().__init__(
            nn.Linear(width, expansion * width), nn.GELU(), _zero_linear(expansion * width, width)
        )


@blueprint(Blueprint.MLP_SMALL, topologies={"mlp", "transformer"}, parameters=lambda c, d: 4 * c * c + 3 * c)
class MlpSmall(_Perceptron):
    """A perceptron with 2·D hidden units."""

    def __init__(self, width: int, spatial_dims: int) -> None:
        super().__init__(width, 2)


@blueprint(Blueprint.MLP, topologies={"mlp", "transformer"}, parameters=lambda c, d: 8 * c * c + 5 * c)
class Mlp(_Perceptron):
    """A perceptron with 4·D hidden units."""

    def __init__(self, width: int, spatial_dims: int) -> None:
        super().__init__(width, 4)


# For transformers [B, T, D]. No biases: that of the keys cannot change the result of a softmax.


def _unit(width: int) -> nn.LayerNorm:
    return nn.LayerNorm(width, elementwise_affine=False)


@blueprint(Blueprint.ATTENTION, topologies={"transformer"}, parameters=lambda c, d: 4 * c * c)
class CausalSelfAttention(CausalAttention):
    """Causal attention with 4 heads (or the largest divisor of D below)."""

    def __init__(self, width: int, spatial_dims: int) -> None:
        super().__init__(width, attention_heads(width))
        self.unit = _unit(width)
        nn.init.zeros_(self.out.weight)

    def forward(self, h: Tensor) -> Tensor:
        return super().forward(self.unit(h))


@blueprint(
    Blueprint.FLEX_ATTENTION,
    topologies={"transformer"},
    parameters=lambda c, d: 2 * c * c + 2 * c * (c // attention_heads(c)),
)
class AlibiAttention(nn.Module):
    """Causal attention with linear distance biases (ALiBi), the heads sharing one key and one value."""

    def __init__(self, width: int, spatial_dims: int) -> None:
        super().__init__()
        self.heads = attention_heads(width)
        self.unit = _unit(width)
        self.query = nn.Linear(width, width, bias=False)
        self.key_value = nn.Linear(width, 2 * (width // self.heads), bias=False)
        self.out = _zero_linear(width, width, bias=False)

    def forward(self, h: Tensor) -> Tensor:
        unit, time = self.unit(h), h.shape[-2]
        query = self.query(unit).unflatten(-1, (self.heads, -1)).flatten(-3, -2)  # [..., T·heads, D / heads]
        key, value = self.key_value(unit).chunk(2, dim=-1)  # each [..., T, D / heads]
        scores = (query @ key.mT).unflatten(-2, (time, self.heads))  # [..., T, heads, T]
        scores = scores * query.shape[-1] ** -0.5 + self._distance_bias(time, h)
        weights = torch.softmax(scores + causal_mask(time, h).unsqueeze(1), dim=-1).type_as(value)
        mixed = weights.flatten(-3, -2) @ value  # [..., T·heads, D / heads]
        result: Tensor = self.out(mixed.unflatten(-2, (time, self.heads)).flatten(-2))
        return result

    def _distance_bias(self, time: int, like: Tensor) -> Tensor:
        """Minus the distance to the past, times a slope per head: 2^-2, 2^-4 ...  # [T, heads, T]"""
        steps = torch.arange(time, device=like.device, dtype=torch.float32)  # bfloat16 ends at 256
        heads = torch.arange(1, self.heads + 1, device=like.device, dtype=torch.float32)
        slopes = torch.exp2(-8.0 * heads / self.heads)
        return slopes[None, :, None] * (steps[None, None, :] - steps[:, None, None])


class BlendGate(nn.Module):
    """The gate of the GATE blend: g(h) = σ(linear(h)), one number, C + 1 parameters.

    cnn: one gate per sample, from the mean over space. mlp: one gate per sample. transformer: one gate per
    position, without pooling, so that no position hears its future. At birth g = ½ and its gradient is alive.
    """

    def __init__(self, width: int, topology: str) -> None:
        super().__init__()
        if topology not in TOPOLOGY_BLUEPRINTS:
            raise ValueError(f"topology is {topology!r}; allowed are {', '.join(TOPOLOGY_BLUEPRINTS)}")
        self.spatial = topology == "cnn"
        self.linear = _zero_linear(width, 1)

    def forward(self, h: Tensor) -> Tensor:
        """h [B, C, *spatial] or [B, ..., D] → a factor that broadcasts against h."""
        pooled = h.flatten(2).mean(-1) if self.spatial else h
        gate = torch.sigmoid(self.linear(pooled))  # [B, ..., 1]
        return gate.reshape(*gate.shape, *[1] * (h.ndim - 2)) if self.spatial else gate


def gate_parameter_count(width: int) -> int:
    return width + 1
