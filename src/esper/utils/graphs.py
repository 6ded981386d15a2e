"""Capture functions over tensors as CUDA graphs and replay them.

A thousand small kernel launches then cost the host one. A function can be captured if it never waits for the
device, and if what it does depends only on its arguments and on tensors that keep their addresses.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass
from functools import cache
from operator import attrgetter
from typing import Any, Generic, ParamSpec, TypeVar, cast

import torch
from torch import Tensor

P = ParamSpec("P")
Result = TypeVar("Result")
MAX_GRAPHS = 16  # that a function keeps, one for each signature of its arguments: the latest ones


class GraphPool:
    """A memory pool and a stream in which graphs are captured, so that each reuses the memory of the others.

    A pool ends with the last graph in it, so a graph that does next to nothing is kept to hold it open.
    """

    def __init__(self) -> None:
        self.handle = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream()
        self._anchor, _ = self.capture(lambda: torch.zeros(1, device="cuda"))

    def capture(self, function: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
        """Capture a function; return the graph and the function's result. What it raises ends the capture."""
        free, total = torch.cuda.mem_get_info()
        if free < total // 4:  # torch cannot give its cached memory back while a graph is captured
            torch.cuda.empty_cache()
        graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            graph.capture_begin(pool=self.handle, capture_error_mode="relaxed")
            try:
                result = function()
            except BaseException:
                with suppress(RuntimeError):  # ending an invalid capture raises, and is what ends it
                    graph.capture_end()
                raise
            graph.capture_end()
        current.wait_stream(self.stream)
        return graph, result


def run_beside(calls: Sequence[Callable[[], Tensor]], shared: Sequence[Tensor]) -> list[Tensor]:
    """Run calls; where a graph is captured, as branches of it, which a replay runs at the same time.

    Their backward passes become branches too. `shared` are the tensors that they read.
    """
    if len(calls) == 1 or not shared[0].is_cuda or not torch.cuda.is_current_stream_capturing():
        return [call() for call in calls]
    # The first one too: the backward pass would run it behind all others, on the stream that waits for them.
    current, streams = torch.cuda.current_stream(), _side_streams(len(calls))
    for stream in streams:
        stream.wait_stream(current)
        for tensor in shared:  # whose memory is not given to others before this stream has read it
            tensor.record_stream(stream)
    results = []
    for call, stream in zip(calls, streams, strict=True):
        with torch.cuda.stream(stream):
            results.append(call())
        current.wait_stream(stream)
    return results


@cache
def _side_streams(count: int) -> list[torch.cuda.Stream]:
    return [torch.cuda.Stream() for _ in range(count)]


class TensorGraph:
    """A function over tensors, captured as one graph.

    Arguments are copied into static buffers, and the result is overwritten by the next call. Unless `warm`,
    the first call runs the function eagerly, because nothing may be compiled or loaded during a capture.
    """

    def __init__(self, function: Callable[..., Any], pool: GraphPool, warm: bool) -> None:
        self.function, self.pool, self.warm = function, pool, warm
        self.graph: torch.cuda.CUDAGraph | None = None
        self._buffers: tuple[Tensor, ...] = ()
        self._copies = CopyPlan((), ())
        self._result: Any = None

    def __call__(self, *arguments: Tensor) -> Any:
        if not self.warm:
            self.warm = True
            return self.function(*arguments)
        if self.graph is None:
            self._buffers = tuple(value.clone() for value in arguments)
            self._copies = CopyPlan(self._buffers, arguments)
            self.graph, self._result = self.pool.capture(lambda: self.function(*self._buffers))
        self._copies(self._buffers, arguments)
        self.graph.replay()
        return self._result


class Graphed(Generic[P, Result]):
    """A function over records of tensors, captured at its second call with arguments of the same signature.

    Without a pool it is the plain function. Records are tensors, dataclasses and tuples of records; anything
    else must be hashable and is part of the signature. Results belong to the caller.
    """

    def __init__(self, function: Callable[P, Result], pool: GraphPool | None) -> None:
        self.function, self.pool = function, pool
        self._graphs: dict[object, _SignatureGraph] = {}

    def __call__(self, *arguments: P.args, **named: P.kwargs) -> Result:
        if self.pool is None:
            return self.function(*arguments, **named)
        given: list[Tensor] = []
        structure = _flatten((arguments, tuple(named.items())), given)
        signature = structure, tuple([(tensor.shape, tensor.dtype) for tensor in given])
        if signature not in self._graphs:
            if len(self._graphs) == MAX_GRAPHS:
                del self._graphs[next(iter(self._graphs))]
            self._graphs[signature] = _SignatureGraph(self.function, structure, self.pool)
        return cast(Result, self._graphs[signature](given))


class _SignatureGraph:
    """A function captured for arguments of one structure, which are passed as a flat list of tensors."""

    def __init__(self, function: Callable[..., Any], structure: object, pool: GraphPool) -> None:
        self._result: object = None  # the structure of the result
        self._copies: CopyPlan | None = None

        def flat(*tensors: Tensor) -> list[Tensor]:
            arguments, named = cast(tuple[Any, Any], _unflatten(structure, iter(tensors)))
            found: list[Tensor] = []
            self._result = _flatten(function(*arguments, **dict(named)), found)
            return [tensor.contiguous() for tensor in found]  # as their copies will be

        self._graph = TensorGraph(flat, pool, warm=False)

    def __call__(self, given: list[Tensor]) -> object:
        found = self._graph(*given)
        kept = [torch.empty_like(tensor) for tensor in found]
        if self._copies is None:
            self._copies = CopyPlan(kept, found)
        self._copies(kept, found)
        return _unflatten(self._result, iter(kept))


class CopyPlan:
    """How to copy tensors to as many targets, in one launch for each dtype.

    A tensor whose strides differ from those of its target is copied by itself, since one such pair makes
    `torch._foreach_copy_` copy its whole list one by one. Strides are compared once; later tensors of the
    same dtypes may differ, and are then only slower.
    """

    def __init__(self, targets: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        self._single: list[int] = []
        by_dtype: dict[torch.dtype, list[int]] = {}
        for k, (target, value) in enumerate(zip(targets, values, strict=True)):
            alike = target.stride() == value.stride()
            (by_dtype.setdefault(target.dtype, []) if alike else self._single).append(k)
        self._together = list(by_dtype.values())

    def __call__(self, targets: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        for k in self._single:
            targets[k].copy_(values[k])
        for which in self._together:
            torch._foreach_copy_([targets[k] for k in which], [values[k] for k in which])


def copy_all(targets: Iterable[Tensor], values: Iterable[Tensor]) -> None:
    """Copy tensors to as many targets, in one launch for each dtype."""
    there, here = list(targets), list(values)
    CopyPlan(there, here)(there, here)


@cache
def _fields_getter(kind: Any) -> Callable[[Any], tuple[Any, ...]] | None:
    """Return a function that reads the fields of a dataclass as a tuple; None for any other type."""
    if not is_dataclass(kind):
        return None
    names = [field.name for field in fields(kind)]
    return attrgetter(*names) if len(names) > 1 else lambda record: (getattr(record, names[0]),)


def _flatten(record: Any, into: list[Tensor]) -> object:
    """Append the tensors of a record to a list, and return the structure from which to build it again."""
    if isinstance(record, Tensor):
        into.append(record)
        return Tensor
    kind = type(record)
    if (read := _fields_getter(cast(Hashable, kind))) is not None:
        return kind, tuple([_flatten(part, into) for part in read(record)])
    if isinstance(record, tuple):
        return tuple, tuple([_flatten(part, into) for part in record])
    return None, record


def _unflatten(structure: Any, tensors: Iterator[Tensor]) -> object:
    """Build the record of a structure with the tensors in their order: the inverse of `_flatten`."""
    if structure is Tensor:
        return next(tensors)
    kind, parts = structure
    if kind is None:
        return parts
    values = [_unflatten(part, tensors) for part in parts]
    return tuple(values) if kind is tuple else kind(*values)
