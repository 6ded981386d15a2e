"""Which layers have their units in common, found by running the model.

A hidden unit is made by one layer or by several (a residual stream), passed on by norms and depthwise
convolutions, and read by others. To widen it, all of them grow together. Gradients say which makers feed the
same inputs: these are coupled. Then one pass with marks says the rest: all makers of a group have new units
behind their own that hold NaN, and whatever they reach is marked. The marks tell where in the input of each
reader the new units arrive, through whatever the model's own code does with them (activations, pooling,
flattening, concatenation). What mixes units on the way (a norm over all channels, a softmax) spreads the
marks, and what cannot take more units raises: both are refused.

The dependency graph of torch-pruning was judged first. It groups layers for removal, where a LayerNorm or an
attention in between is no obstacle; it says which units go, not where new ones arrive; it needs a graph of
gradients, which frozen parts do not have, and it fails on the tuples of GPT-2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr
from dataclasses import dataclass
from io import StringIO
from typing import Any, cast

import torch
from torch import Tensor, nn

from esper.growing.units import CONVOLUTIONS, Role, dense, passing, positions_without, units_in
from esper.utils.errors import one_line

Run = Callable[[], Tensor]  # one forward pass of the model, to whatever it is judged by


class CannotWiden(Exception):
    """Why the units of a layer cannot be added to."""


@dataclass(frozen=True)
class Part:
    """A layer that grows with others when their units grow."""

    layer: nn.Module
    role: Role
    axis: int  # of activations, along which the units lie
    more: int  # new entries of its input, or of the output of a maker; of a counter, what it counts
    where: Tensor | None = None  # [k] positions of new units in what it reads, or a maker makes; None: last
    counts: tuple[tuple[str, int], ...] = ()  # attributes of a counter, and by how much they rise


def makers_of(layers: Iterable[nn.Module], units: int) -> list[Part]:
    """Layers that make so many more units each."""
    return [Part(layer, Role.MAKER, _axis(layer), units) for layer in layers]


def count_on(part: Part, times: int) -> None:
    """Let the attributes of a counter rise so many times; below 0 they fall."""
    for name, more in part.counts:
        setattr(part.layer, name, getattr(part.layer, name) + times * more)


def find_parts(model: nn.Module, given: Sequence[Part], run: Run) -> list[Part]:
    """All layers that grow when these makers and counters do, by one wide pass.

    Readers come first, then passers, then those that are given. Raises CannotWiden where it is not possible.
    """
    found: dict[nn.Module, Part] = {}
    makers = {part.layer: part for part in given if part.role is Role.MAKER}

    def enters(layer: nn.Module, x: Tensor, marked: Tensor) -> Tensor | None:
        axis, more = _axis(layer), x.shape[_axis(layer)] - units_in(layer)
        if more == 0 and not marked.any():
            return None
        where = marked.nonzero().flatten()
        if more <= 0 or len(where) != more or layer in found:
            raise CannotWiden(f"units are mixed before {type(layer).__name__}")
        role = Role.READER if dense(layer) is not None else Role.PASSER
        last = bool(where[0] == x.shape[axis] - more)
        found[layer] = Part(layer, role, axis, more, None if last else where)
        return x.index_select(axis, positions_without(where, x.shape[axis]))

    def leaves(layer: nn.Module, output: Tensor) -> Tensor | None:
        part = makers.get(layer) or found.get(layer)
        if part is None or part.role is Role.READER:
            return None
        shape = list(output.shape)
        shape[part.axis] = part.more
        return spread(output, output.new_full(shape, torch.nan), part.axis, part.where)

    with ExitStack() as stack:
        for part in given:  # meanwhile what a counter says is that of the wider model
            count_on(part, 1)
            stack.callback(count_on, part, -1)
        stack.enter_context(_watched(model, enters, leaves))
        _attempt(run)
    order = [Role.READER, Role.PASSER]
    ends = sorted(found.values(), key=lambda part: order.index(part.role))
    if not any(part.role is Role.READER for part in ends):
        raise CannotWiden("nothing reads these units")
    return [*ends, *given]


def new_to_new(readers: Iterable[Part], makers: Iterable[Part]) -> int:
    """The weights from new inputs to new outputs in layers that both read and make new units.

    They are 0 when a widening folds, and come on top of what it brings.
    """
    makes = [(part.layer, part.more) for part in makers if part.role is Role.MAKER]
    return sum(
        part.more * more * int(cast(Tensor, layer.weight)[0, 0].numel())
        for part in readers
        if part.role is Role.READER
        for layer, more in makes
        if layer is part.layer
    )


class Reach:
    """Which units of which layers arrive at which inputs of others; found when it is first asked for.

    In one pass the output of every dense layer is a leaf of its own, so that the gradient of an input says
    which units it comes from, and nothing from before. Two inputs of each layer are asked, the first and the
    last.
    """

    def __init__(self, model: nn.Module, run: Run):
        self.model, self.run = model, run
        self._found: dict[nn.Module, set[tuple[int, int]]] | None = None

    def coupled(self, maker: nn.Module) -> list[nn.Module]:
        """The layers whose outputs are added to, or multiplied with, those of this one; itself first.

        Raises CannotWiden where its units are mixed.
        """
        if self._found is None:
            with torch.enable_grad():
                self._found = self._look()
        if not self._found.get(maker):
            raise CannotWiden(f"the units of {type(maker).__name__} are mixed, or read by nothing")
        group, inputs = [maker], set(self._found[maker])
        while more := [layer for layer, own in self._found.items() if layer not in group and own & inputs]:
            group += more
            inputs |= set().union(*(self._found[layer] for layer in more))
        return group

    def _look(self) -> dict[nn.Module, set[tuple[int, int]]]:
        """By layer, the inputs that its units arrive at: (id of the layer, position)."""
        leaves: dict[nn.Module, Tensor] = {}
        read: dict[nn.Module, Tensor] = {}

        def enters(layer: nn.Module, inputs: Any) -> None:
            if inputs and isinstance(inputs[0], Tensor):
                read[layer] = inputs[0]

        def passes(layer: nn.Module, inputs: Any, output: Tensor) -> Tensor:
            given: Tensor = inputs[0]
            return given.clone()  # a norm that begins with a scale of 0 would hide where units go

        def leaves_with(layer: nn.Module, inputs: Any, output: Tensor) -> Tensor:
            leaves[layer] = (torch.rand_like(output) + 0.5).requires_grad_(True)
            return leaves[layer].clone()

        try:
            with ExitStack() as hooks:
                for layer in self.model.modules():
                    if dense(layer) is not None:
                        hooks.enter_context(layer.register_forward_pre_hook(enters))
                        hooks.enter_context(layer.register_forward_hook(leaves_with))
                    elif passing(layer) is not None and not isinstance(layer, CONVOLUTIONS):
                        hooks.enter_context(layer.register_forward_hook(passes))
                self.run()
        except Exception as error:  # a model whose way depends on values
            raise CannotWiden(f"the model does not run with other values ({one_line(error)})") from error
        return _arrivals(leaves, {layer: x for layer, x in read.items() if x.requires_grad})


def _arrivals(
    leaves: Mapping[nn.Module, Tensor], read: Mapping[nn.Module, Tensor]
) -> dict[nn.Module, set[tuple[int, int]]]:
    """By maker, the inputs that its units arrive at; makers whose units are mixed on the way are left out."""
    found: dict[nn.Module, set[tuple[int, int]]] = {layer: set() for layer in leaves}
    for reader, x in read.items():
        for place in {0, x.shape[_axis(reader)] - 1}:
            asked = x.select(_axis(reader), place).sum()
            outputs: list[Any] = list(leaves.values())
            gradients: tuple[Any, ...] = torch.autograd.grad(
                asked, outputs, retain_graph=True, allow_unused=True
            )
            for maker, gradient in zip(leaves, gradients, strict=True):
                if gradient is None:
                    continue
                axis = _axis(maker) % gradient.ndim
                units = int((gradient != 0).movedim(axis, 0).flatten(1).any(1).sum())
                if units == 1 and maker in found:
                    found[maker].add((id(reader), place))
                elif units > 1:
                    found.pop(maker, None)
    return found


def spread(old: Tensor, new: Tensor, axis: int, where: Tensor | None) -> Tensor:
    """Activations of old and new units side by side: the new ones at these positions, by default last."""
    if where is None:
        return torch.cat([old, new], axis)
    rest = positions_without(where, old.shape[axis] + new.shape[axis])
    order = torch.cat([rest, where]).argsort()
    return torch.cat([old, new], axis).index_select(axis, order)


def _axis(layer: nn.Module) -> int:
    kind = dense(layer) or passing(layer)
    assert kind is not None
    return kind.axis


def _attempt(run: Run) -> None:
    try:
        with redirect_stderr(StringIO()):  # where a traced module prints what it raises
            judged = run()
    except CannotWiden:
        raise
    except Exception as error:  # whatever a stranger's forward raises about a shape
        raise CannotWiden(f"the model takes no more units there ({one_line(error)})") from error
    if not bool(judged.isfinite().all()):
        raise CannotWiden("units reach the output of the model")


@contextmanager
def _watched(
    model: nn.Module,
    enters: Callable[[nn.Module, Tensor, Tensor], Tensor | None],
    leaves: Callable[[nn.Module, Tensor], Tensor | None],
) -> Iterator[None]:
    """While inside, layers with units ask what they read and what they give; others may read no marks.

    enters(layer, x, marked [units]) and leaves(layer, output) give another tensor, or None for the same.
    """

    def before(layer: nn.Module, inputs: Any) -> Any:
        if not inputs or not isinstance(inputs[0], Tensor):
            return None
        axis = _axis(layer) % inputs[0].ndim
        marked = inputs[0].isnan().movedim(axis, 0).flatten(1).any(1)
        changed = enters(layer, inputs[0], marked)
        return None if changed is None else (changed, *inputs[1:])

    def after(layer: nn.Module, inputs: Any, output: Any) -> Any:
        return leaves(layer, output)

    def refuse(layer: nn.Module, inputs: Any) -> None:
        if any(isinstance(x, Tensor) and bool(x.isnan().any()) for x in inputs):
            raise CannotWiden(f"{type(layer).__name__} takes no more units")

    with ExitStack() as hooks:
        for layer in model.modules():
            if dense(layer) is not None or passing(layer) is not None:
                hooks.enter_context(layer.register_forward_pre_hook(before))
                hooks.enter_context(layer.register_forward_hook(after))
            elif layer._parameters:
                hooks.enter_context(layer.register_forward_pre_hook(refuse))
        yield
