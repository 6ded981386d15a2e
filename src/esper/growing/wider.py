"""The other way to a model of the grown size: the same one with wider hidden layers, which never grows."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from torch import Tensor, nn

from esper.foundation.errors import UserError
from esper.growing.batches import logits_of
from esper.growing.coupling import CannotWiden, Reach, find_parts, makers_of
from esper.growing.places import trained
from esper.growing.undoing import at_rest
from esper.growing.units import dense, units_out
from esper.growing.widening import Widening

_TRIES = 4  # at a size, each nearer than the one before


class Wider:
    """Makes models wider by one factor for all hidden layers that can be: their old units stay as they are,
    new ones have fresh weights and are heard from the first step on by weights that begin at 0.

    example: what the model is called with. Raises a UserError where no hidden layer can be made wider.
    """

    def __init__(self, model: nn.Module, example: Sequence[Any]):
        self._example = tuple(example)
        if not example:
            raise UserError(
                "control is 'wider', and what the model is called with is not known from its batches; give "
                "batches (inputs, targets), or leave control out"
            )
        if _size(self.widened(model, 2.0)) == _size(model):
            raise UserError(
                f"control is 'wider', and no hidden layer of {type(model).__name__} can be made wider: its "
                "units reach the output, or are mixed by a norm or an attention; leave control out"
            )

    def factor_for(self, model: nn.Module, wanted: int) -> float:
        """By how much hidden layers must be wider for about so many parameters."""
        own, factor = _size(model), 1.5
        sizes: dict[float, int] = {}
        for _ in range(_TRIES):
            sizes[factor] = _size(self.widened(model, factor))
            growth = (sizes[factor] - own) / (factor**2 - 1)  # a size is nearly quadratic in the factor
            factor = (1 + (wanted - own) / growth) ** 0.5 if growth else 1.5 * factor
        return min(sizes, key=lambda tried: abs(sizes[tried] - wanted))

    def widened(self, model: nn.Module, factor: float) -> nn.Module:
        """A copy of the model with hidden layers that are wider by a factor."""
        wide = copy.deepcopy(model)

        def run() -> Tensor:
            return logits_of(wide(*self._example), wide)

        with at_rest(wide):
            reach, done = Reach(wide, run), set[nn.Module]()
            for layer in [layer for layer in wide.modules() if dense(layer) is not None]:
                units = round((factor - 1) * units_out(layer))
                if layer in done or units < 1:
                    continue
                with suppress(CannotWiden, ValueError):  # units that are not hidden, or come in groups
                    makers = reach.coupled(layer)
                    done.update(makers)
                    Widening(find_parts(wide, makers_of(makers, units), run)).fold(1.0)
        return wide


def _size(model: nn.Module) -> int:
    return sum(p.numel() for p in trained(model))
