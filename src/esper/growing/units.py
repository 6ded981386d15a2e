"""Layers whose units (neurons, channels) can be added to: what they are, small layers beside them, and the
wider layers that both fold into."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


@dataclass(frozen=True)
class Dense:
    """A layer in which every output reads every input."""

    axis: int  # of activations, along which its units lie
    inputs: str  # the attributes that hold its sizes
    outputs: str
    weight_in: int  # axes of its weight
    weight_out: int


@dataclass(frozen=True)
class Passing:
    """A layer that treats channels one by one, or group by group: norms and depthwise convolutions."""

    sizes: tuple[str, ...]  # attributes that count channels
    axis: int = 1


class Role(Enum):
    """What a layer has to do with units, in the order in which hooks are attached.

    Readers and passers go first, so that makers add to their outputs.
    """

    READER = "reads them"
    PASSER = "passes them on"
    MAKER = "makes them"
    COUNTER = "counts them, and has no weights for them"


_LINEAR = Dense(-1, "in_features", "out_features", 1, 0)
_TRANSPOSED_LINEAR = Dense(-1, "nx", "nf", 0, 1)  # the `Conv1D` of transformers
_CONVOLUTION = Dense(1, "in_channels", "out_channels", 1, 0)
_TRANSPOSED_CONVOLUTION = Dense(1, "in_channels", "out_channels", 0, 1)


def dense(layer: nn.Module) -> Dense | None:
    """What a layer is, if each of its outputs reads each of its inputs in a product of torch's own."""
    if layer._parameters.get("weight") is None:
        return None  # it is made anew in every pass
    if _own_forward(layer, (nn.Linear,)):
        return _LINEAR
    if type(layer).__name__ == "Conv1D" and {"nx", "nf"} <= vars(layer).keys():
        return _TRANSPOSED_LINEAR
    if getattr(layer, "groups", 0) == 1 and _own_forward(layer, CONVOLUTIONS):
        return _CONVOLUTION
    if getattr(layer, "groups", 0) == 1 and _own_forward(layer, TRANSPOSED):
        return _TRANSPOSED_CONVOLUTION
    return None


def passing(layer: nn.Module) -> Passing | None:
    """What a layer is, if it treats channels one by one, or in groups of a fixed number."""
    if any(True for child in layer.children() for _ in child.parameters()):
        return None
    if isinstance(layer, _BatchNorm | _InstanceNorm):
        return Passing(("num_features",))
    if isinstance(layer, nn.GroupNorm) and layer.num_groups > 1:
        return Passing(("num_channels", "num_groups"))
    if _own_forward(layer, CONVOLUTIONS):
        convolution = cast(nn.Conv2d, layer)
        if convolution.groups == convolution.in_channels == convolution.out_channels > 1:
            return Passing(("in_channels", "out_channels", "groups"))
    return None


def _own_forward(layer: nn.Module, kinds: tuple[type[nn.Module], ...]) -> bool:
    return any(isinstance(layer, kind) and type(layer).forward is kind.forward for kind in kinds)


def units_in(layer: nn.Module) -> int:
    """How many inputs a dense or passing layer reads along its axis."""
    kind, passes = dense(layer), passing(layer)
    assert kind is not None or passes is not None, f"{type(layer).__name__} has no units"
    return int(getattr(layer, passes.sizes[0] if passes is not None else cast(Dense, kind).inputs))


def units_out(layer: nn.Module) -> int:
    """How many outputs a dense layer has along its axis."""
    return int(getattr(layer, cast(Dense, dense(layer)).outputs))


# ---- small layers beside a layer -----------------------------------------------------------------------


def growing(layer: nn.Module, role: Role) -> tuple[dict[str, int], tuple[str, ...]]:
    """What of a layer grows with the units of its role: by name, the axes of its tensors along which these
    lie, and the attributes that count them."""
    kind = dense(layer)
    if role is Role.PASSER or kind is None:
        old, sizes = units_in(layer), cast(Passing, passing(layer)).sizes
        return {name: 0 for name, value in named_tensors(layer) if value.shape[0] == old}, sizes
    if role is Role.READER:
        return {"weight": kind.weight_in}, (kind.inputs,)
    return {"weight": kind.weight_out, "bias": 0}, (kind.outputs,)


def layer_beside(layer: nn.Module, role: Role, units: int) -> nn.Module:
    """A layer that makes so many more outputs of the same inputs, treats so many more channels, or reads so
    many more inputs and says nothing yet.

    Weights are fresh, as spread as those of the layer; those of a reader are 0, and it has no bias. Raises
    ValueError for part of a group of channels.
    """
    axes, sizes = growing(layer, role)
    old = units_out(layer) if role is Role.MAKER else units_in(layer)
    made = _resized(layer, lambda name, shape: _with(shape, axes[name], units) if name in axes else shape)
    for name in sizes:
        share = getattr(layer, name) * units
        if share % old:
            raise ValueError(f"{units} channels are no whole number of groups of {type(layer).__name__}")
        setattr(made, name, share // old)
    if role is Role.READER:
        if made._parameters.get("bias") is not None:
            made._parameters.pop("bias")
            made.register_buffer("bias", torch.zeros_like(cast(Tensor, layer.bias)), persistent=False)
        nn.init.zeros_(cast(nn.Parameter, made.weight))
    elif role is Role.MAKER or isinstance(layer, CONVOLUTIONS):
        _draw(made, layer)
    else:
        cast(Any, made).reset_parameters()
    return made


def _with(shape: tuple[int, ...], axis: int, size: int) -> tuple[int, ...]:
    return (*shape[:axis], size, *shape[axis + 1 :])


def _resized(layer: nn.Module, shape_of: Callable[[str, tuple[int, ...]], tuple[int, ...]]) -> nn.Module:
    """A layer like this one with tensors of other shapes, not yet filled."""
    made = copy.copy(layer)
    for key, value in list(vars(layer).items()):
        if isinstance(value, dict):
            kept = key in ("_parameters", "_buffers", "_modules")  # hooks stay behind
            made.__dict__[key] = copy.copy(value) if kept else type(value)()
        elif isinstance(value, set):
            made.__dict__[key] = set(value)
    for tensors in cast(list[dict[str, Any]], [made._parameters, made._buffers]):
        for name, value in tensors.items():
            if value is not None and value.ndim:
                new = value.detach().new_empty(shape_of(name, tuple(value.shape)))
                tensors[name] = nn.Parameter(new) if isinstance(value, nn.Parameter) else new
            elif value is not None:
                tensors[name] = value.clone()
    return made


def _draw(made: nn.Module, like: nn.Module) -> None:
    weight, own = cast(Tensor, made.weight), cast(Tensor, like.weight).detach()
    spread = float(own.float().square().mean().sqrt()) or own[0].numel() ** -0.5
    with torch.no_grad():
        drawn = torch.randn(weight.shape) * spread  # on the CPU, so that a seed means the same on any device
        weight.copy_(drawn)
        if isinstance(made.bias, Tensor):
            made.bias.zero_()


# ---- wider layers --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NewEntries:
    """New entries of a tensor along an axis: at positions `where` of the wider tensor, by default last."""

    axis: int
    where: Tensor | None = None  # [k] int64

    def join(self, old: Tensor, new: Tensor) -> Tensor:
        """The wider tensor. Where `old` has grown along other axes since, `new` is 0 there."""
        grown = list(_with(tuple(old.shape), self.axis, new.shape[self.axis]))
        if list(new.shape) != grown:
            padded = new.new_zeros(grown)
            padded[tuple(slice(size) for size in new.shape)] = new
            new = padded
        if self.where is None:
            return torch.cat([old, new], self.axis)
        where = self.where.to(old.device)
        rest = positions_without(where, old.shape[self.axis] + new.shape[self.axis])
        shape = _with(tuple(old.shape), self.axis, len(where) + len(rest))
        return old.new_empty(shape).index_copy(self.axis, rest, old).index_copy(self.axis, where, new)


def positions_without(where: Tensor, size: int) -> Tensor:
    """The positions below `size` that are not among these, in order.  # [k] → [size - k]"""
    free = torch.ones(size, dtype=torch.bool, device=where.device)
    free[where] = False
    return free.nonzero().flatten()


def named_tensors(layer: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a layer itself that have axes: parameters and buffers."""
    for tensors in (layer._parameters, layer._buffers):
        for name, value in tensors.items():
            if value is not None and value.ndim:
                yield name, value
