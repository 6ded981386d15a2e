"""Wider layers: which layers have units that can be added to, small side layers that compute the new units,
and the plain wider layers that both fold into.

A hidden unit (neuron, channel) has a producer, which computes it, channelwise layers, which pass it on, and
consumers, which read it. A `Widening` puts a small layer beside each of them. Between these layers the new
units run through the model's own code. At alpha 1 everything folds into wider layers of the same class with
the same outputs.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.hooks import RemovableHandle

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


class CannotWiden(Exception):
    """Raised with the reason why the units of a layer cannot be added to."""


# ---- kinds of layers -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class LayerKind:
    """Where the units of a layer lie: a dense one, or one that treats channels one by one or in groups."""

    axis: int  # of activations, along which its units lie
    inputs: tuple[str, ...]  # the attributes that count its inputs
    outputs: tuple[str, ...] = ()  # and its outputs, where these are other units
    weight_in: int | None = None  # axes of the weight of a dense layer, whose outputs each read every input
    weight_out: int = 0


def layer_kind(layer: nn.Module) -> LayerKind | None:
    """Return the kind of a layer to which units can be added, else None."""
    groups = getattr(layer, "groups", 0)
    if layer._parameters.get("weight") is not None:  # else a parametrization computes it in every pass
        if _has_forward_of(layer, (nn.Linear,)):
            return LayerKind(-1, ("in_features",), ("out_features",), 1, 0)
        if type(layer).__name__ == "Conv1D" and {"nx", "nf"} <= vars(layer).keys():  # of transformers
            return LayerKind(-1, ("nx",), ("nf",), 0, 1)
        if groups == 1 and _has_forward_of(layer, (*CONVOLUTIONS, *TRANSPOSED)):
            axes = (1, 0) if isinstance(layer, CONVOLUTIONS) else (0, 1)
            return LayerKind(1, ("in_channels",), ("out_channels",), *axes)
    if any(True for child in layer.children() for _ in child.parameters()):
        return None
    if isinstance(layer, _BatchNorm):
        return LayerKind(1, ("num_features",))
    if isinstance(layer, nn.GroupNorm):
        return LayerKind(1, ("num_channels", "num_groups")) if layer.num_groups > 1 else None
    if groups > 1 and _has_forward_of(layer, CONVOLUTIONS):
        depthwise = groups == layer.in_channels == layer.out_channels
        return LayerKind(1, ("in_channels", "out_channels", "groups")) if depthwise else None
    return None


def _has_forward_of(layer: nn.Module, kinds: tuple[type[nn.Module], ...]) -> bool:
    return any(isinstance(layer, kind) and type(layer).forward is kind.forward for kind in kinds)


def is_dense(layer: nn.Module) -> bool:
    """Tell whether every output of a layer reads every input, by torch's own product."""
    kind = layer_kind(layer)
    return kind is not None and kind.weight_in is not None


def units_in(layer: nn.Module) -> int:
    """Count the inputs of a layer that has a kind, along its axis."""
    return int(getattr(layer, cast(LayerKind, layer_kind(layer)).inputs[0]))


def units_out(layer: nn.Module) -> int:
    """Count the outputs of a dense layer along its axis."""
    return int(getattr(layer, cast(LayerKind, layer_kind(layer)).outputs[0]))


class Role(Enum):
    """What a layer does with units, in the order in which hooks are attached.

    Consumers and channelwise layers come first, so that producers add to their outputs.
    """

    CONSUMER = "reads them"
    CHANNELWISE = "passes them on"
    PRODUCER = "computes them"


@dataclass(frozen=True)
class WidenedLayer:
    """A layer that grows with others when their units grow."""

    layer: nn.Module
    role: Role
    axis: int  # of activations, along which the units lie
    extra: int  # new entries of its input, or of the output of a producer
    positions: Tensor | None = None  # [extra] of new units in its input; None: last


# ---- side layers ---------------------------------------------------------------------------------------


def _grown_tensors(layer: nn.Module, role: Role) -> tuple[dict[str, int], tuple[str, ...]]:
    """Return the tensors of a layer that hold the units of a role, with their axes, and the unit counts."""
    kind = cast(LayerKind, layer_kind(layer))
    if role is Role.PRODUCER:
        return {"weight": kind.weight_out, "bias": 0}, kind.outputs
    if kind.weight_in is not None:
        return {"weight": kind.weight_in}, kind.inputs
    old, held = units_in(layer), [*layer._parameters.items(), *layer._buffers.items()]
    named = [name for name, value in held if value is not None and value.ndim and value.shape[0] == old]
    return dict.fromkeys(named, 0), kind.inputs


def added_parameters(widened: Iterable[WidenedLayer]) -> int:
    """Count the parameters that layers have more when all these widenings are folded."""
    extra: dict[nn.Module, Counter[Role]] = {}
    for each in widened:
        extra.setdefault(each.layer, Counter())[each.role] += each.extra
    total = 0
    for layer, new in extra.items():
        if new[Role.CHANNELWISE]:
            named = _grown_tensors(layer, Role.CHANNELWISE)[0]
            own = sum(p.numel() for name, p in layer.named_parameters(recurse=False) if name in named)
            total += own // units_in(layer) * new[Role.CHANNELWISE]
            continue
        # n inputs and m outputs with k weights each: (n + Δn)(m + Δm)k instead of nmk, and Δm biases. Two
        # widenings may share the layer, one with Δn and one with Δm.
        inputs, outputs = units_in(layer), units_out(layer)
        wider = (inputs + new[Role.CONSUMER]) * (outputs + new[Role.PRODUCER])
        total += (wider - inputs * outputs) * int(cast(Tensor, layer.weight)[0, 0].numel())
        total += new[Role.PRODUCER] if layer.bias is not None else 0
    return total


def make_side_layer(layer: nn.Module, role: Role, units: int) -> nn.Module:
    """Return a layer of the same class for the new units alone.

    That of a producer computes `units` more outputs from the same inputs, that of a channelwise layer treats
    `units` more channels: fresh weights with the standard deviation of the layer's own. That of a consumer
    reads `units` more inputs, with weights 0 and no bias. Raises ValueError for part of a group of channels.
    """
    axes, sizes = _grown_tensors(layer, role)
    old = units_out(layer) if role is Role.PRODUCER else units_in(layer)
    side = _resized(layer, axes, units)
    for name in sizes:
        total = getattr(layer, name) * units
        if total % old:
            raise ValueError(f"{units} channels are no whole number of groups of {type(layer).__name__}")
        setattr(side, name, total // old)
    if role is Role.CONSUMER:
        # Both outputs are added, and the layer has added its bias already. The forward of the class still
        # reads the attribute, so that it becomes a buffer of zeros, which no state_dict holds.
        if side._parameters.get("bias") is not None:
            side._parameters.pop("bias")
            side.register_buffer("bias", torch.zeros_like(cast(Tensor, layer.bias)), persistent=False)
        nn.init.zeros_(cast(nn.Parameter, side.weight))
    elif role is Role.PRODUCER or isinstance(layer, CONVOLUTIONS):
        _init_like(side, layer)
    else:
        cast(Any, side).reset_parameters()
    return side


def _with_size(shape: Sequence[int], axis: int, size: int) -> list[int]:
    return [*shape[:axis], size, *shape[axis + 1 :]]


def _resized(layer: nn.Module, axes: dict[str, int], units: int) -> nn.Module:
    """Return a layer like this one whose tensors are `units` long along these axes, not yet filled."""
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
                shape = _with_size(value.shape, axes[name], units) if name in axes else list(value.shape)
                new = value.detach().new_empty(shape)
                tensors[name] = nn.Parameter(new) if isinstance(value, nn.Parameter) else new
            elif value is not None:
                tensors[name] = value.clone()
    return made


@torch.no_grad()
def _init_like(made: nn.Module, like: nn.Module) -> None:
    weight, own = cast(Tensor, made.weight), cast(Tensor, like.weight).detach()
    # std = √mean(w²) of the trained weights; where all are 0, 1/√inputs as a fresh layer would have
    std = float(own.float().square().mean().sqrt()) or own[0].numel() ** -0.5
    weight.copy_(torch.randn(weight.shape) * std)  # drawn on the CPU: the same on any device
    if isinstance(made.bias, Tensor):
        made.bias.zero_()


# ---- the seed ------------------------------------------------------------------------------------------


def merge_units(old: Tensor, new: Tensor, axis: int, positions: Tensor | None) -> Tensor:
    """Join old and new entries along an axis: the new ones at these positions, by default last.

    Where `old` has grown along another axis since, by a fold, `new` is 0 there.
    """
    new = _pad(new, _with_size(old.shape, axis % old.ndim, new.shape[axis]))
    if positions is None:
        return torch.cat([old, new], axis)
    positions = positions.to(old.device)
    rest = other_positions(positions, old.shape[axis] + new.shape[axis])
    return torch.cat([old, new], axis).index_select(axis, torch.cat([rest, positions]).argsort())


def _pad(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """Return a tensor of a larger shape, with zeros at the end of each axis."""
    if list(tensor.shape) == list(shape):
        return tensor
    padded = tensor.new_zeros(shape)
    padded[tuple(slice(size) for size in tensor.shape)] = tensor
    return padded


def other_positions(positions: Tensor, size: int) -> Tensor:
    """Return the positions below `size` that are not among these, in order.  # [k] → [size - k]"""
    free = torch.ones(size, dtype=torch.bool, device=positions.device)
    free[positions] = False
    return free.nonzero().flatten()


@dataclass(frozen=True)
class GrownParameter:
    """A parameter that a fold has made wider."""

    old: nn.Parameter
    new: nn.Parameter  # which replaces it
    side: nn.Parameter  # of the side layer
    axis: int  # along which it is wider
    positions: Tensor | None  # of new entries; None: last


class Widening(nn.Module):
    """New units as a seed. Consumers begin with weights 0, so that the model's outputs do not change yet."""

    def __init__(self, widened: Sequence[WidenedLayer]):
        """Draw fresh weights. Raises ValueError where a norm would have part of a group."""
        super().__init__()
        self.widened = tuple(widened)
        self.side = nn.ModuleList(make_side_layer(each.layer, each.role, each.extra) for each in widened)

    def attach(self, role: Role, alpha: Callable[[], float]) -> list[RemovableHandle]:
        """Attach hooks to the layers of a role. Call it for all roles, in their order."""
        handles = []
        for each, side in zip(self.widened, self.side, strict=True):
            if each.role is not role:
                continue
            before, after = _hooks(each, side, alpha)
            if role is not Role.PRODUCER:
                handles.append(each.layer.register_forward_pre_hook(before))
            handles.append(each.layer.register_forward_hook(after))
        return handles

    @torch.no_grad()
    def fold(self, alpha: float) -> list[GrownParameter]:
        """Widen the layers in place; afterwards the model alone computes what model and seed did."""
        grown: list[GrownParameter] = []
        for each, side in zip(self.widened, self.side, strict=True):
            layer, scale = each.layer, alpha if each.role is Role.CONSUMER else 1.0
            axes, sizes = _grown_tensors(layer, each.role)
            for name, axis in axes.items():
                if layer._parameters.get(name) is not None:
                    grown.append(_widen_parameter(layer, name, side, axis, each.positions, scale))
                elif layer._buffers.get(name) is not None:
                    old, new = layer.get_buffer(name), side.get_buffer(name)
                    layer._buffers[name] = merge_units(old, new, axis, each.positions)
            for name in sizes:
                setattr(layer, name, getattr(layer, name) + getattr(side, name))
        return grown


def _widen_parameter(
    layer: nn.Module, name: str, side: nn.Module, axis: int, positions: Tensor | None, scale: float
) -> GrownParameter:
    """Replace a parameter of a layer by a wider one."""
    old, small = (cast(nn.Parameter, module._parameters[name]) for module in (layer, side))
    wider = merge_units(old.detach(), scale * small.detach(), axis, positions)
    new = nn.Parameter(wider, old.requires_grad)
    layer._parameters[name] = new
    return GrownParameter(old, new, small, axis, positions)


def _hooks(widened: WidenedLayer, side: nn.Module, alpha: Callable[[], float]) -> tuple[Any, Any]:
    """Return the hooks before and after a layer, which do nothing at alpha 0."""
    axis, positions, new_inputs = widened.axis, widened.positions, list[Tensor]()
    # Another widening may have been folded into the layer since: the side layer reads its first inputs alone.
    inputs_read = units_in(side) if widened.role is Role.PRODUCER else 0

    def before(layer: nn.Module, inputs: Any) -> Any:
        if alpha() == 0.0:
            return None
        x = inputs[0]
        if positions is None:
            old, new = x.split([x.shape[axis] - widened.extra, widened.extra], axis)
        else:
            old = x.index_select(axis, other_positions(positions, x.shape[axis]))
            new = x.index_select(axis, positions)
        new_inputs[:] = [new]
        return (old, *inputs[1:])

    def after(layer: nn.Module, inputs: Any, output: Tensor) -> Tensor | None:
        if alpha() == 0.0:
            return None
        if widened.role is Role.PRODUCER:
            return merge_units(output, side(inputs[0].narrow(axis, 0, inputs_read)), axis, positions)
        if widened.role is Role.CHANNELWISE:
            return merge_units(output, side(new_inputs.pop()), axis, positions)
        # Outputs that were folded into the layer since are at the end, and the side layer has none of them.
        return output + _pad(alpha() * side(new_inputs.pop()), output.shape)

    return before, after
