"""Count floating-point operations as torch does, and those of attention that its counter does not know."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch.utils.flop_counter import FlopCounterMode


class _NoTracker:
    """Instead of torch's tracker of modules, which fails at views of parameters without gradients."""

    parents = frozenset({"Global"})  # where the counter looks for the sum of all

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


@contextmanager
def flop_counter() -> Iterator[FlopCounterMode]:
    """Count what runs inside.

    In eval mode a layer of nn.TransformerEncoder is one kernel, which would count as nothing: here it is not.
    """
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    on_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # what attention is there
    try:
        counter = FlopCounterMode(display=False, custom_mapping={on_cpu: _attention_flops})
        counter.mod_tracker = _NoTracker()  # type: ignore[assignment]
        with counter:
            yield counter
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


def _attention_flops(
    query: Sequence[int], key: Sequence[int], value: Sequence[int], *_: object, **__: object
) -> int:
    """Count q kᵀ and its product with v.  # shapes [B, heads, T, D]"""
    batch, heads, time, width = query
    return 2 * batch * heads * time * key[2] * (width + value[3])
