"""Convolutions as matrix products.

Under vmap an ordinary convolution becomes a grouped one, which is good on a CPU and poor on a GPU beyond
about a hundred groups. As padded, shifted views and one product, the rows become a batched matrix product.
"""

from __future__ import annotations

import copy
from itertools import product
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Conv = nn.Conv1d | nn.Conv2d


class ProductConv(nn.Module):
    """The same arithmetic and the same parameters as a stride-1 convolution, as one matrix product."""

    def __init__(self, conv: Conv) -> None:
        super().__init__()
        self.weight = conv.weight
        self.bias = conv.bias
        self.kernel = conv.kernel_size
        self.padding = cast(tuple[int, ...], conv.padding)
        self.stride = conv.stride
        self.depthwise = conv.groups > 1

    def forward(self, x: Tensor) -> Tensor:
        channels_last = x.movedim(1, -1)  # [B, *spatial, C]
        views = self._shifted(channels_last)
        if self.depthwise:
            taps = self.weight.flatten(2).permute(2, 1, 0)  # [K, 1, C]
            out = sum(
                (view * tap for view, tap in zip(views, taps, strict=True)), start=torch.zeros_like(views[0])
            )
        else:
            matrix = self.weight.flatten(2).permute(2, 1, 0).flatten(0, 1)  # [K·C, O]
            out = torch.cat(views, dim=-1) @ matrix
        if self.bias is not None:
            out = out + self.bias
        return out.movedim(-1, 1)

    def _shifted(self, x: Tensor) -> list[Tensor]:
        """One view per kernel position, each the size of the output.  # [B, *out, C]"""
        pads = [p for padding in reversed(self.padding) for p in (padding, padding)]
        padded = F.pad(x, [0, 0, *pads])
        sizes = [
            (n + 2 * p - k) // s + 1
            for n, p, k, s in zip(x.shape[1:-1], self.padding, self.kernel, self.stride, strict=True)
        ]
        return [
            padded[(slice(None), *self._window(offsets, sizes))]
            for offsets in product(*(range(k) for k in self.kernel))
        ]

    def _window(self, offsets: tuple[int, ...], sizes: list[int]) -> list[slice]:
        return [slice(o, o + s * (n - 1) + 1, s) for o, n, s in zip(offsets, sizes, self.stride, strict=True)]


def expressible(conv: Conv) -> bool:
    """Whether a convolution is plain enough to be written as one product."""
    one_group = conv.groups == 1
    depthwise = conv.groups == conv.in_channels == conv.out_channels
    plain = conv.padding_mode == "zeros" and not isinstance(conv.padding, str) and set(conv.dilation) == {1}
    return plain and (one_group or depthwise)


def as_products(module: nn.Module) -> nn.Module:
    """A copy with every plain convolution as a product; parameter names stay as they are."""
    if isinstance(module, nn.Conv1d | nn.Conv2d):
        return ProductConv(copy.deepcopy(module)) if expressible(module) else copy.deepcopy(module)
    twin = copy.copy(module)
    twin._modules = {name: child and as_products(child) for name, child in module._modules.items()}
    return twin
