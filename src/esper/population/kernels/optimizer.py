"""The update of rows as one pass: clip, moments, decay, step. Rows that do not learn are not touched."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from esper.population.config import PopulationConfig
from esper.population.kernels.rows import ceil_div
from esper.population.optimizer import RowWeights

TILE = {"BL": 1024, "num_warps": 4}  # elements of a program


@triton.jit
def _update(  # type: ignore[no-untyped-def]
    weights, first, second, steps, gradient, norms, rate, active, gaps, copy, P, tiles,
    limit, beta1, beta2, decay, GAPS: tl.constexpr, COPY: tl.constexpr, ADAM: tl.constexpr, BL: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) // tiles).to(tl.int64)
    start = (tl.program_id(0) % tiles) * BL
    learns = tl.load(active + row) != 0
    if GAPS:
        learns &= (start < tl.load(gaps + 2 * row)) | (start + BL > tl.load(gaps + 2 * row + 1))
    if learns:
        column = start + tl.arange(0, BL)
        inside = column < P
        offset = row * P + column
        norm = tl.load(norms + row)
        scale = limit / (norm + 1e-6)
        scale = tl.where(scale > 1.0, 1.0, scale)  # a norm that is no number stays one
        g = tl.load(gradient + offset, mask=inside, other=0.0).to(tl.float32) * scale
        w = tl.load(weights + offset, mask=inside, other=0.0)
        m = tl.load(first + offset, mask=inside, other=0.0)
        lr = tl.load(rate + row)
        if ADAM:
            count = tl.load(steps + row)  # counted up before
            v = tl.load(second + offset, mask=inside, other=0.0)
            # The moments as lerp computes them: m = beta1 · m + (1 - beta1) · g, and v likewise for g².
            m = g + (m - g) * beta1
            square = g * g
            v = square + (v - square) * beta2
            # The bias corrections 1 - beta^n, with beta^n = exp2(n · log2(beta)).
            fade1 = 1.0 - tl.exp2(count * tl.log2(beta1))
            fade2 = 1.0 - tl.exp2(count * tl.log2(beta2))
            move = m / fade1 / (tl.sqrt(v / fade2) + 1e-8)
            tl.store(second + offset, v, mask=inside)
        else:
            m = beta1 * m + g
            move = m
        tl.store(first + offset, m, mask=inside)
        w -= lr * (move + decay * w)
        tl.store(weights + offset, w, mask=inside)
        if COPY:
            tl.store(copy + offset, w.to(copy.dtype.element_ty), mask=inside)


def learn_rows(
    rows: RowWeights,
    gradient: Tensor,
    norms: Tensor,
    lr: Tensor,
    active: Tensor,
    config: PopulationConfig,
    gaps: Tensor | None,
    copy: Tensor | None,
) -> None:
    """What `optimizer.learn_rows` does."""
    gradient = gradient.contiguous()
    rows.steps.add_(active)
    count, width = gradient.shape
    tiles = ceil_div(width, TILE["BL"])
    _update[(tiles * count,)](
        rows.weights, rows.first, rows.second, rows.steps, gradient, norms.contiguous(), lr.contiguous(),
        active, active if gaps is None else gaps, active if copy is None else copy, width, tiles,
        config.clip_norm, float(config.momentum), float(config.second_beta), config.weight_decay,
        GAPS=gaps is not None, COPY=copy is not None, ADAM=config.optimizer == "adamw", **TILE,
    )  # fmt: skip
