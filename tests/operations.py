"""Counting what reaches the dispatcher: a measure that no machine can blur."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class _Counter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def operations_of(call: Callable[[], object]) -> Counter[str]:
    """How often one call sends each operation through the dispatcher."""
    with _Counter() as counter:
        call()
    return counter.counts


def count_operations(call: Callable[[], object]) -> int:
    """How many operations one call sends through the dispatcher."""
    return operations_of(call).total()
