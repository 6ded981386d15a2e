"""Take rows of activations for the parts of a station, and add what the parts return.

Gradients come back as whole rows, where a plain index would scatter elements.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from esper.population.optimizer import has_triton
from esper.population.plan.packing import Station


def gather_rows(
    source: Tensor,
    index: Tensor,
    base: Tensor | None = None,
    base_index: Tensor | None = None,
    scale: Tensor | None = None,
    scale_by_index: bool = False,
) -> Tensor:
    """Return base[base_index[r]] + scale · source[index[r]] for each row r; an index of -1 adds nothing.

    scale: by r, or by index[r] with `scale_by_index`. Without `base` it is 0. base_index counts up from 0 as
    far as `base` has rows, and always if it is None.  # source [E, ...], index [R] → [R, ...]
    """
    if source.is_cuda and has_triton():
        from esper.population import kernels

        return kernels.gather_rows(source, index, base, base_index, scale, scale_by_index)
    on_cpu, known = source.device.type == "cpu", index.clamp(min=0)  # a GPU would have to be waited for
    rows = _select_rows(source, known)
    per_row = (-1, *[1] * (rows.ndim - 1))
    if scale is not None:
        factors = scale.index_select(0, known) if scale_by_index else scale
        if not on_cpu or bool((factors != 1.0).any()):
            rows.mul_(factors.to(rows.dtype).view(per_row))
    if not on_cpu or bool((index < 0).any()):
        rows.masked_fill_((index < 0).view(per_row), 0.0)
    if base is None:
        return rows
    rows[: base.shape[0]].add_(base)
    if base_index is not None and rows.shape[0] > base.shape[0]:
        rows[base.shape[0] :].add_(base.index_select(0, base_index[base.shape[0] :]))
    return rows


def _select_rows(source: Tensor, index: Tensor) -> Tensor:
    """Return the chosen rows in the same order in memory.

    Behind a grouped convolution the samples of images lie first and the rows second.
    """
    samples_first = source.transpose(0, 1)
    if samples_first.is_contiguous():
        return samples_first.index_select(1, index).transpose(0, 1)
    return source.index_select(0, index)


class AddToRows(torch.autograd.Function):
    """Each row that goes out: the row that it continues, and alpha · delta where it has an entry.

    Alpha is a constant, and so is the row that a forking row continues.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, delta: Tensor, work: Station) -> Tensor:
        ctx.work = work
        return gather_rows(delta, work.entry, x, work.base, work.alpha, scale_by_index=True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        work: Station = ctx.work
        # Rows that fork here start from a constant, so only the incoming rows get a gradient.
        return grad[: work.before], gather_rows(grad, work.rows, scale=work.alpha), None


class ReadRows(torch.autograd.Function):
    """x, and x[index] added to what was read before, if anything; an index of -1 reads nothing.

    read_by: which reading each row of x gets a gradient from, -1 for none; other readings are constants.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, before: Tensor | None, index: Tensor, read_by: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(read_by)
        return x, gather_rows(x, index, base=before)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, read: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        before = read if ctx.needs_input_grad[1] else None
        # x is returned as well, so that the gradients of both uses are added here, in one pass over the rows.
        return gather_rows(read, ctx.saved_tensors[0], base=grad), before, None, None
