"""Convolutions of rows: grouped, one product per sample, shifted views, or a GPU kernel of our own."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from esper.population.blocks import STANDARDIZED, standardize

Conv = nn.Conv1d | nn.Conv2d


class RowConv(nn.Module):
    """What the forms of a convolution share: its weights, a row each."""

    def __init__(self, conv: Conv) -> None:
        super().__init__()
        self.weight: Tensor = conv.weight
        self.bias: Tensor | None = conv.bias
        self._standardized = type(conv) in STANDARDIZED.values()

    @property
    def filters(self) -> Tensor:
        """The weights to convolve with.  # [R, O, C / groups, *kernel]"""
        return standardize(self.weight, self.weight.ndim - 3) if self._standardized else self.weight


class GroupedConv(RowConv):
    """A convolution of rows as one convolution with R times the groups.  # x [R, B, C, *spatial]"""

    def __init__(self, conv: Conv) -> None:
        super().__init__(conv)
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
        weight = self.filters.flatten(0, 1)  # [R·O, C / groups, *kernel]
        out = self.conv(
            side_by_side, weight, bias, self.stride, self.padding, self.dilation, rows * self.groups
        )
        return rows_first(out, rows)


class PointConv(RowConv):
    """A 1×1 convolution of rows as one product per sample: nothing is moved, which is what the rest costs.

    On x86-64 six to nine times as fast as the grouped form (16 channels, 8×8, batch 64, 4 and 16 rows).
    """

    def forward(self, x: Tensor) -> Tensor:
        matrix = self.filters.flatten(2).unsqueeze(1)  # [R, 1, O, C]
        out = torch.matmul(matrix, x.flatten(3))  # [R, B, O, P]
        if self.bias is not None:
            out = out + self.bias.view(self.bias.shape[0], 1, -1, 1)
        return out.view(*x.shape[:2], -1, *x.shape[3:])


class ProductConv(RowConv):
    """A convolution of rows as a batched matrix product.  # x [R, B, C, *spatial]"""

    def __init__(self, conv: Conv) -> None:
        super().__init__(conv)
        self.kernel, self.stride = conv.kernel_size, conv.stride
        self.padding = cast(tuple[int, ...], conv.padding)
        self.depthwise = conv.groups > 1

    def forward(self, x: Tensor) -> Tensor:
        views = self._shifted(x.movedim(2, -1))  # each [R, B, *out, C]
        middle = (1,) * (x.ndim - 2)
        if self.depthwise:
            taps = self.filters.flatten(3).squeeze(2)  # [R, C, K]
            out = views[0] * taps[:, :, 0].view(-1, *middle, taps.shape[1])
            for k, view in enumerate(views[1:], start=1):
                out = out + view * taps[:, :, k].view(-1, *middle, taps.shape[1])
        else:
            matrix = self.filters.flatten(3).permute(0, 3, 2, 1).flatten(1, 2)  # [R, K·C, O]
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


class FusedConv(RowConv):
    """A convolution of rows through one GPU kernel.  # x [R, B, C, *spatial], channels last in memory"""

    def __init__(self, conv: Conv) -> None:
        super().__init__(conv)
        from esper.population import kernels

        self.depthwise, self.relu = conv.groups > 1, False  # a ReLU behind it may become part of it
        flat = isinstance(conv, nn.Conv1d)  # a signal is an image of height 1
        image = (lambda pair, blank: (blank, *pair)) if flat else (lambda pair, blank: pair)
        padding = cast(tuple[int, ...], conv.padding)
        self.shape = kernels.Geometry(image(conv.kernel_size, 1), image(conv.stride, 1), image(padding, 0))

    def forward(self, x: Tensor) -> Tensor:
        from esper.population import kernels

        if not self.depthwise:
            out: Tensor = kernels.RowConvolution.apply(x, self.filters, self.bias, self.shape, self.relu)  # type: ignore[no-untyped-call]
            return out
        out = kernels.RowDepthwise.apply(x, self.filters, self.shape)  # type: ignore[no-untyped-call]
        if self.bias is None:
            return out
        return out + self.bias.view(self.bias.shape[0], 1, -1, *[1] * (x.ndim - 3))


def rows_first(x: Tensor, rows: int) -> Tensor:
    """[B, R·C, *spatial] → [R, B, C, *spatial]"""
    result: Tensor = x.unflatten(1, (rows, -1)).transpose(0, 1)
    return result


def _plain(conv: Conv) -> bool:
    """Whether a convolution can be written as one product."""
    depthwise = conv.groups == conv.in_channels == conv.out_channels
    simple = conv.padding_mode == "zeros" and not isinstance(conv.padding, str) and set(conv.dilation) == {1}
    return simple and (conv.groups == 1 or depthwise)


def _pointwise(conv: Conv) -> bool:
    """Whether a convolution looks at one place at a time, and at every place."""
    sizes = {*conv.kernel_size, *conv.stride}
    return _plain(conv) and conv.groups == 1 and sizes == {1} and set(conv.padding) == {0}


_CONVOLUTIONS: dict[str, Callable[[Conv], nn.Module]] = {
    "grouped": GroupedConv,
    "product": ProductConv,
    "fused": FusedConv,
}


def row_convolution(conv: Conv, method: str) -> nn.Module | None:
    """How a convolution runs over rows, or None where its padding is none of ours."""
    if conv.padding_mode != "zeros":
        return None
    if method == "grouped" and _pointwise(conv):
        return PointConv(conv)
    return _CONVOLUTIONS[method if _plain(conv) else "grouped"](conv)
