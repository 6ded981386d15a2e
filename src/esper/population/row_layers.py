"""Layers that take a leading axis of rows themselves: x [R, B, ...] with weights [R, ...].

Any module runs over rows under vmap. These layers launch fewer operations. `method` says how convolutions,
norms and attention run: "grouped" through the kernels of torch with R times the groups, or "fused" through
Triton kernels (on a GPU, grouped convolutions are slow beyond about a hundred groups). Parameter names are
those of the original layers.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from esper.population.blocks import SCALED, STANDARDIZED, CausalAttention, FilteredConv
from esper.population.hosts import CONVOLUTIONS, GlobalMean

Conv = nn.Conv1d | nn.Conv2d
ELEMENTWISE = (nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.Identity, nn.LeakyReLU, nn.ELU)


class RowLayer(nn.Module):
    """A layer whose weight and bias have a leading axis of rows when it is called."""

    weight: Any  # Tensor, or None where the layer has none
    bias: Tensor | None

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.weight, self.bias = layer.weight, cast(Tensor | None, layer.bias)


class _LinearRows(torch.autograd.Function):
    """x · wᵀ + bias for each row. The gradient has the strides of w; torch's own is transposed and copied.

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


class RowLinear(RowLayer):
    """weight [R, O, I], bias [R, O], x [R, ..., I] → [R, ..., O]"""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _LinearRows.apply(x.flatten(1, -2), self.weight, self.bias)  # type: ignore[no-untyped-call]
        return out.view(*x.shape[:-1], out.shape[-1])


class FusedLinear(RowLinear):
    """A linear layer whose bias and the GELU behind it are one GPU kernel."""

    gelu = False  # whether there is one

    def forward(self, x: Tensor) -> Tensor:
        if not self.gelu:
            return super().forward(x)
        from esper.population import kernels

        product = _LinearRows.apply(x.flatten(1, -2), self.weight, None)  # type: ignore[no-untyped-call]
        out: Tensor = kernels.RowGelu.apply(product, self.bias)  # type: ignore[no-untyped-call]
        return out.view(*x.shape[:-1], out.shape[-1])


class RowGlobalMean(nn.Module):
    """Take the mean over space.  # [R, B, C, *spatial] → [R, B, C]"""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(dim=tuple(range(3, x.ndim)))


# ---- convolutions: x [R, B, C, *spatial] ----


class RowConv(RowLayer):
    """The base of the convolutions."""

    def __init__(self, conv: Conv) -> None:
        super().__init__(conv)
        self._compute = conv.filters if isinstance(conv, FilteredConv) else None

    @property
    def filters(self) -> Tensor:
        """The weights to convolve with.  # [R, O, C / groups, *kernel]"""
        return self.weight if self._compute is None else self._compute(self.weight)


class GroupedConv(RowConv):
    """One convolution with R times the groups."""

    def __init__(self, conv: Conv) -> None:
        super().__init__(conv)
        self.conv = F.conv1d if isinstance(conv, nn.Conv1d) else F.conv2d
        self.options, self.groups = (conv.stride, conv.padding, conv.dilation), conv.groups

    def forward(self, x: Tensor) -> Tensor:
        rows = x.shape[0]
        side_by_side = x.transpose(0, 1).flatten(1, 2)  # [B, R·C, *spatial]
        bias = None if self.bias is None else self.bias.flatten()
        weight = self.filters.flatten(0, 1)  # [R·O, C / groups, *kernel]
        out = self.conv(side_by_side, weight, bias, *self.options, rows * self.groups)  # type: ignore[arg-type]
        return _rows_first(out, rows)


class PointConv(RowConv):
    """A 1×1 convolution as one product per sample, which moves no data.

    On x86-64 six to nine times as fast as the grouped one (16 channels, 8×8, batch 64, 4 and 16 rows).
    """

    def forward(self, x: Tensor) -> Tensor:
        matrix = self.filters.flatten(2).unsqueeze(1)  # [R, 1, O, C]
        out = torch.matmul(matrix, x.flatten(3))  # [R, B, O, P]
        if self.bias is not None:
            out = out + self.bias.view(self.bias.shape[0], 1, -1, 1)
        return out.view(*x.shape[:2], -1, *x.shape[3:])


class FusedConv(RowConv):
    """One GPU kernel; channels lie last in memory."""

    def __init__(self, conv: Conv) -> None:
        super().__init__(conv)
        from esper.population import kernels

        self.depthwise = conv.groups > 1
        standardized = type(conv) in STANDARDIZED.values()
        self.options = (False, 1.0) if self.depthwise else (standardized, getattr(conv, "scale", 1.0))
        flat = isinstance(conv, nn.Conv1d)  # a signal is an image of height 1
        image = (lambda pair, blank: (blank, *pair)) if flat else (lambda pair, blank: pair)
        padding = cast(tuple[int, ...], conv.padding)
        self.shape = kernels.Geometry(image(conv.kernel_size, 1), image(conv.stride, 1), image(padding, 0))

    def forward(self, x: Tensor) -> Tensor:
        from esper.population import kernels

        weight = self.weight
        if self.depthwise:
            # As a convolution of all channels with zeros between different ones: few channels cost little.
            diagonal = torch.eye(weight.shape[1], dtype=weight.dtype, device=weight.device)
            weight = self.filters * diagonal.view(*diagonal.shape, *[1] * (weight.ndim - 3))
        taps = kernels.RowFilters.apply(weight, *self.options)  # type: ignore[no-untyped-call]
        return kernels.RowConvolution.apply(x, taps, self.bias, self.shape)  # type: ignore[no-untyped-call]


def _rows_first(x: Tensor, rows: int) -> Tensor:
    """Undo the joining of rows and channels.  # [B, R·C, *spatial] → [R, B, C, *spatial]"""
    return x.unflatten(1, (rows, -1)).transpose(0, 1)


def _row_conv(conv: Conv, method: str) -> nn.Module | None:
    """Return a convolution over rows, or None for padding other than zeros."""
    if conv.padding_mode != "zeros":
        return None
    depthwise = conv.groups == conv.in_channels == conv.out_channels
    simple = not isinstance(conv.padding, str) and set(conv.dilation) == {1}
    if not simple or (conv.groups > 1 and not depthwise):  # no single product
        return GroupedConv(conv)
    pointwise = conv.groups == 1 and {*conv.kernel_size, *conv.stride} == {1} and set(conv.padding) == {0}
    if method == "fused":
        return FusedConv(conv)
    return PointConv(conv) if pointwise else GroupedConv(conv)


# ---- norms ----


class RowGroupNorm(RowLayer):
    """x [R, B, C, *spatial], weight and bias [R, C]: one norm with R times the groups."""

    def __init__(self, norm: nn.GroupNorm) -> None:
        super().__init__(norm)
        self.groups, self.eps = norm.num_groups, norm.eps

    def forward(self, x: Tensor) -> Tensor:
        rows = x.shape[0]
        side_by_side = x.transpose(0, 1).flatten(1, 2)  # [B, R·C, *spatial]
        weight = None if self.weight is None else self.weight.flatten()
        bias = None if self.bias is None else self.bias.flatten()
        out = F.group_norm(side_by_side, rows * self.groups, weight, bias, self.eps)
        return _rows_first(out, rows)


class FusedGroupNorm(RowGroupNorm):
    """A group norm with a SiLU before or behind it as one GPU kernel; channels lie last in memory."""

    def __init__(self, norm: nn.GroupNorm) -> None:
        super().__init__(norm)
        self.pre = self.post = False  # whether a SiLU comes before it, and behind it

    def forward(self, x: Tensor) -> Tensor:
        return self.with_input(x)[1]

    def with_input(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return x and its norm; one kernel adds the gradients of both."""
        from esper.population import kernels

        options = (self.eps, self.pre, self.post, self.groups)
        return kernels.RowNorm.apply(x, self.weight, self.bias, *options)  # type: ignore[no-untyped-call]


def _row_group_norm(norm: nn.GroupNorm, method: str) -> nn.Module:
    each = norm.num_channels // norm.num_groups
    fits = norm.num_groups == 1 or each & (each - 1) == 0  # the kernel reduces over powers of two
    return (FusedGroupNorm if method == "fused" and fits else RowGroupNorm)(norm)


def fold_activations(layers: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """Make SiLUs part of the fused norms beside them, and GELUs of the fused linear layers before them."""
    folded = dict(layers)
    for first, second in pairwise(layers):
        linear, activation = folded[first], folded[second]
        exact = type(activation) is nn.GELU and activation.approximate == "none"
        if exact and isinstance(linear, FusedLinear) and linear.bias is not None:
            linear.gelu, folded[second] = True, nn.Identity()
        for norm, silu, side in ((first, second, "post"), (second, first, "pre")):
            if isinstance(folded[norm], FusedGroupNorm) and type(folded[silu]) is nn.SiLU:
                setattr(folded[norm], side, True)
                folded[silu] = nn.Identity()
    return folded


class RowLayerNorm(RowLayer):
    """x [R, ..., *shape], weight and bias [R, *shape]"""

    def __init__(self, norm: nn.LayerNorm) -> None:
        super().__init__(norm)
        self.eps, self.shape = norm.eps, norm.normalized_shape

    def forward(self, x: Tensor) -> Tensor:
        unit = F.layer_norm(x, list(self.shape), eps=self.eps)
        if self.weight is None:
            return unit
        per_row = (x.shape[0], *[1] * (x.ndim - 1 - len(self.shape)), *self.shape)
        scaled: Tensor = unit * self.weight.view(per_row)
        return scaled if self.bias is None else scaled + self.bias.view(per_row)


class FusedLayerNorm(RowLayerNorm):
    """The same over the last axis as one GPU kernel: torch's own takes a block of threads for each vector."""

    def forward(self, x: Tensor) -> Tensor:
        return self.with_input(x)[1]

    def with_input(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return x and its norm; one kernel adds the gradients of both."""
        from esper.population import kernels

        weight, bias, vectors = self.weight, self.bias, x.flatten(1, -2)  # [R, n, D]
        if weight is not None and bias is None:
            bias = torch.zeros_like(weight)
        same, out = kernels.RowNorm.apply(vectors, weight, bias, self.eps, False, False, 1)  # type: ignore[no-untyped-call]
        return same.view(x.shape), out.view(x.shape)


def _row_layer_norm(norm: nn.LayerNorm, method: str) -> nn.Module:
    over_vectors = len(norm.normalized_shape) == 1
    return FusedLayerNorm(norm) if method == "fused" and over_vectors else RowLayerNorm(norm)


def add_output(module: nn.Module, x: Tensor) -> Tensor:
    """Return x + module(x); a fused norm at the front adds the gradients of both uses of x."""
    layers = [module]
    while isinstance(layers[0], nn.Sequential):
        layers[:1] = layers[0]
    if not isinstance(layers[0], FusedGroupNorm | FusedLayerNorm):
        return x + cast(Tensor, module(x))
    x, delta = layers[0].with_input(x)
    for layer in layers[1:]:
        delta = layer(delta)
    return x + delta


# ---- tokens ----


class RowCausalAttention(CausalAttention):
    """The same through torch's fused kernel, which does not write the scores to memory.

    The module itself multiplies step by step: vmap would run that kernel row by row, and torch's counter of
    operations does not know it.
    """

    def forward(self, qkv: Tensor) -> Tensor:
        split = qkv.unflatten(-1, (3, self.heads, -1)).flatten(0, -5)  # [n, T, 3, heads, D / heads]
        query, key, value = split.permute(2, 0, 3, 1, 4)  # each [n, heads, T, D / heads]
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return mixed.transpose(1, 2).reshape(*qkv.shape[:-1], -1)


class FusedCausalAttention(RowCausalAttention):
    """The same as one Triton kernel where sequences are short.

    On one H200, a step of 512 GPTs over 32 tokens, 16 wide, takes 1.9 ms with it and 6.9 ms without; over 64
    tokens, 64 wide, 11.5 and 15.9 ms (bfloat16).
    """

    def forward(self, qkv: Tensor) -> Tensor:
        from esper.population import kernels

        time, width = qkv.shape[-2], qkv.shape[-1] // 3
        if not kernels.attention_fits(time, width // self.heads):
            return super().forward(qkv)
        return kernels.RowAttention.apply(qkv, self.heads)  # type: ignore[no-untyped-call]


class RowEmbedding(nn.Module):
    """weight [R, V, D], tokens [R, ...] → [R, ..., D]

    A token beyond the vocabulary is refused: it must not find the vectors of another row.
    """

    def __init__(self, layer: nn.Embedding) -> None:
        super().__init__()
        self.weight: Tensor = layer.weight

    def forward(self, tokens: Tensor) -> Tensor:
        rows, vocabulary, _ = self.weight.shape
        # One lookup in the tables of all rows, laid one behind the other.
        first = vocabulary * torch.arange(rows, device=tokens.device)  # of each row, in a table of all rows
        index = tokens + first.view(-1, *[1] * (tokens.ndim - 1))
        unknown = (tokens < 0) | (tokens >= vocabulary)
        return F.embedding(index.masked_fill(unknown, rows * vocabulary), self.weight.flatten(0, 1))


def _row_embedding(layer: nn.Embedding) -> nn.Module | None:
    """Return None for embeddings that treat some tokens or gradients in a special way."""
    plain = layer.padding_idx is None and layer.max_norm is None
    return RowEmbedding(layer) if plain and not (layer.scale_grad_by_freq or layer.sparse) else None


_CONVOLUTIONS = (*CONVOLUTIONS.values(), *STANDARDIZED.values(), *SCALED.values())
_ROW_LAYERS: dict[type[nn.Module], Callable[[Any, str], nn.Module | None]] = {
    **dict.fromkeys(_CONVOLUTIONS, _row_conv),
    nn.GroupNorm: _row_group_norm,
    nn.LayerNorm: _row_layer_norm,
    nn.Linear: lambda layer, method: (FusedLinear if method == "fused" else RowLinear)(layer),
    nn.Embedding: lambda layer, method: _row_embedding(layer),
    CausalAttention: lambda layer, method: (
        FusedCausalAttention if method == "fused" else RowCausalAttention
    )(layer.heads),
    GlobalMean: lambda layer, method: RowGlobalMean(),
    nn.Flatten: lambda layer, method: nn.Flatten(2) if (layer.start_dim, layer.end_dim) == (1, -1) else None,
}


def row_layer(layer: nn.Module, method: str) -> nn.Module | None:
    """Return a layer without children over rows, or None where there is none.

    Types are compared exactly: a subclass, or a layer under a parametrization, may compute something else.
    """
    if type(layer) in _ROW_LAYERS:
        return _ROW_LAYERS[type(layer)](layer, method)
    return layer if type(layer) in ELEMENTWISE else None
