"""One architecture, run with a different set of weights for every row."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from esper.population.layout import Layout
from esper.population.products import as_products

Buffers = dict[str, Tensor]


class RowModule:
    """A module whose parameters and buffers come in from outside, a row each."""

    def __init__(
        self, module: nn.Module, device: torch.device, products: bool = False, compiled: bool = False
    ):
        self.layout = Layout.of(module)
        self.module = module
        self.buffer_names = [name for name, _ in module.named_buffers()]
        runnable = as_products(module) if products else module
        self._runs = {mode: self._runner(runnable, mode, device, compiled) for mode in (True, False)}

    @staticmethod
    def _runner(
        module: nn.Module, training: bool, device: torch.device, compiled: bool
    ) -> Callable[[dict[str, Tensor], Tensor], Tensor]:
        template = copy.deepcopy(module).to(device).train(training)

        def one_row(tensors: dict[str, Tensor], x: Tensor) -> Tensor:
            result: Tensor = functional_call(template, tensors, (x,))
            return result

        rows = vmap(one_row, randomness="different")
        return torch.compile(rows, dynamic=True) if compiled else rows

    def initial_buffers(self, rows: int, device: torch.device) -> Buffers:
        """The module's buffers, one copy per row.  # {name: [R, *shape]}"""
        return {
            name: buffer.detach().to(device).expand(rows, *buffer.shape).clone()
            for name, buffer in self.module.named_buffers()
        }

    def __call__(self, rows: Tensor, x: Tensor, buffers: Buffers, training: bool) -> Tensor:
        """rows [R, P], x [R, B, ...] → [R, B, ...]; running statistics are updated in `buffers` in place."""
        return self._runs[training]({**self.layout.unflatten(rows), **buffers}, x)
