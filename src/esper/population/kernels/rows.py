"""Gather rows as one kernel, see `population.gather`."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

TILE = 4096  # elements of a program


# Plain arithmetic: a step asks hundreds of times, and Triton's own functions are slow on the host.


def next_power(n: int, least: int = 1) -> int:
    """Return the next power of two, at least `least`: the sizes that a tile may have."""
    return max(1 << (n - 1).bit_length(), least)


def ceil_div(n: int, size: int) -> int:
    """Return how many tiles of a size cover n elements."""
    return -(-n // size)


def dense_rows(x: Tensor) -> Tensor:
    """Return the rows with the elements of each next to each other in memory.  # [R, C]"""
    return x if x.stride(-1) == 1 else x.contiguous()


# Where these begin in memory follows from the sizes of a plan's groups: not worth a kernel of its own.
@triton.jit(do_not_specialize_on_alignment=["base_index", "index", "scale"])
def _gather(  # type: ignore[no-untyped-def]
    base, base_index, source, index, scale, out, L, tiles,
    BASE: tl.constexpr, SCALE: tl.constexpr, BL: tl.constexpr,
):  # fmt: skip
    """out[r] = base[base_index[r]] + scale · source[index[r]], where index -1 picks nothing

    BASE: 0 no base, 1 base[r], 2 base[base_index[r]]; SCALE: 0 none, 1 scale[r], 2 scale[index[r]]
    """
    row = (tl.program_id(0) // tiles).to(tl.int64)
    offset = (tl.program_id(0) % tiles) * BL + tl.arange(0, BL)
    inside = offset < L
    pick = tl.load(index + row)
    value = tl.load(source + pick * L + offset, mask=inside & (pick >= 0), other=0.0).to(tl.float32)
    if SCALE == 1:
        value = value * tl.load(scale + row)
    if SCALE == 2:
        value = value * tl.load(scale + tl.maximum(pick, 0))
    if BASE:
        under = row
        if BASE == 2:
            under = tl.load(base_index + row)
        value += tl.load(base + under * L + offset, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * L + offset, value.to(out.dtype.element_ty), mask=inside)


def gather_rows(
    source: Tensor,
    index: Tensor,
    base: Tensor | None,
    base_index: Tensor | None,
    scale: Tensor | None,
    scale_by_index: bool,
) -> Tensor:
    """See the kernel.  # source [E, ...], index [R] → [R, ...]"""
    source = source.contiguous()
    out = source.new_empty(index.shape[0], *source.shape[1:])
    if not out.numel():
        return out
    length = out[0].numel()
    tiles = ceil_div(length, TILE)
    _gather[(tiles * index.shape[0],)](
        out if base is None else base.contiguous(), index if base_index is None else base_index,
        source, index, index if scale is None else scale, out, length, tiles,
        BASE=0 if base is None else 1 if base_index is None else 2,
        SCALE=0 if scale is None else 2 if scale_by_index else 1, BL=TILE, num_warps=8,
    )  # fmt: skip
    return out
