"""Norms of rows, on a GPU with the activations beside them as one kernel."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from esper.population.row_convolutions import FusedConv, rows_first

FOLDED: dict[type[nn.Module], str] = {nn.ReLU: "relu", nn.SiLU: "silu"}


class RowGroupNorm(nn.Module):
    """x [R, B, C, *spatial], weight and bias [R, C]; the memory layout of x is kept."""

    def __init__(self, norm: nn.GroupNorm) -> None:
        super().__init__()
        self.weight: Tensor | None = norm.weight
        self.bias: Tensor | None = norm.bias
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
        return rows_first(out, rows)


class FusedGroupNorm(RowGroupNorm):
    """A group norm with the activations around it as one GPU kernel; channels stay last in memory."""

    def __init__(self, norm: nn.GroupNorm) -> None:
        super().__init__(norm)
        self.pre = self.post = "none"

    def forward(self, x: Tensor) -> Tensor:
        if self.weight is not None and self.bias is not None:
            return self.scaled(x, self.weight, self.bias, None)
        blank = x.new_zeros(x.shape[2]).expand(x.shape[0], -1)  # [R, C]
        return self.scaled(x, blank + 1, blank, None)

    def scaled(self, x: Tensor, weight: Tensor, bias: Tensor, skip: Tensor | None) -> Tensor:
        """With a scale and a shift from outside, and skip · x added.  # weight, bias [R, C], skip [R]"""
        from esper.population import kernels

        kinds = (self.eps, self.pre, self.post, self.groups)
        out: Tensor = kernels.RowNorm.apply(x, weight, bias, skip, *kinds)  # type: ignore[no-untyped-call]
        return out


def fold_activations(parts: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """Activations beside a fused norm become part of it, and a ReLU behind a fused convolution of that."""
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
    for name, neighbour in pairwise(names):
        conv = folded[name]
        if isinstance(conv, FusedConv) and not conv.depthwise and type(folded[neighbour]) is nn.ReLU:
            conv.relu, folded[neighbour] = True, nn.Identity()
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


def _scaled(x: Tensor, weight: Tensor, bias: Tensor | None, channel_axis: int) -> Tensor:
    """x · weight + bias along one axis, a row each.  # weight, bias [R, C]"""
    shape = [1] * x.ndim
    shape[0], shape[channel_axis] = weight.shape
    scaled = x * weight.view(shape)
    return scaled if bias is None else scaled + bias.view(shape)


def row_group_norm(norm: nn.GroupNorm, method: str) -> nn.Module:
    each = norm.num_channels // norm.num_groups
    if method == "fused" and (norm.num_groups == 1 or each & (each - 1) == 0):
        return FusedGroupNorm(norm)
    return NativeGroupNorm(norm) if method == "grouped" else RowGroupNorm(norm)


def row_layer_norm(norm: nn.LayerNorm, method: str) -> nn.Module:
    over_vectors = len(norm.normalized_shape) == 1
    return FusedLayerNorm(norm) if method == "fused" and over_vectors else RowLayerNorm(norm)
