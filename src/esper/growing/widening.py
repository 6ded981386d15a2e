"""More units in a user's own layers: a small layer beside each layer of a group, wired through the model.

What makes the units makes more of them, what passes them on passes more, and what reads them hears the new
ones with a strength. Between these layers the new units run through whatever the model's own code does. At
full strength all of it folds into plain wider layers with the same outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from esper.growing.coupling import Part, count_on, spread
from esper.growing.units import (
    NewEntries,
    Role,
    growing,
    layer_beside,
    positions_without,
    units_in,
    units_out,
)


@dataclass(frozen=True)
class Joined:
    """A parameter that has grown: what it was, what it is, what was put beside it and how."""

    old: nn.Parameter
    new: nn.Parameter
    beside: nn.Parameter
    joint: NewEntries


class Widening(nn.Module):
    """New units as a seed. Readers begin at 0, so that the model does not hear the new units yet."""

    def __init__(self, parts: Sequence[Part]):
        """Draws fresh weights. Raises ValueError where a norm would have part of a group."""
        super().__init__()
        self.parts = tuple(parts)
        self.beside = nn.ModuleList(
            nn.Identity() if part.role is Role.COUNTER else layer_beside(part.layer, part.role, part.more)
            for part in parts
        )

    def attach(
        self, role: Role, strength: Callable[[], float], alone: Callable[[], bool] = lambda: False
    ) -> list[RemovableHandle]:
        """Wire the layers of a role; the roles go in their own order.

        alone: whether the seed learns while the model does not; then it keeps the modes that it has.
        """
        handles = []
        for part, beside in zip(self.parts, self.beside, strict=True):
            if part.role is not role:
                continue
            counter = role is Role.COUNTER
            before, after = _counts(part, strength) if counter else _hooks(part, beside, strength, alone)
            if role is not Role.MAKER:
                handles.append(part.layer.register_forward_pre_hook(before))
            handles.append(part.layer.register_forward_hook(after, always_call=counter))
        return handles

    def copy_modes(self) -> None:
        """Give every new layer the train or eval mode of the layer that it stands beside."""
        for part, beside in zip(self.parts, self.beside, strict=True):
            beside.train(part.layer.training)

    def neighbours(self) -> dict[nn.Parameter, nn.Parameter]:
        """By new parameter, the model's own that it stands beside."""
        return {
            value: cast(nn.Parameter, part.layer._parameters[name])
            for part, beside in zip(self.parts, self.beside, strict=True)
            for name, value in beside._parameters.items()
            if value is not None
        }

    def padding(self) -> int:
        """Weights that a fold adds as 0: other widenings were folded into the layers since its birth."""
        total = 0
        for part, beside in zip(self.parts, self.beside, strict=True):
            sizes = {Role.MAKER: units_in, Role.READER: units_out}.get(part.role)
            if sizes is not None:
                kernel = int(cast(Tensor, part.layer.weight)[0, 0].numel())
                total += (sizes(part.layer) - sizes(beside)) * part.more * kernel
        return total

    @torch.no_grad()
    def fold(self, strength: float) -> list[Joined]:
        """Widen the layers in place; afterwards the model alone gives what model and seed gave."""
        joined: list[Joined] = []
        for part, beside in zip(self.parts, self.beside, strict=True):
            joined += _fold(part, beside, strength)
        return joined


def _hooks(
    part: Part, beside: nn.Module, strength: Callable[[], float], alone: Callable[[], bool]
) -> tuple[Any, Any]:
    """Before and after a layer runs.

    Another widening may have been folded into the layer since: what is beside it knows its first units alone.
    """
    axis, held = part.axis, list[Tensor]()
    reads = units_in(beside) if part.role is Role.MAKER else 0

    def before(layer: nn.Module, inputs: Any) -> Any:
        if strength() == 0.0:
            return None
        x = inputs[0]
        if part.where is None:
            old, new = x.split([x.shape[axis] - part.more, part.more], axis)
        else:
            old = x.index_select(axis, positions_without(part.where, x.shape[axis]))
            new = x.index_select(axis, part.where)
        held[:] = [new]
        return (old, *inputs[1:])

    def after(layer: nn.Module, inputs: Any, output: Tensor) -> Tensor | None:
        if strength() == 0.0:
            return None
        if not alone():
            beside.train(layer.training)
        if part.role is Role.MAKER:
            return spread(output, beside(inputs[0].narrow(axis, 0, reads)), axis, part.where)
        if part.role is Role.READER:
            return _added(output, strength() * beside(held.pop()), axis)
        return spread(output, beside(held.pop()), axis, part.where)

    return before, after


def _counts(part: Part, strength: Callable[[], float]) -> tuple[Any, Any]:
    """Before and after a counter runs: it counts the new units while these are heard."""
    raised: list[None] = []

    def before(layer: nn.Module, inputs: Any) -> None:
        if strength() != 0.0:
            raised.append(None)
            count_on(part, 1)

    def after(layer: nn.Module, inputs: Any, output: Any) -> None:
        if raised:
            raised.pop()
            count_on(part, -1)

    return before, after


def _added(output: Tensor, heard: Tensor, axis: int) -> Tensor:
    """The sum of both, where the output may have more units at its end."""
    more = output.shape[axis] - heard.shape[axis]
    if more:
        heard = torch.cat([heard, torch.zeros_like(output.narrow(axis, 0, more))], axis)
    return output + heard


# ---- folding -------------------------------------------------------------------------------------------


def _fold(part: Part, beside: nn.Module, strength: float) -> list[Joined]:
    """Widen one layer in place by the one beside it; what reads new units hears them with the strength."""
    if part.role is Role.COUNTER:
        count_on(part, 1)
        return []
    layer, joined = part.layer, []
    axes, sizes = growing(layer, part.role)
    for name, axis in axes.items():
        entries = NewEntries(axis, part.where)
        if layer._parameters.get(name) is not None:
            joined.append(_grow(layer, name, beside, entries, strength if part.role is Role.READER else 1.0))
        elif layer._buffers.get(name) is not None:
            layer._buffers[name] = entries.join(layer.get_buffer(name), beside.get_buffer(name))
    for name in sizes:
        setattr(layer, name, getattr(layer, name) + getattr(beside, name))
    return joined


def _grow(layer: nn.Module, name: str, beside: nn.Module, joint: NewEntries, strength: float) -> Joined:
    """Put a wider parameter in the place of a layer's own."""
    old, small = (cast(nn.Parameter, module._parameters[name]) for module in (layer, beside))
    new = nn.Parameter(joint.join(old.detach(), strength * small.detach()), old.requires_grad)
    layer._parameters[name] = new
    return Joined(old, new, small, joint)
