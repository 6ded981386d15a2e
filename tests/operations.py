"""Counting what reaches the dispatcher: a measure that no machine can blur."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class _Counter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def count_operations(call: Callable[[], object]) -> int:
    """How many operations one call sends through the dispatcher."""
    with _Counter() as counter:
        call()
    return counter.count
