"""Rows that are read and taken in such a way that gradients come back as whole rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from esper.population.optimizer import has_triton


class ReadRows(torch.autograd.Function):
    """x, and x[index] added to what was read before; an index of -1 reads nothing.

    read_by: which reading each row of x gets a gradient from, -1 for none; other readings are constants.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, before: Tensor, index: Tensor, read_by: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(read_by)
        return x, _picked(x, index, before)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, read: Tensor) -> tuple[Tensor, Tensor, None, None]:
        return _picked(read, ctx.saved_tensors[0], grad), read, None, None


def _picked(source: Tensor, index: Tensor, base: Tensor) -> Tensor:
    """base[r] + source[index[r]], where an index of -1 picks nothing.  # source [E, ...], base [R, ...]"""
    if source.is_cuda and has_triton():
        from esper.population.kernels import pick_rows

        return pick_rows(source, index, base)
    rows = source.index_select(0, index.clamp(min=0))
    return base + torch.where((index >= 0).view(-1, *[1] * (base.ndim - 1)), rows, 0.0)


class TakeWholeRows(torch.autograd.Function):
    """x and x[rows], no row twice. Going back adds whole rows, where a plain index scatters elements."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(rows)
        return x, x.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, taken: Tensor) -> tuple[Tensor, None]:
        return grad.index_add(0, ctx.saved_tensors[0], taken), None
