"""Blueprints: the architectures of seeds, and the registry that says which is which in which topology.

A blueprint is an ordinary `nn.Module` that is built from (width, spatial_dims) and keeps the shape of its
input. It returns s = seed(h) alone; how s joins the activation h is up to the slot. A new seed gives 0,
because a last scale or a last layer starts at 0; nothing ahead of a normalization or a nonlinearity does, so
every parameter has a gradient after at most one step of training.

The numbering of blueprints is part of every policy, so their names are fixed; their modules are not. One
decorated class or function gives a blueprint another module in a topology:

    @blueprint(Blueprint.CONV_LIGHT, topologies={"cnn"})
    class WideConvolution(nn.Module):
        '''Kernel 5, SiLU, norm.'''
        def __init__(self, width: int, spatial_dims: int) -> None: ...
        def forward(self, h: Tensor) -> Tensor: ...
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import cache
from typing import TypeVar

import torch
from torch import Tensor, nn

from esper.lifecycle.actions import TOPOLOGY_BLUEPRINTS, Blueprint, selectable_blueprints
from esper.population.blocks import CausalAttention, causal_mask
from esper.population.hosts import CONVOLUTIONS, GlobalMean

ATTENTION_HEADS = 4
SQUEEZE_REDUCTION = 4
LORA_RANK = 8
LORA_LARGE_RANK = 32

Factory = Callable[[int, int], nn.Module]  # of width and spatial_dims
Registered = TypeVar("Registered", bound=Factory)


_REGISTRY: dict[tuple[Blueprint, str], Factory] = {}


def blueprint(name: Blueprint, topologies: Collection[str]) -> Callable[[Registered], Registered]:
    """Register the decorated class or function as a blueprint in these topologies; the latest wins."""

    def register(factory: Registered) -> Registered:
        for topology in topologies:
            if topology not in TOPOLOGY_BLUEPRINTS or name not in TOPOLOGY_BLUEPRINTS[topology]:
                fitting = [t for t, members in TOPOLOGY_BLUEPRINTS.items() if name in members]
                raise ValueError(
                    f"{factory.__name__} registers {name.name} for topology {topology!r}; "
                    f"{name.name} exists for {', '.join(fitting) or 'none'}"
                )
            _REGISTRY[name, topology] = factory
        return factory

    return register


def blueprint_factory(name: int, topology: str) -> Factory:
    """Return what builds a blueprint; raises ValueError where the topology does not have it."""
    selectable = selectable_blueprints(topology)
    if name not in selectable:
        given = Blueprint(name).name if name in set(Blueprint) else name
        allowed = ", ".join(b.name for b in sorted(selectable))
        raise ValueError(f"blueprint {given} is not for {topology} hosts; allowed are {allowed}")
    return _REGISTRY[Blueprint(name), topology]


def build_blueprint(name: int, topology: str, width: int, spatial_dims: int = 0) -> nn.Module:
    """Build a new seed for a slot of this width.

    Raises ValueError for a blueprint that does not fit and for a module that changes the shape of its input.
    """
    seed = blueprint_factory(name, topology)(width, spatial_dims)
    side = 5  # of a small sample at the slot
    shapes = {"cnn": (width, *[side] * spatial_dims), "mlp": (width,), "transformer": (side, width)}
    sample = torch.ones(2, *shapes[topology])
    with torch.no_grad():
        result = seed(sample)
    if result.shape != sample.shape:
        raise ValueError(
            f"blueprint {Blueprint(name).name} ({type(seed).__name__}) turns shape {list(sample.shape)} into "
            f"{list(result.shape)}; a seed keeps the shape of its input: check its padding, stride and width"
        )
    return seed


def parameter_count(name: int, topology: str, width: int, spatial_dims: int = 0) -> int:
    """Return how many parameters a seed has."""
    return _count_parameters(blueprint_factory(name, topology), width, spatial_dims)


@cache
def _count_parameters(factory: Factory, width: int, spatial_dims: int) -> int:
    with torch.device("meta"):  # no memory is taken and no random number drawn
        seed = factory(width, spatial_dims)
    return sum(p.numel() for p in seed.parameters())


# ---- modules ----


def _conv(spatial_dims: int, c_in: int, c_out: int, kernel: int = 3, groups: int = 1) -> nn.Module:
    """Return a convolution that keeps the resolution, without bias."""
    return CONVOLUTIONS[spatial_dims](c_in, c_out, kernel, padding=kernel // 2, groups=groups, bias=False)


def _norm(width: int, scale: float = 1.0) -> nn.GroupNorm:
    """Return a normalization over channels and space together, with its scale at the given value."""
    norm = nn.GroupNorm(1, width)
    nn.init.constant_(norm.weight, scale)
    return norm


def _zero_linear(d_in: int, d_out: int, bias: bool = True) -> nn.Linear:
    layer = nn.Linear(d_in, d_out, bias=bias)
    for parameter in layer.parameters():
        nn.init.zeros_(parameter)
    return layer


def attention_heads(width: int) -> int:
    """Return the largest divisor of the width that is at most four."""
    return max(h for h in range(1, ATTENTION_HEADS + 1) if width % h == 0)


# For every topology.


class NormMix(nn.Module):
    """s = tanh(scale)·(norm(h) − h)."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        self.scale = nn.Parameter(torch.zeros(1))

    def forward(self, h: Tensor) -> Tensor:
        # One scale for all, or one for each row of networks; no sizes are asked for, so it can be traced.
        mixed: Tensor = torch.tanh(self.scale).flatten() * (self.norm(h) - h).movedim(0, -1)
        return mixed.movedim(-1, 0)


@blueprint(Blueprint.NORM, topologies={"cnn"})
def channel_norm_mix(width: int, spatial_dims: int) -> nn.Module:
    """A learned mix of h and its normalization over channels and space."""
    return NormMix(_norm(width))


@blueprint(Blueprint.NORM, topologies={"mlp", "transformer"})
def layer_norm_mix(width: int, spatial_dims: int) -> nn.Module:
    """A learned mix of h and its layer normalization."""
    return NormMix(nn.LayerNorm(width))


# For convolutional hosts; "3×3" is a kernel of 3 along each of spatial_dims axes.


@blueprint(Blueprint.CONV_LIGHT, topologies={"cnn"})
def conv_light(width: int, spatial_dims: int) -> nn.Sequential:
    """One 3×3 convolution, SiLU, norm."""
    return nn.Sequential(_conv(spatial_dims, width, width), nn.SiLU(), _norm(width, scale=0.0))


@blueprint(Blueprint.CONV_HEAVY, topologies={"cnn"})
def conv_heavy(width: int, spatial_dims: int) -> nn.Module:
    """Two 3×3 convolutions, each with SiLU and a norm."""
    first = (_conv(spatial_dims, width, width), nn.SiLU(), _norm(width))
    return nn.Sequential(*first, *conv_light(width, spatial_dims))


@blueprint(Blueprint.CONV_SMALL, topologies={"cnn"})
def conv_small(width: int, spatial_dims: int) -> nn.Sequential:
    """One 1×1 convolution, SiLU, norm."""
    return nn.Sequential(_conv(spatial_dims, width, width, kernel=1), nn.SiLU(), _norm(width, scale=0.0))


@blueprint(Blueprint.DEPTHWISE, topologies={"cnn"})
def depthwise(width: int, spatial_dims: int) -> nn.Module:
    """A depthwise 3×3 and a 1×1 convolution, SiLU, norm."""
    return nn.Sequential(_conv(spatial_dims, width, width, groups=width), *conv_small(width, spatial_dims))


@blueprint(Blueprint.BOTTLENECK, topologies={"cnn"})
def bottleneck(width: int, spatial_dims: int) -> nn.Module:
    """1×1 down to max(8, C/4), 3×3, 1×1 up, norm."""
    narrow = max(8, width // 4)
    return nn.Sequential(
        _conv(spatial_dims, width, narrow, kernel=1),
        nn.SiLU(),
        _conv(spatial_dims, narrow, narrow),
        nn.SiLU(),
        _conv(spatial_dims, narrow, width, kernel=1),
        _norm(width, scale=0.0),
    )


@blueprint(Blueprint.ATTENTION, topologies={"cnn"})
class SqueezeExcite(nn.Module):
    """Squeeze and excite, reduction 4: s = h·tanh(e), so that h + s scales each channel by 0 to 2."""

    def __init__(self, width: int, spatial_dims: int) -> None:
        super().__init__()
        narrow = max(1, width // SQUEEZE_REDUCTION)
        self.excite = nn.Sequential(
            GlobalMean(), nn.Linear(width, narrow), nn.SiLU(), _zero_linear(narrow, width)
        )
        self.over_space = (..., *[None] * spatial_dims)  # torch.fx cannot trace code that asks for h.ndim

    def forward(self, h: Tensor) -> Tensor:
        return h * torch.tanh(self.excite(h))[self.over_space]  # a factor for each channel [B, C]


# For hosts over features [..., D].


def _low_rank(width: int, rank: int) -> nn.Module:
    # Without the SiLU, the layer behind the slot would absorb the pair and the host would learn nothing.
    down = nn.Linear(width, rank, bias=False)
    return nn.Sequential(down, nn.SiLU(), _zero_linear(rank, width, bias=False))


@blueprint(Blueprint.LORA, topologies={"mlp", "transformer"})
def lora(width: int, spatial_dims: int) -> nn.Module:
    """Down to rank 8 and up again, SiLU between."""
    return _low_rank(width, LORA_RANK)


@blueprint(Blueprint.LORA_LARGE, topologies={"mlp", "transformer"})
def lora_large(width: int, spatial_dims: int) -> nn.Module:
    """Down to rank 32 and up again, SiLU between."""
    return _low_rank(width, LORA_LARGE_RANK)


def _mlp(width: int, hidden: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, hidden), nn.GELU(), _zero_linear(hidden, width))


@blueprint(Blueprint.MLP_SMALL, topologies={"mlp", "transformer"})
def mlp_small(width: int, spatial_dims: int) -> nn.Module:
    """A perceptron with 2·D hidden units."""
    return _mlp(width, 2 * width)


@blueprint(Blueprint.MLP, topologies={"mlp", "transformer"})
def mlp(width: int, spatial_dims: int) -> nn.Module:
    """A perceptron with 4·D hidden units."""
    return _mlp(width, 4 * width)


# For transformers [B, T, D]. No biases: that of the keys cannot change the result of a softmax.


@blueprint(Blueprint.ATTENTION, topologies={"transformer"})
class CausalSelfAttention(nn.Module):
    """Causal attention with 4 heads (or the largest divisor of D below)."""

    def __init__(self, width: int, spatial_dims: int) -> None:
        super().__init__()
        self.heads = attention_heads(width)
        self.unit = nn.LayerNorm(width, elementwise_affine=False)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.attend = CausalAttention(self.heads)
        self.out = _zero_linear(width, width, bias=False)

    def forward(self, h: Tensor) -> Tensor:
        return self.out(self.attend(self.qkv(self.unit(h))))


@blueprint(Blueprint.FLEX_ATTENTION, topologies={"transformer"})
class AlibiAttention(nn.Module):
    """Causal attention with linear distance biases (ALiBi), the heads sharing one key and one value."""

    def __init__(self, width: int, spatial_dims: int) -> None:
        super().__init__()
        self.heads = attention_heads(width)
        self.unit = nn.LayerNorm(width, elementwise_affine=False)
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
        return self.out(mixed.unflatten(-2, (time, self.heads)).flatten(-2))

    def _distance_bias(self, time: int, like: Tensor) -> Tensor:
        """Return minus the distance to the past, times a slope per head: 2^-2, 2^-4 ...  # [T, heads, T]"""
        steps = torch.arange(time, device=like.device, dtype=torch.float32)  # bfloat16 ends at 256
        heads = torch.arange(1, self.heads + 1, device=like.device, dtype=torch.float32)
        slopes = torch.exp2(-8.0 * heads / self.heads)
        return slopes[None, :, None] * (steps[None, None, :] - steps[:, None, None])


class BlendGate(nn.Module):
    """The gate of the GATE blend: g(h) = σ(linear(h)), one number, C + 1 parameters.

    cnn: one gate per sample, from the mean over space. mlp: one gate per sample. transformer: one gate per
    position, without pooling, so that no position depends on its future. A new gate gives ½ and has a
    gradient.
    """

    def __init__(self, width: int, spatial_dims: int) -> None:
        super().__init__()
        self.pool = GlobalMean() if spatial_dims else nn.Identity()
        self.linear = _zero_linear(width, 1)
        self.over_space = (..., *[None] * spatial_dims)

    def forward(self, h: Tensor) -> Tensor:
        """h [B, C, *spatial] or [B, ..., D] → a factor that broadcasts against h."""
        return torch.sigmoid(self.linear(self.pool(h)))[self.over_space]  # [B, ..., 1] over space
