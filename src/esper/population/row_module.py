"""One architecture, run with a different set of weights for every row."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from esper.population.dropout import StreamDropout, with_own_draws
from esper.population.layout import Layout
from esper.population.row_layers import fixes_rows, row_form

Buffers = dict[str, Tensor]
Run = Callable[[dict[str, Tensor], Tensor, Tensor | None], Tensor]


class RowModule:
    """A module whose parameters and buffers come in from outside, a row each."""

    def __init__(
        self, module: nn.Module, device: torch.device, method: str = "grouped", compiled: bool = False
    ):
        self.layout = Layout.of(module)
        self.module = module
        self._runs = {mode: self._runner(mode, device, method, compiled) for mode in (True, False)}

    def _runner(self, training: bool, device: torch.device, method: str, compiled: bool) -> Run:
        """The module in its row form where it has one, else under vmap.

        Row forms are compiled where asked, unless every number of rows would need a graph of its own.
        """
        template, draws = with_own_draws(copy.deepcopy(self.module).to(device).train(training))
        rows = row_form(template, method)
        self.in_row_form, self.draws = rows is not None, bool(draws)

        def run(tensors: dict[str, Tensor], x: Tensor, key: Tensor | None) -> Tensor:
            with _lent(draws, key):
                result: Tensor = functional_call(rows or template, tensors, (x,))
            return result

        if rows is None:
            keyed = vmap(run, randomness="different")
            unkeyed = vmap(partial(run, key=None), randomness="different")
            return lambda tensors, x, key: unkeyed(tensors, x) if key is None else keyed(tensors, x, key)
        if not compiled or draws or fixes_rows(rows):
            return _lending(rows, draws)
        return torch.compile(_with_own_code(run), dynamic=True)

    def initial_buffers(self, rows: int, device: torch.device) -> Buffers:
        """The module's buffers, one copy per row.  # {name: [R, *shape]}"""
        return {
            name: buffer.detach().to(device).expand(rows, *buffer.shape).clone()
            for name, buffer in self.module.named_buffers()
        }

    def __call__(
        self, rows: Tensor, x: Tensor, buffers: Buffers, training: bool, keys: Tensor | None = None
    ) -> Tensor:
        """rows [R, P], x [R, B, ...] → [R, B, ...]; running statistics are updated in `buffers` in place.

        keys [R]: what dropout draws from, needed in training where the module has any.
        """
        return self._runs[training]({**self.layout.unflatten(rows), **buffers}, x, keys)


@contextmanager
def _lent(draws: list[StreamDropout], key: Tensor | None) -> Iterator[None]:
    """Dropout with a key for the length of a call."""
    for drop in draws:
        drop.key = key
    try:
        yield
    finally:
        for drop in draws:
            drop.key = None


def _lending(rows: nn.Module, draws: list[StreamDropout]) -> Run:
    """The module with its weights lent to it for the length of a call.

    What `functional_call` does, without looking for the places anew each time: that took a fifth of a step.
    """
    names = {id(parameter): name for name, parameter in rows.named_parameters()}  # a tied one has one name
    places = [
        (module._parameters, name, names[id(parameter)])
        for module in rows.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None
    ]

    def run(tensors: dict[str, Tensor], x: Tensor, key: Tensor | None) -> Tensor:
        for store, name, full in places:
            store[name] = cast(nn.Parameter, tensors[full])
        try:
            with _lent(draws, key):
                result: Tensor = rows(x)
        finally:
            for store, name, _ in places:
                store[name] = None
        return result

    return run


def _with_own_code(run: Run) -> Run:
    """The same function over a code object of its own.

    Graphs are kept, counted and limited per code object. Functions made by one `def` share theirs, so the
    modules of one population would use up a single limit together and fall back to running uncompiled.
    """
    made = cast(types.FunctionType, run)
    return types.FunctionType(
        made.__code__.replace(), made.__globals__, made.__name__, made.__defaults__, made.__closure__
    )
