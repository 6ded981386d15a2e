"""CUDA graphs without a GPU: a replay runs the function again, over the same buffers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any
from unittest.mock import patch

from torch import Tensor

from esper.utils.graphs import GraphPool, TensorGraph


def tensors_in(record: Any) -> list[Tensor]:
    """All tensors of a record, in order."""
    if isinstance(record, Tensor):
        return [record]
    if is_dataclass(record) and not isinstance(record, type):
        return [t for f in fields(record) for t in tensors_in(getattr(record, f.name))]
    return [t for part in record for t in tensors_in(part)] if isinstance(record, tuple | list) else []


@contextmanager
def graphs_on_cpu() -> Iterator[list[TensorGraph]]:
    """Let captures work without a GPU, and yield the list of graphs that were captured."""
    made: list[TensorGraph] = []

    def call(graph: TensorGraph, *arguments: Tensor) -> Any:
        if not graph.warm:
            graph.warm = True
            return graph.function(*arguments)
        if not graph.graph:
            made.append(graph)
            graph._buffers = tuple(value.clone() for value in arguments)
            graph.graph = True  # type: ignore[assignment]
        for place, value in zip(graph._buffers, arguments, strict=True):
            place.copy_(value)
        found = graph.function(*graph._buffers)
        if graph._result is None:
            graph._result = found
        for place, value in zip(tensors_in(graph._result), tensors_in(found), strict=True):
            place.copy_(value)
        return graph._result

    with (
        patch.object(GraphPool, "__init__", lambda self: None),
        patch.object(TensorGraph, "__call__", call),
    ):
        yield made
