"""One architecture, run with another set of weights for every row."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from math import prod
from typing import cast

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd

from esper.population.blueprints import AlibiAttention, BlendGate, CausalSelfAttention, NormMix, SqueezeExcite
from esper.population.hosts import TokenEmbedding
from esper.population.row_layers import add_output, fold_activations, row_layer

Run = Callable[[dict[str, Tensor], Tensor], Tensor]


@dataclass(frozen=True)
class ParameterLayout:
    """Where each parameter of a module lies in its flat row."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    @staticmethod
    def of(module: nn.Module) -> ParameterLayout:
        named = list(module.named_parameters())
        return ParameterLayout(tuple(n for n, _ in named), tuple(tuple(p.shape) for _, p in named))

    @cached_property
    def sizes(self) -> list[int]:
        return [prod(shape) for shape in self.shapes]

    @cached_property
    def total(self) -> int:
        return sum(self.sizes)

    def unflatten(self, rows: Tensor) -> dict[str, Tensor]:
        """Return views of flat rows by parameter name; columns behind the last parameter are left out.

        [R, P or more] → {name: [R, *shape]}
        """
        pieces = rows.split([*self.sizes, rows.shape[1] - self.total], dim=1)
        return {
            name: piece.view(rows.shape[0], *shape)
            for name, shape, piece in zip(self.names, self.shapes, pieces[:-1], strict=True)
        }


def flatten(module: nn.Module) -> Tensor:
    """Return the parameters of one module as a flat row.  # [P]"""
    pieces = [p.detach().reshape(-1) for p in module.parameters()]
    return torch.cat(pieces) if pieces else torch.zeros(0)


def load_flat(module: nn.Module, row: Tensor) -> nn.Module:
    """Write a flat row into the parameters of a module and return the module.  # row [P]"""
    with torch.no_grad():
        for name, value in ParameterLayout.of(module).unflatten(row.unsqueeze(0)).items():
            module.get_parameter(name).copy_(value[0])
    return module


class RowModule:
    """A module whose parameters come in from outside, a row each; its buffers are the same for all rows.

    Raises ValueError for a module with dropout or running statistics, which rows do not have.
    """

    def __init__(self, module: nn.Module, device: torch.device, method: str = "grouped"):
        """method: how convolutions run, see `row_layers`"""
        for name, child in module.named_modules():
            if isinstance(child, _DropoutNd) or (isinstance(child, _NormBase) and child.track_running_stats):
                raise ValueError(
                    f"{name or 'the module'} is a {type(child).__name__}, which behaves differently in "
                    "evaluation; in a population use GroupNorm or LayerNorm, and no dropout"
                )
        self.layout = ParameterLayout.of(module)
        self.module = module
        # The row form writes into no dictionary of the module, so that only another device needs a slow copy.
        template = module if device.type == "cpu" else copy.deepcopy(module).to(device)
        rows = row_form(template, method)
        self.in_row_form = rows is not None
        if rows is None:
            own = copy.deepcopy(template)  # which holds the weights of rows while it runs
            self._run: Run = vmap(partial(functional_call, own), randomness="different")
            self._add: Run = lambda tensors, x: x + self._run(tensors, x)
        else:
            self._run = _with_lent_weights(rows, rows)
            self._add = _with_lent_weights(rows, partial(add_output, rows))

    def __call__(self, rows: Tensor, x: Tensor) -> Tensor:
        """rows [R, P], x [R, B, ...] → [R, B, ...]"""
        return self._run(self.layout.unflatten(rows), x)

    def add_to(self, rows: Tensor, x: Tensor) -> Tensor:
        """Return x plus the output of the module, see `add_output`."""
        return self._add(self.layout.unflatten(rows), x)


def _with_lent_weights(module: nn.Module, forward: Callable[[Tensor], Tensor]) -> Run:
    """Return `forward` as a function of the module's weights, which it holds for the length of a call.

    This is `functional_call` without the search for the parameters at each call, which took a fifth of a
    step.
    """
    names = {id(parameter): name for name, parameter in module.named_parameters()}  # a tied one has one name
    targets = [
        (child._parameters, name, names[id(parameter)])
        for child in module.modules()
        for name, parameter in child._parameters.items()
        if parameter is not None
    ]

    def run(tensors: dict[str, Tensor], x: Tensor) -> Tensor:
        for store, name, full in targets:
            store[name] = cast(nn.Parameter, tensors[full])
        try:
            result = forward(x)
        finally:
            for store, name, _ in targets:
                store[name] = None
        return result

    return run


# ---- modules with children, over rows ----


# Their own code takes rows once their children do.
_ANY_RANK = (NormMix, SqueezeExcite, BlendGate, TokenEmbedding, CausalSelfAttention, AlibiAttention)


def row_form(module: nn.Module, method: str) -> nn.Module | None:
    """Return the module with a leading axis of rows, or None where a part of it has no such form."""
    if module._forward_pre_hooks or module._forward_hooks:  # these belong to the module as it is
        return None
    leaf = row_layer(module, method)
    if leaf is not None:
        return leaf
    found = {name: row_form(child, method) for name, child in module.named_children()}
    children = {name: child for name, child in found.items() if child is not None}
    if not children or len(children) < len(found):
        return None
    forward = type(module).forward
    # The module's own forward over children that take rows.
    rows = copy.copy(module)
    rows._parameters = dict(module._parameters)  # which are lent to it, see `_with_lent_weights`
    if forward is nn.Sequential.forward:
        rows._modules = dict(fold_activations(children))
    elif any(forward is kind.forward for kind in _ANY_RANK):
        rows._modules = dict(children)
    else:
        return None
    return rows
