"""Layers that take a leading axis of rows themselves: x [R, B, ...] with weights [R, ...].

Any module runs over rows under vmap. The common layers also have a row form here, which dispatches fewer
operations and lets a convolution run as what is fastest on the device: grouped on a CPU, through a kernel of
our own on a GPU (where grouped ones are slow beyond about a hundred groups), or as one matrix product over
shifted views. `row_form` rewrites a module whose every part has one; parameter names stay as they are.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import product
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from esper.population.blueprints import AlibiAttention, CausalSelfAttention, Gate, NormMix, SqueezeExcite
from esper.population.dropout import StreamDropout
from esper.population.hosts import (
    AttendToPast,
    CausalAttention,
    GlobalMean,
    TokenEmbedding,
    TransformerBlock,
)
from esper.population.row_tokens import FusedAttendToPast, RowEmbedding, RowTokenEmbedding

Conv = nn.Conv1d | nn.Conv2d
FOLDED: dict[type[nn.Module], str] = {nn.ReLU: "relu", nn.SiLU: "silu"}
ELEMENTWISE = (nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.Identity, nn.LeakyReLU, nn.ELU)
TAKES_ROWS = (*ELEMENTWISE, StreamDropout)


class RowLinear(nn.Module):
    """weight [R, O, I], bias [R, O], x [R, ..., I] → [R, ..., O]"""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.weight: Tensor = layer.weight
        self.bias: Tensor | None = layer.bias

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(1, -2)  # [R, n, I]
        if self.bias is None:
            out = torch.bmm(flat, self.weight.mT)
        else:
            out = torch.baddbmm(self.bias.unsqueeze(1), flat, self.weight.mT)
        return out.view(*x.shape[:-1], out.shape[-1])


class GroupedConv(nn.Module):
    """A convolution of rows as one convolution with R times the groups.  # x [R, B, C, *spatial]"""

    def __init__(self, conv: Conv) -> None:
        super().__init__()
        self.weight, self.bias = conv.weight, conv.bias
        self.conv = F.conv1d if isinstance(conv, nn.Conv1d) else F.conv2d
        self.stride, self.padding, self.dilation, self.groups = (
            conv.stride,
            conv.padding,
            conv.dilation,
            conv.groups,
        )

    def forward(self, x: Tensor) -> Tensor:
        rows = x.shape[0]
        side_by_side = x.transpose(0, 1).flatten(1, 2)  # [B, R·C, *spatial]
        bias = None if self.bias is None else self.bias.flatten()
        weight = self.weight.flatten(0, 1)  # [R·O, C / groups, *kernel]
        out = self.conv(
            side_by_side, weight, bias, self.stride, self.padding, self.dilation, rows * self.groups
        )
        return _rows_first(out, rows)


class PointConv(nn.Module):
    """A 1×1 convolution of rows as one product per sample: nothing is moved, which is what the rest costs.

    On x86-64 six to nine times as fast as the grouped form (16 channels, 8×8, batch 64, 4 and 16 rows).
    """

    def __init__(self, conv: Conv) -> None:
        super().__init__()
        self.weight, self.bias = conv.weight, conv.bias

    def forward(self, x: Tensor) -> Tensor:
        matrix = self.weight.flatten(2).unsqueeze(1)  # [R, 1, O, C]
        out = torch.matmul(matrix, x.flatten(3))  # [R, B, O, P]
        if self.bias is not None:
            out = out + self.bias.view(self.bias.shape[0], 1, -1, 1)
        return out.view(*x.shape[:2], -1, *x.shape[3:])


class ProductConv(nn.Module):
    """A convolution of rows as a batched matrix product.  # x [R, B, C, *spatial]"""

    def __init__(self, conv: Conv) -> None:
        super().__init__()
        self.weight, self.bias = conv.weight, conv.bias
        self.kernel, self.stride = conv.kernel_size, conv.stride
        self.padding = cast(tuple[int, ...], conv.padding)
        self.depthwise = conv.groups > 1

    def forward(self, x: Tensor) -> Tensor:
        views = self._shifted(x.movedim(2, -1))  # each [R, B, *out, C]
        middle = (1,) * (x.ndim - 2)
        if self.depthwise:
            taps = self.weight.flatten(3).squeeze(2)  # [R, C, K]
            out = views[0] * taps[:, :, 0].view(-1, *middle, taps.shape[1])
            for k, view in enumerate(views[1:], start=1):
                out = out + view * taps[:, :, k].view(-1, *middle, taps.shape[1])
        else:
            matrix = self.weight.flatten(3).permute(0, 3, 2, 1).flatten(1, 2)  # [R, K·C, O]
            patches = torch.cat(views, dim=-1) if len(views) > 1 else views[0]
            out = torch.bmm(patches.flatten(1, -2), matrix).view(*patches.shape[:-1], matrix.shape[-1])
        if self.bias is not None:
            out = out + self.bias.view(-1, *middle, self.bias.shape[-1])
        return out.movedim(-1, 2)

    def _shifted(self, x: Tensor) -> list[Tensor]:
        """One view for each kernel position, each the size of the output.  # x [R, B, *spatial, C]"""
        pads = [p for padding in reversed(self.padding) for p in (padding, padding)]
        padded = F.pad(x, [0, 0, *pads]) if any(pads) else x
        spans = [
            [slice(o, o + size - kernel + 1, step) for o in range(kernel)]
            for size, kernel, step in zip(padded.shape[2:-1], self.kernel, self.stride, strict=True)
        ]
        return [padded[(slice(None), slice(None), *place)] for place in product(*spans)]


class FusedConv(nn.Module):
    """A convolution of rows through one GPU kernel.  # x [R, B, C, *spatial], channels last in memory"""

    def __init__(self, conv: Conv) -> None:
        super().__init__()
        from esper.population import kernels

        self.weight, self.bias = conv.weight, conv.bias
        flat = isinstance(conv, nn.Conv1d)  # a signal is an image of height 1
        image = (lambda pair, blank: (blank, *pair)) if flat else (lambda pair, blank: pair)
        padding = cast(tuple[int, ...], conv.padding)
        self.shape = kernels.Geometry(image(conv.kernel_size, 1), image(conv.stride, 1), image(padding, 0))
        self.run = kernels.RowDepthwise.apply if conv.groups > 1 else kernels.RowConvolution.apply

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.run(x, self.weight, self.shape)  # type: ignore[no-untyped-call]
        if self.bias is None:
            return out
        return out + self.bias.view(self.bias.shape[0], 1, -1, *[1] * (x.ndim - 3))


class RowGroupNorm(nn.Module):
    """x [R, B, C, *spatial], weight and bias [R, C]; the memory layout of x is kept."""

    def __init__(self, norm: nn.GroupNorm) -> None:
        super().__init__()
        self.weight, self.bias = norm.weight, norm.bias
        self.groups, self.eps = norm.num_groups, norm.eps

    def forward(self, x: Tensor) -> Tensor:
        grouped = x.unflatten(2, (self.groups, -1))  # [R, B, groups, C / groups, *spatial]
        axes = tuple(range(3, grouped.ndim))
        variance, mean = torch.var_mean(grouped, dim=axes, correction=0, keepdim=True)
        unit = ((grouped - mean) * torch.rsqrt(variance + self.eps)).flatten(2, 3)
        return unit if self.weight is None else _scaled(unit, self.weight, self.bias, channel_axis=2)


class NativeGroupNorm(RowGroupNorm):
    """The same through torch's own kernel, with R times the groups: faster on a CPU."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.shape[0]
        side_by_side = x.transpose(0, 1).flatten(1, 2)  # [B, R·C, *spatial]
        weight = None if self.weight is None else self.weight.flatten()
        bias = None if self.bias is None else self.bias.flatten()
        out = F.group_norm(side_by_side, rows * self.groups, weight, bias, self.eps)
        return _rows_first(out, rows)


class FusedGroupNorm(RowGroupNorm):
    """A one-group norm with the activations around it as one GPU kernel; channels stay last in memory."""

    def __init__(self, norm: nn.GroupNorm) -> None:
        super().__init__(norm)
        self.pre = self.post = "none"

    def forward(self, x: Tensor) -> Tensor:
        return self.scaled(x, self.weight, self.bias, None)

    def scaled(self, x: Tensor, weight: Tensor, bias: Tensor, skip: Tensor | None) -> Tensor:
        """With a scale and a shift from outside, and skip · x added.  # weight, bias [R, C], skip [R]"""
        from esper.population import kernels

        out: Tensor = kernels.RowNorm.apply(x, weight, bias, skip, self.eps, self.pre, self.post)  # type: ignore[no-untyped-call]
        return out


def _fold_activations(parts: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """Activations beside a fused norm become part of it."""
    names = list(parts)
    folded = dict(parts)
    for k, name in enumerate(names):
        norm = parts[name]
        if not isinstance(norm, FusedGroupNorm):
            continue
        for side, step in (("pre", -1), ("post", 1)):
            if not 0 <= k + step < len(names):
                continue
            neighbour = names[k + step]
            if type(folded[neighbour]) in FOLDED:
                setattr(norm, side, FOLDED[type(folded[neighbour])])
                folded[neighbour] = nn.Identity()
    return folded


class RowLayerNorm(nn.Module):
    """x [R, ..., *shape], weight and bias [R, *shape]"""

    def __init__(self, norm: nn.LayerNorm) -> None:
        super().__init__()
        self.weight: Tensor | None = norm.weight
        self.bias: Tensor | None = norm.bias
        self.eps = norm.eps
        self.shape = norm.normalized_shape

    def forward(self, x: Tensor) -> Tensor:
        unit = F.layer_norm(x, list(self.shape), eps=self.eps)
        if self.weight is None:
            return unit
        per_row = (x.shape[0], *[1] * (x.ndim - 1 - len(self.shape)), *self.shape)
        scaled = unit * self.weight.view(per_row)
        return scaled if self.bias is None else scaled + self.bias.view(per_row)


class FusedLayerNorm(RowLayerNorm):
    """The same over the last axis as one GPU kernel: torch's own takes a block of threads for each vector."""

    def forward(self, x: Tensor) -> Tensor:
        from esper.population import kernels

        blank = x.new_zeros(self.shape[0]).expand(x.shape[0], -1)  # [R, D]
        weight = blank + 1 if self.weight is None else self.weight
        bias = blank if self.bias is None else self.bias
        vectors = x.flatten(1, -2)  # [R, n, D]
        out: Tensor = kernels.RowNorm.apply(vectors, weight, bias, None, self.eps, "none", "none")  # type: ignore[no-untyped-call]
        return out.view(x.shape)


class RowGlobalMean(nn.Module):
    """[R, B, C, *spatial] → [R, B, C]"""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(dim=tuple(range(3, x.ndim)))


class RowFlatten(nn.Module):
    """The same axes one further on.  # [R, B, ...] → [R, B, n]"""

    def __init__(self, layer: nn.Flatten) -> None:
        super().__init__()
        self.first, self.last = (axis + 1 if axis >= 0 else axis for axis in (layer.start_dim, layer.end_dim))

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(self.first, self.last)


class RowNormMix(nn.Module):
    def __init__(self, mix: NormMix, norm: nn.Module) -> None:
        super().__init__()
        self.norm, self.scale = norm, mix.scale

    def forward(self, h: Tensor) -> Tensor:
        scale = torch.tanh(self.scale)  # [R, 1]
        if isinstance(self.norm, FusedGroupNorm):
            weight, bias = scale * self.norm.weight, scale * self.norm.bias
            return self.norm.scaled(h, weight, bias, -scale.squeeze(1))
        result: Tensor = scale.view(-1, *[1] * (h.ndim - 1)) * (self.norm(h) - h)
        return result


class RowSqueezeExcite(nn.Module):
    def __init__(self, excite: nn.Module) -> None:
        super().__init__()
        self.excite = excite

    def forward(self, h: Tensor) -> Tensor:
        scale = torch.tanh(self.excite(h))  # [R, B, C]
        return h * scale.view(*scale.shape, *[1] * (h.ndim - 3))


class RowGate(nn.Module):
    def __init__(self, gate: Gate, linear: nn.Module) -> None:
        super().__init__()
        self.spatial, self.linear = gate.spatial, linear

    def forward(self, h: Tensor) -> Tensor:
        pooled = h.mean(dim=tuple(range(3, h.ndim))) if self.spatial else h
        gate = torch.sigmoid(self.linear(pooled))
        return gate.view(*gate.shape, *[1] * (h.ndim - 3)) if self.spatial else gate


def _rows_first(x: Tensor, rows: int) -> Tensor:
    """[B, R·C, *spatial] → [R, B, C, *spatial]"""
    result: Tensor = x.unflatten(1, (rows, -1)).transpose(0, 1)
    return result


def _scaled(x: Tensor, weight: Tensor, bias: Tensor | None, channel_axis: int) -> Tensor:
    """x · weight + bias along one axis, a row each.  # weight, bias [R, C]"""
    shape = [1] * x.ndim
    shape[0], shape[channel_axis] = weight.shape
    scaled = x * weight.view(shape)
    return scaled if bias is None else scaled + bias.view(shape)


def _plain(conv: Conv) -> bool:
    """Whether a convolution can be written as one product."""
    depthwise = conv.groups == conv.in_channels == conv.out_channels
    simple = conv.padding_mode == "zeros" and not isinstance(conv.padding, str) and set(conv.dilation) == {1}
    return simple and (conv.groups == 1 or depthwise)


def _pointwise(conv: Conv) -> bool:
    """Whether a convolution looks at one place at a time, and at every place."""
    sizes = {*conv.kernel_size, *conv.stride}
    return _plain(conv) and conv.groups == 1 and sizes == {1} and set(conv.padding) == {0}


def _convolution(conv: Conv, way: str) -> nn.Module | None:
    if conv.padding_mode != "zeros":
        return None
    if way == "grouped" and _pointwise(conv):
        return PointConv(conv)
    return _CONVOLUTIONS[way if _plain(conv) else "grouped"](conv)


def _group_norm(norm: nn.GroupNorm, way: str) -> nn.Module:
    if way == "fused" and norm.num_groups == 1 and norm.affine:
        return FusedGroupNorm(norm)
    return NativeGroupNorm(norm) if way == "grouped" else RowGroupNorm(norm)


def _layer_norm(norm: nn.LayerNorm, way: str) -> nn.Module:
    over_vectors = len(norm.normalized_shape) == 1
    return FusedLayerNorm(norm) if way == "fused" and over_vectors else RowLayerNorm(norm)


def _embedding(layer: nn.Embedding) -> nn.Module | None:
    """None for the ones that treat some tokens or gradients in a way of their own."""
    plain = layer.padding_idx is None and layer.max_norm is None
    return RowEmbedding(layer) if plain and not (layer.scale_grad_by_freq or layer.sparse) else None


def _attend_to_past(layer: AttendToPast, way: str) -> nn.Module:
    return FusedAttendToPast(layer.heads) if way == "fused" else layer


_CONVOLUTIONS: dict[str, Callable[[Conv], nn.Module]] = {
    "grouped": GroupedConv,
    "product": ProductConv,
    "fused": FusedConv,
}


def _leaf(module: nn.Module, way: str) -> nn.Module | None:
    """The row form of a layer that has no parts, or None.

    Types are compared exactly: a subclass, or a layer under a parametrisation, may compute something else.
    """
    forms: dict[type[nn.Module], Callable[[], nn.Module | None]] = {
        nn.Conv1d: lambda: _convolution(cast(Conv, module), way),
        nn.Conv2d: lambda: _convolution(cast(Conv, module), way),
        nn.GroupNorm: lambda: _group_norm(cast(nn.GroupNorm, module), way),
        nn.Linear: lambda: RowLinear(cast(nn.Linear, module)),
        nn.LayerNorm: lambda: _layer_norm(cast(nn.LayerNorm, module), way),
        nn.Embedding: lambda: _embedding(cast(nn.Embedding, module)),
        AttendToPast: lambda: _attend_to_past(cast(AttendToPast, module), way),
        GlobalMean: RowGlobalMean,
        nn.Flatten: lambda: RowFlatten(cast(nn.Flatten, module)),
    }
    if type(module) in forms:
        return forms[type(module)]()
    return module if type(module) in TAKES_ROWS else None


# Modules that are more than the sequence of their parts.
_COMPOSITES: dict[type[nn.Module], Callable[[nn.Module, dict[str, nn.Module]], nn.Module]] = {
    NormMix: lambda module, parts: RowNormMix(cast(NormMix, module), parts["norm"]),
    SqueezeExcite: lambda module, parts: RowSqueezeExcite(parts["excite"]),
    Gate: lambda module, parts: RowGate(cast(Gate, module), parts["linear"]),
    TokenEmbedding: lambda module, parts: RowTokenEmbedding(cast(TokenEmbedding, module), parts["tokens"]),
}

# Modules whose own code takes rows as it is, once their parts do.
_ANY_RANK = (TransformerBlock, CausalAttention, CausalSelfAttention, AlibiAttention)


def fixes_rows(rows: nn.Module) -> bool:
    """Whether a compiled graph of this row form would hold for one number of rows alone."""
    return any(isinstance(part, GroupedConv | NativeGroupNorm) for part in rows.modules())


def row_form(module: nn.Module, way: str) -> nn.Module | None:
    """The module with a leading axis of rows, or None where some part has no row form.

    `way` is how convolutions run: grouped, product or fused.
    """
    if module._forward_pre_hooks or module._forward_hooks:  # these belong to the module as it is
        return None
    leaf = _leaf(module, way)
    if leaf is not None:
        return leaf
    parts = {name: row_form(part, way) for name, part in module.named_children()}
    if not parts or any(part is None for part in parts.values()):
        return None
    forward = type(module).forward
    composite = next((build for kind, build in _COMPOSITES.items() if forward is kind.forward), None)
    if composite is not None:
        return composite(module, cast(dict[str, nn.Module], parts))
    rows = copy.copy(module)
    if forward is nn.Sequential.forward:
        rows._modules = dict(_fold_activations(cast(dict[str, nn.Module], parts)))
    elif any(forward is kind.forward for kind in _ANY_RANK):
        rows._modules = dict(parts)
    else:
        return None
    return rows
