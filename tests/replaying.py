"""Captures on a CPU: a replay runs the function again, over the same places and into the same results."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any
from unittest.mock import patch

from torch import Tensor

from esper.utils.replay import Replayed, Studio


def tensors_in(record: Any) -> list[Tensor]:
    """All tensors of a record, in order."""
    if isinstance(record, Tensor):
        return [record]
    if is_dataclass(record) and not isinstance(record, type):
        return [t for f in fields(record) for t in tensors_in(getattr(record, f.name))]
    return [t for part in record for t in tensors_in(part)] if isinstance(record, tuple | list) else []


@contextmanager
def replays_on_a_cpu() -> Iterator[list[Replayed]]:
    """Meanwhile captures work without a GPU; gives those that were made."""
    made: list[Replayed] = []

    def call(replayed: Replayed, *arguments: Tensor) -> Any:
        if not replayed.known:
            replayed.known = True
            return replayed.function(*arguments)
        if not replayed.graph:
            made.append(replayed)
            replayed._places = tuple(value.clone() for value in arguments)
            replayed.graph = True  # type: ignore[assignment]
        for place, value in zip(replayed._places, arguments, strict=True):
            place.copy_(value)
        found = replayed.function(*replayed._places)
        if replayed._result is None:
            replayed._result = found
        for place, value in zip(tensors_in(replayed._result), tensors_in(found), strict=True):
            place.copy_(value)
        return replayed._result

    with (
        patch.object(Studio, "__init__", lambda self: None),
        patch.object(Replayed, "__call__", call),
    ):
        yield made
