"""One architecture, run with a different set of weights for every row."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd

from esper.population.layout import Layout
from esper.population.row_layers import fixes_rows, row_form

Run = Callable[[dict[str, Tensor], Tensor], Tensor]


class RowModule:
    """A module whose parameters come in from outside, a row each; its buffers are the same for all rows.

    Raises ValueError for a module with dropout or running statistics, which rows do not have.
    """

    def __init__(
        self, module: nn.Module, device: torch.device, method: str = "grouped", compiled: bool = False
    ):
        for name, part in module.named_modules():
            if isinstance(part, _DropoutNd) or (isinstance(part, _NormBase) and part.track_running_stats):
                raise ValueError(
                    f"{name or 'the module'} is a {type(part).__name__}, which behaves differently in "
                    "evaluation; in a population use GroupNorm or LayerNorm, and no dropout"
                )
        self.layout = Layout.of(module)
        self.module = module
        template = copy.deepcopy(module).to(device)
        rows = row_form(template, method)
        self.in_row_form = rows is not None
        self._run = _runner(template, rows, compiled)

    def __call__(self, rows: Tensor, x: Tensor) -> Tensor:
        """rows [R, P], x [R, B, ...] → [R, B, ...]"""
        return self._run(self.layout.unflatten(rows), x)


def _runner(template: nn.Module, rows: nn.Module | None, compiled: bool) -> Run:
    """The module in its row form where it has one, else under vmap.

    Row forms are compiled where asked, unless every number of rows would need a graph of its own.
    """

    def run(tensors: dict[str, Tensor], x: Tensor) -> Tensor:
        result: Tensor = functional_call(rows or template, tensors, (x,))
        return result

    if rows is None:
        return vmap(run, randomness="different")
    if not compiled or fixes_rows(rows):
        return _lending(rows)
    return torch.compile(_with_own_code(run), dynamic=True)


def _lending(rows: nn.Module) -> Run:
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

    def run(tensors: dict[str, Tensor], x: Tensor) -> Tensor:
        for store, name, full in places:
            store[name] = cast(nn.Parameter, tensors[full])
        try:
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
