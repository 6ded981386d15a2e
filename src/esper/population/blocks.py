"""Residual blocks: what CLONE repeats and WIDEN widens.

    block(x) = x + second(middle(first(norm(x))))

The units between the two layers are hidden: neurons of an MLP, channels between two convolutions, heads of an
attention. No unit reads another and the norm ahead has no weights of its own, so that new units beside the
old ones fold into plain wider layers: their incoming weights are appended to `first`, their outgoing ones to
`second`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

QKV = 3  # the first layer of an attention holds queries, keys and values, one after another


class CausalAttention(nn.Module):
    """Causal multi-head attention without projections.  # [..., T, 3 · D] → [..., T, D]

    The last axis of the input holds the queries, the keys and the values of all heads.
    """

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads

    def extra_repr(self) -> str:
        return f"heads={self.heads}"

    def forward(self, qkv: Tensor) -> Tensor:
        split = qkv.unflatten(-1, (QKV, self.heads, -1)).movedim(-3, 0)  # [3, ..., T, heads, D / heads]
        query, key, value = split.transpose(-3, -2)  # each [..., heads, T, D / heads]
        # softmax(q kᵀ / sqrt(d)) v
        scores = (query * query.shape[-1] ** -0.5) @ key.mT
        weights = torch.softmax(scores + causal_mask(qkv.shape[-2], qkv), dim=-1)
        mixed: Tensor = weights @ value  # [..., heads, T, D / heads]
        return mixed.transpose(-3, -2).flatten(-2)


def causal_mask(time: int, like: Tensor) -> Tensor:
    """Return 0 where a position may attend, minus infinity at its future.  # [T, T]"""
    steps = torch.arange(time, device=like.device)
    future = steps[None, :] > steps[:, None]
    return torch.zeros(time, time, dtype=like.dtype, device=like.device).masked_fill(future, float("-inf"))


RELU_GAIN = 2**0.5  # half of a normal variable's square passes a ReLU


def standardize(weight: Tensor, kernel_axes: int) -> Tensor:
    """Return filters of mean 0 and norm √2 each: weight standardization (Qiao et al., 2019).

    weight [..., outputs, inputs, *kernel]; kernel_axes: 1 for signals, 2 for images
    """
    fan_in = tuple(range(-1 - kernel_axes, 0))
    exact = weight.to(torch.promote_types(weight.dtype, torch.float32))
    # filter = √2 · (w - mean(w)) / |w - mean(w)|
    centred = exact - exact.mean(fan_in, keepdim=True)
    scale = RELU_GAIN * torch.rsqrt(centred.square().sum(fan_in, keepdim=True) + 1e-12)
    return (centred * scale).to(weight.dtype)


class FilteredConv(_ConvNd, ABC):
    """A convolution with filters that are computed from its weights in every forward pass."""

    @abstractmethod
    def filters(self, weight: Tensor) -> Tensor:
        """Return what to convolve with; weight may have a leading axis of rows."""

    def forward(self, x: Tensor) -> Tensor:
        return self._conv_forward(x, self.filters(self.weight), self.bias)


class _Standardized(FilteredConv):
    def filters(self, weight: Tensor) -> Tensor:
        return standardize(weight, len(self.kernel_size))


class _Scaled(FilteredConv):
    """With `scale` times its weights as filters.

    Adam moves every weight by about the learning rate, and so these filters by `scale` of that.
    """

    scale = 1.0

    def filters(self, weight: Tensor) -> Tensor:
        return self.scale * weight


class StandardizedConv1d(_Standardized, nn.Conv1d):
    """A convolution over signals with standardized filters."""


class StandardizedConv2d(_Standardized, nn.Conv2d):
    """A convolution over images with standardized filters."""


class ScaledConv1d(_Scaled, nn.Conv1d):
    """A convolution over signals with scaled filters."""


class ScaledConv2d(_Scaled, nn.Conv2d):
    """A convolution over images with scaled filters."""


STANDARDIZED: dict[type[nn.Module], type[nn.Conv1d] | type[nn.Conv2d]] = {
    nn.Conv1d: StandardizedConv1d,
    nn.Conv2d: StandardizedConv2d,
}
SCALED: dict[type[nn.Module], type[nn.Conv1d] | type[nn.Conv2d]] = {
    nn.Conv1d: ScaledConv1d,
    nn.Conv2d: ScaledConv2d,
}
GROUP = 4  # channels that are normalized together

Layer = nn.Linear | nn.Conv1d | nn.Conv2d


class Branch(nn.Sequential):
    """norm, first, middle, second: the part of a block that is added to its input.

    `first` and `second` are Linear layers or convolutions, the second without bias; `norm` and `middle` have
    no parameters: beside other parts, new units would not fold.
    """

    norm: nn.Module
    first: Layer
    middle: nn.Module
    second: Layer

    def __init__(self, norm: nn.Module, first: Layer, middle: nn.Module, second: Layer) -> None:
        super().__init__(OrderedDict(norm=norm, first=first, middle=middle, second=second))

    @property
    def units(self) -> int:
        """How many hidden units there are: neurons, channels or heads."""
        if isinstance(self.middle, CausalAttention):
            return self.middle.heads
        return self.first.weight.shape[0]

    @property
    def copies(self) -> int:
        """How many times a unit occurs along the outputs of `first`: as query, key and value, or once."""
        return QKV if isinstance(self.middle, CausalAttention) else 1

    def with_units(self, units: int) -> Branch:
        """Return a new branch with another number of units; its second layer, and so its output, is 0."""
        each = self.second.weight.shape[1] // self.units  # outputs of the middle per unit
        middle = CausalAttention(units) if isinstance(self.middle, CausalAttention) else self.middle
        first = _resized(self.first, outputs=self.copies * units * each)
        second = _resized(self.second, inputs=units * each)
        nn.init.zeros_(second.weight)
        return Branch(self.norm, first, middle, second)


class Block(nn.Module):
    """x + branch(x)."""

    def __init__(self, branch: Branch) -> None:
        super().__init__()
        self.branch = branch

    def forward(self, x: Tensor) -> Tensor:
        return x + self.branch(x)


def mlp_block(width: int, hidden: int, scale: float = 1.0) -> Block:
    """Build two Linear layers with GELU between; `scale` multiplies the initial weights of the second."""
    norm = nn.LayerNorm(width, elementwise_affine=False)
    second = nn.Linear(hidden, width, bias=False)
    return Block(Branch(norm, nn.Linear(width, hidden), nn.GELU(), scale_output(second, scale)))


def attention_block(width: int, heads: int, scale: float = 1.0) -> Block:
    """Build causal attention; raises ValueError where the width does not divide into the heads."""
    if width % heads:
        raise ValueError(f"width {width} does not divide into {heads} heads; choose a divisor of the width")
    norm = nn.LayerNorm(width, elementwise_affine=False)
    second = nn.Linear(width, width, bias=False)
    first = nn.Linear(width, QKV * width, bias=False)  # a bias of the keys cannot change a softmax
    return Block(Branch(norm, first, CausalAttention(heads), scale_output(second, scale)))


def conv_block(
    conv: type[nn.Conv1d] | type[nn.Conv2d], width: int, hidden: int, kernel: int, scale: float = 1.0
) -> Block:
    """Build a pre-activation block: norm, SiLU, convolution, SiLU, convolution.

    Norms of small groups, standardized filters and SiLU stand for BatchNorm, which would mix the samples of a
    batch. By `benchmarks.textbook` such a network has 82.4 % on CIFAR-10 at 100 TFLOP and one with BatchNorm
    81.6 %. The second convolution is scaled and not standardized: standardized filters would change with the
    number of hidden units.
    """
    first = STANDARDIZED[conv](width, hidden, kernel, padding=kernel // 2)
    second = SCALED[conv](hidden, width, kernel, padding=kernel // 2, bias=False)
    return Block(Branch(group_norm_silu(width), first, nn.SiLU(), scale_output(second, scale)))


def group_norm_silu(width: int) -> nn.Sequential:
    """Build a group norm without weights, and a SiLU."""
    return nn.Sequential(nn.GroupNorm(norm_groups(width), width, affine=False), nn.SiLU())


def norm_groups(width: int) -> int:
    """Return how many groups of channels are normalized apart."""
    return width // GROUP if width % GROUP == 0 else 1


def fold_units(host: Mapping[str, Tensor], seed: Mapping[str, Tensor], copies: int) -> dict[str, Tensor]:
    """Return the parameters of a branch with the units of two: pure concatenation, whatever the tensors hold.

    host, seed: parameters by name, of branches that differ in their units alone; copies: `Branch.copies`
    """

    def beside(name: str) -> Tensor:
        parts = (host[name].unflatten(0, (copies, -1)), seed[name].unflatten(0, (copies, -1)))
        return torch.cat(parts, dim=1).flatten(0, 1)

    widened = {name: beside(name) for name in host if name.startswith("first.")}
    return widened | {"second.weight": torch.cat([host["second.weight"], seed["second.weight"]], dim=1)}


def _resized(layer: Layer, inputs: int | None = None, outputs: int | None = None) -> Layer:
    """Return a new layer like this one with another number of inputs or outputs."""
    d_out, d_in = layer.weight.shape[:2]
    sizes, bias = (inputs or d_in, outputs or d_out), layer.bias is not None
    if isinstance(layer, nn.Linear):
        return nn.Linear(*sizes, bias=bias)
    make = cast(Callable[..., Layer], type(layer))
    options = {name: getattr(layer, name) for name in ("stride", "padding", "dilation", "padding_mode")}
    resized = make(*sizes, layer.kernel_size, bias=bias, **options)
    return scale_output(resized, layer.scale) if isinstance(layer, _Scaled) else resized


def scale_output(layer: nn.Module, scale: float) -> Layer:
    """Scale the filters of a scaled convolution, or the initial weights of another layer, and return it."""
    if isinstance(layer, _Scaled):
        layer.scale = scale
    else:
        with torch.no_grad():
            cast(Layer, layer).weight.mul_(scale)
    return cast(Layer, layer)
