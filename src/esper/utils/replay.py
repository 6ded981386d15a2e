"""Functions over tensors that a GPU replays: their launches are recorded once, as a CUDA graph.

What runs as a thousand small launches then costs the host one. A function can be replayed if it waits for
nothing and what it does depends on its arguments and on tensors that stay in their places.
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
MAKES = 16  # of arguments, for which a function is kept captured: the latest ones


class Studio:
    """Where graphs are captured: one pool of memory and one stream, so that each reuses what is there.

    A pool ends with the last graph in it, so one graph that does next to nothing stays.
    """

    def __init__(self) -> None:
        self.pool = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream()
        self._anchor, _ = self.capture(lambda: torch.zeros(1, device="cuda"))

    def capture(self, function: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
        """A graph of what a function does, and what it returned; what it raises ends the capture."""
        free, total = torch.cuda.mem_get_info()
        if free < total // 4:  # what torch has cached cannot be given back while a graph is captured
            torch.cuda.empty_cache()
        graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            graph.capture_begin(pool=self.pool, capture_error_mode="relaxed")
            try:
                result = function()
            except BaseException:
                with suppress(RuntimeError):  # a capture that broke is ended by saying so
                    graph.capture_end()
                raise
            graph.capture_end()
        current.wait_stream(self.stream)
        return graph, result


class Replayed:
    """A function over tensors that is captured and replayed.

    It reads its arguments from places of its own, and what it returns is overwritten by the next call. Of an
    unknown kind it runs once as it is, since nothing may be compiled or loaded while it is captured.
    """

    def __init__(self, function: Callable[..., Any], studio: Studio, known: bool) -> None:
        self.function, self.studio, self.known = function, studio, known
        self.graph: torch.cuda.CUDAGraph | None = None
        self._places: tuple[Tensor, ...] = ()
        self._copies = Copies((), ())
        self._result: Any = None

    def __call__(self, *arguments: Tensor) -> Any:
        if not self.known:
            self.known = True
            return self.function(*arguments)
        if self.graph is None:
            self._places = tuple(value.clone() for value in arguments)
            self._copies = Copies(self._places, arguments)
            self.graph, self._result = self.studio.capture(lambda: self.function(*self._places))
        self._copies(self._places, arguments)
        self.graph.replay()
        return self._result


class Captured(Generic[P, Result]):
    """A function over records of tensors, captured at its second call with arguments of the same make.

    Without a studio, or away from a GPU, it is the function. Records are tensors, dataclasses and tuples of
    records; anything else must be hashable and is part of the make. What comes back is the caller's own.
    """

    def __init__(self, function: Callable[P, Result], studio: Studio | None) -> None:
        self.function, self.studio = function, studio
        self._made: dict[object, _Make] = {}

    def __call__(self, *arguments: P.args, **named: P.kwargs) -> Result:
        if self.studio is None:
            return self.function(*arguments, **named)
        given: list[Tensor] = []
        make = _flatten((arguments, tuple(named.items())), given)
        key = make, tuple([(tensor.shape, tensor.dtype) for tensor in given])
        if key not in self._made:
            if len(self._made) == MAKES:
                del self._made[next(iter(self._made))]
            self._made[key] = _Make(self.function, make, self.studio)
        return cast(Result, self._made[key](given))


class _Make:
    """A function replayed for arguments of one make, which are given and returned as plain tensors."""

    def __init__(self, function: Callable[..., Any], make: object, studio: Studio) -> None:
        self._result: object = None  # the make of what comes back
        self._copies: Copies | None = None

        def flat(*tensors: Tensor) -> list[Tensor]:
            arguments, named = cast(tuple[Any, Any], _rebuild(make, iter(tensors)))
            found: list[Tensor] = []
            self._result = _flatten(function(*arguments, **dict(named)), found)
            return [tensor.contiguous() for tensor in found]  # as their copies will be

        self._replayed = Replayed(flat, studio, known=False)

    def __call__(self, given: list[Tensor]) -> object:
        found = self._replayed(*given)
        kept = [torch.empty_like(tensor) for tensor in found]
        if self._copies is None:
            self._copies = Copies(kept, found)
        self._copies(kept, found)
        return _rebuild(self._result, iter(kept))


class Copies:
    """How tensors are copied to as many places: in one launch for each type.

    One that lies otherwise than its place is copied by itself: it would have all of its type copied one by
    one. How tensors lie is asked once; later ones of the same types may lie otherwise, if more slowly.
    """

    def __init__(self, places: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        self._alone: list[int] = []
        by_type: dict[torch.dtype, list[int]] = {}
        for k, (place, value) in enumerate(zip(places, values, strict=True)):
            alike = place.stride() == value.stride()
            (by_type.setdefault(place.dtype, []) if alike else self._alone).append(k)
        self._together = list(by_type.values())

    def __call__(self, places: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        for k in self._alone:
            places[k].copy_(values[k])
        for which in self._together:
            torch._foreach_copy_([places[k] for k in which], [values[k] for k in which])


def copy_all(places: Iterable[Tensor], values: Iterable[Tensor]) -> None:
    """Copy tensors to as many places."""
    there, here = list(places), list(values)
    Copies(there, here)(there, here)


@cache
def _parts_of(kind: Any) -> Callable[[Any], tuple[Any, ...]] | None:
    """What gives the fields of a dataclass of this kind, None for anything else."""
    if not is_dataclass(kind):
        return None
    names = [field.name for field in fields(kind)]
    return attrgetter(*names) if len(names) > 1 else lambda record: (getattr(record, names[0]),)


def _flatten(record: Any, into: list[Tensor]) -> object:
    """Append the tensors of a record; what else there is to know to build it again."""
    if isinstance(record, Tensor):
        into.append(record)
        return Tensor
    kind = type(record)
    if (parts := _parts_of(cast(Hashable, kind))) is not None:
        return kind, tuple([_flatten(part, into) for part in parts(record)])
    if isinstance(record, tuple):
        return tuple, tuple([_flatten(part, into) for part in record])
    return None, record


def _rebuild(make: Any, tensors: Iterator[Tensor]) -> object:
    """The record of a make, with the tensors in their order."""
    if make is Tensor:
        return next(tensors)
    kind, parts = make
    if kind is None:
        return parts
    values = [_rebuild(part, tensors) for part in parts]
    return tuple(values) if kind is tuple else kind(*values)
