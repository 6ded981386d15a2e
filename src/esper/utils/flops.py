"""The FLOPs of what runs, without what torch's own counter stumbles over or leaves out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from math import prod
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

Shape = Sequence[int]


@contextmanager
def flop_counter() -> Iterator[FlopCounterMode]:
    """Count what runs inside.

    In eval mode a layer of nn.TransformerEncoder is one kernel, which would count as nothing: here it is not.
    """
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    aten = torch.ops.aten
    counts = {
        aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
        aten._grouped_mm: _grouped_flops,
        aten.mkldnn_rnn_layer: _recurrent_flops,
        aten._cudnn_rnn: _recurrent_flops,
    }
    try:
        counter = FlopCounterMode(display=False, custom_mapping=counts)
        # Torch's tracker of modules fails at views of parameters without gradients.
        counter.mod_tracker = tracker = nullcontext()  # type: ignore[assignment]
        tracker.parents = {"Global"}  # type: ignore[attr-defined]
        with counter:
            yield counter
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


def _attention_flops(query: Shape, key: Shape, value: Shape, *_: object, **__: object) -> int:
    """Count q kᵀ and its product with v.  # shapes [B, heads, T, D]"""
    batch, heads, time, width = query
    return 2 * batch * heads * time * key[2] * (width + value[3])


def _grouped_flops(a: Shape, b: Shape, *_: object, **__: object) -> int:
    """Count the products of groups, such as experts, which lie behind each other in a or b."""
    groups = a[0] if len(a) == len(b) == 3 else 1
    return 2 * groups * a[-2] * a[-1] * b[-1]


def _recurrent_flops(inputs: Shape, *weights: Any, **_: object) -> int:
    """Count the products of an LSTM or GRU: each matrix with each step.  # inputs [..., width]"""
    matrices = weights[0] if isinstance(weights[0], list) else weights[:2]
    return 2 * prod(inputs[:-1]) * sum(prod(shape) for shape in matrices if len(shape) == 2)
