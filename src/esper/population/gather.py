"""Take rows of activations for the parts of a station, and add what the parts return.

Gradients come back as whole rows, where a plain index would scatter elements.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from esper.population.optimizer import has_triton
from esper.population.plan.packing import Station

# On a CPU, rows of at least so many elements are added one by one. With rows of 65,536 a step of 16 networks
# with seeds takes 0.86 to 0.95 of the time that passes over all rows take; the limit itself is an estimate.
LARGE_ROW = 8192


def gather_rows(
    source: Tensor,
    index: Tensor,
    base: Tensor | None = None,
    base_index: Tensor | None = None,
    scale: Tensor | None = None,
    scale_by_index: bool = False,
) -> Tensor:
    """Return base[base_index[r]] + scale · source[index[r]] for each row r; an index of -1 adds nothing.

    scale: by r, or by index[r] with `scale_by_index`. Without `base` it is 0, without `base_index` base[r].
    source [E, ...], index [R] → [R, ...]
    """
    if source.is_cuda and has_triton():
        from esper.population import kernels

        return kernels.gather_rows(source, index, base, base_index, scale, scale_by_index)
    if source[:1].numel() >= LARGE_ROW and source.device.type == "cpu":
        return _gather_each(source, index, base, base_index, scale, scale_by_index)
    known = index.clamp(min=0)
    rows = source.index_select(0, known)
    per_row = (-1, *[1] * (rows.ndim - 1))
    if scale is not None:
        rows = rows * (scale.index_select(0, known) if scale_by_index else scale).to(rows.dtype).view(per_row)
    if index.device.type != "cpu" or bool((index < 0).any()):  # a GPU would have to be waited for
        rows = torch.where((index >= 0).view(per_row), rows, 0.0)
    if base is None:
        return rows
    return rows.add_(base if base_index is None else base.index_select(0, base_index))


def _gather_each(
    source: Tensor,
    index: Tensor,
    base: Tensor | None,
    base_index: Tensor | None,
    scale: Tensor | None,
    scale_by_index: bool,
) -> Tensor:
    """The same, one row after another.

    The samples of images lie first in memory and the rows second, as torch's grouped convolution reads them.
    """
    shape = (index.shape[0], *source.shape[1:])
    images = len(shape) > 4
    out = (
        source.new_empty(shape[1], shape[0], *shape[2:]).transpose(0, 1)
        if images
        else source.new_empty(shape)
    )
    picks, rows = index.tolist(), source.unbind()
    under = range(len(picks)) if base_index is None else base_index.tolist()
    bases = None if base is None else base.unbind()
    scales = None if scale is None else scale.tolist()
    for r, (pick, target) in enumerate(zip(picks, out.unbind(), strict=True)):
        factor = 1.0 if scales is None else scales[pick if scale_by_index else r]
        if bases is None:
            target.zero_() if pick < 0 else torch.mul(rows[pick], factor, out=target)
        elif pick < 0:
            target.copy_(bases[under[r]])
        else:
            torch.add(bases[under[r]], rows[pick], alpha=factor, out=target)
    return out


class TakeRows(torch.autograd.Function):
    """x and x[source]; `entry` is where each row of x was taken to as a variable, -1 if nowhere."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, source: Tensor, entry: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(entry)
        return x, gather_rows(x, source)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, taken: Tensor) -> tuple[Tensor, None, None]:
        return gather_rows(taken, ctx.saved_tensors[0], base=grad), None, None


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
    """x, and x[index] added to what was read before; an index of -1 reads nothing.

    read_by: which reading each row of x gets a gradient from, -1 for none; other readings are constants.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, before: Tensor, index: Tensor, read_by: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(read_by)
        return x, gather_rows(x, index, base=before)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, read: Tensor) -> tuple[Tensor, Tensor, None, None]:
        return gather_rows(read, ctx.saved_tensors[0], base=grad), read, None, None
