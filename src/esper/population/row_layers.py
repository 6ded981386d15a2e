"""Layers that take a leading axis of rows themselves: x [R, B, ...] with weights [R, ...].

Any module runs over rows under vmap. The common layers also have a row form here, which dispatches fewer
operations and lets a convolution run as what is fastest on the device: grouped on a CPU, through a kernel of
our own on a GPU (where grouped ones are slow beyond about a hundred groups), or as one matrix product over
shifted views. `row_form` rewrites a module whose every part has one; parameter names stay as they are.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from esper.population.blocks import AttendToPast, Branch, StandardizedConv1d, StandardizedConv2d
from esper.population.blueprints import AlibiAttention, BlendGate, CausalSelfAttention, NormMix, SqueezeExcite
from esper.population.hosts import CausalAttention, GlobalMean, TokenEmbedding
from esper.population.row_convolutions import Conv, GroupedConv, row_convolution
from esper.population.row_norms import (
    FusedGroupNorm,
    NativeGroupNorm,
    fold_activations,
    row_group_norm,
    row_layer_norm,
)
from esper.population.row_tokens import RowTokenEmbedding, row_attention, row_embedding

ELEMENTWISE = (nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.Identity, nn.LeakyReLU, nn.ELU)


class _LinearRows(torch.autograd.Function):
    """x · wᵀ + bias, row by row. The gradient of w lies as w does: torch's own lies across, and is copied.

    x [R, n, I], w [R, O, I], bias [R, O] or None → [R, n, O]
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, w)
        return torch.bmm(x, w.mT) if bias is None else torch.baddbmm(bias.unsqueeze(1), x, w.mT)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, w = ctx.saved_tensors
        dx, dw, db = ctx.needs_input_grad
        return (
            torch.bmm(grad, w) if dx else None,
            torch.bmm(grad.mT, x) if dw else None,
            grad.sum(1) if db else None,
        )


class RowLinear(nn.Module):
    """weight [R, O, I], bias [R, O], x [R, ..., I] → [R, ..., O]"""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.weight: Tensor = layer.weight
        self.bias: Tensor | None = layer.bias

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _LinearRows.apply(x.flatten(1, -2), self.weight, self.bias)  # type: ignore[no-untyped-call]
        return out.view(*x.shape[:-1], out.shape[-1])


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
        if (
            isinstance(self.norm, FusedGroupNorm)
            and self.norm.weight is not None
            and self.norm.bias is not None
        ):
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
    def __init__(self, gate: BlendGate, linear: nn.Module) -> None:
        super().__init__()
        self.spatial, self.linear = gate.spatial, linear

    def forward(self, h: Tensor) -> Tensor:
        pooled = h.mean(dim=tuple(range(3, h.ndim))) if self.spatial else h
        gate = torch.sigmoid(self.linear(pooled))
        return gate.view(*gate.shape, *[1] * (h.ndim - 3)) if self.spatial else gate


class FusedPerceptron(nn.Module):
    """A residual branch of two Linear layers with GELU between them, as one GPU kernel."""

    def __init__(self, norm: nn.LayerNorm, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second, self.eps = first, second, norm.eps

    def forward(self, x: Tensor) -> Tensor:
        from esper.population import kernels

        weights = (self.first.weight, self.first.bias, self.second.weight)
        out: Tensor = kernels.RowPerceptron.apply(x, *weights, self.eps)  # type: ignore[no-untyped-call]
        return out


def _fused_branch(module: nn.Module, parts: dict[str, nn.Module]) -> nn.Module | None:
    """A residual branch as one kernel, where there is one for its layers and their sizes."""
    if type(module) is not Branch or not isinstance(module.norm, nn.LayerNorm):
        return None
    first, middle = module.first, module.middle
    plain = type(middle) is nn.GELU and middle.approximate == "none" and first.bias is not None
    if not plain or not isinstance(first, nn.Linear) or len(module.norm.normalized_shape) > 1:
        return None
    from esper.population import kernels

    if not kernels.perceptron_fits(first.in_features, first.out_features):
        return None
    return FusedPerceptron(module.norm, parts["first"], parts["second"])


def _leaf(module: nn.Module, method: str) -> nn.Module | None:
    """The row form of a layer that has no parts, or None.

    Types are compared exactly: a subclass, or a layer under a parametrisation, may compute something else.
    """
    forms: dict[type[nn.Module], Callable[[], nn.Module | None]] = {
        nn.Conv1d: lambda: row_convolution(cast(Conv, module), method),
        nn.Conv2d: lambda: row_convolution(cast(Conv, module), method),
        StandardizedConv1d: lambda: row_convolution(cast(Conv, module), method),
        StandardizedConv2d: lambda: row_convolution(cast(Conv, module), method),
        nn.GroupNorm: lambda: row_group_norm(cast(nn.GroupNorm, module), method),
        nn.Linear: lambda: RowLinear(cast(nn.Linear, module)),
        nn.LayerNorm: lambda: row_layer_norm(cast(nn.LayerNorm, module), method),
        nn.Embedding: lambda: row_embedding(cast(nn.Embedding, module)),
        AttendToPast: lambda: row_attention(cast(AttendToPast, module), method),
        GlobalMean: RowGlobalMean,
        nn.Flatten: lambda: RowFlatten(cast(nn.Flatten, module)),
    }
    if type(module) in forms:
        return forms[type(module)]()
    return module if type(module) in ELEMENTWISE else None


# Modules that are more than the sequence of their parts.
_COMPOSITES: dict[type[nn.Module], Callable[[nn.Module, dict[str, nn.Module]], nn.Module]] = {
    NormMix: lambda module, parts: RowNormMix(cast(NormMix, module), parts["norm"]),
    SqueezeExcite: lambda module, parts: RowSqueezeExcite(parts["excite"]),
    BlendGate: lambda module, parts: RowGate(cast(BlendGate, module), parts["linear"]),
    TokenEmbedding: lambda module, parts: RowTokenEmbedding(cast(TokenEmbedding, module), parts["tokens"]),
}

# Modules whose own code takes rows as it is, once their parts do.
_ANY_RANK = (CausalAttention, CausalSelfAttention, AlibiAttention)


def fixes_rows(rows: nn.Module) -> bool:
    """Whether a compiled graph of this row form would hold for one number of rows alone."""
    return any(isinstance(part, GroupedConv | NativeGroupNorm) for part in rows.modules())


def row_form(module: nn.Module, method: str) -> nn.Module | None:
    """The module with a leading axis of rows, or None where some part has no row form.

    `method` is how convolutions run: grouped, product or fused.
    """
    if module._forward_pre_hooks or module._forward_hooks:  # these belong to the module as it is
        return None
    leaf = _leaf(module, method)
    if leaf is not None:
        return leaf
    parts = {name: row_form(part, method) for name, part in module.named_children()}
    if not parts or any(part is None for part in parts.values()):
        return None
    forward = type(module).forward
    composite = next((build for kind, build in _COMPOSITES.items() if forward is kind.forward), None)
    if composite is not None:
        return composite(module, cast(dict[str, nn.Module], parts))
    fused = _fused_branch(module, cast(dict[str, nn.Module], parts)) if method == "fused" else None
    if fused is not None:
        return fused
    rows = copy.copy(module)
    if forward is nn.Sequential.forward:
        rows._modules = dict(fold_activations(cast(dict[str, nn.Module], parts)))
    elif any(forward is kind.forward for kind in _ANY_RANK):
        rows._modules = dict(parts)
    else:
        return None
    return rows
