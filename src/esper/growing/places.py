"""Where seeds may grow in any model: after submodules, found by running it once.

Nothing is traced and nothing is cut: a seed hangs on a submodule by a hook and changes what it hands on. So
skip connections, several inputs, tuples as outputs and weights that are shared do not matter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from esper.growing.undoing import at_rest
from esper.utils.errors import UserError

MOST_SLOTS = 8  # as many as are chosen without being asked for by name
TOPOLOGY_ORDER = ("cnn", "transformer", "mlp")  # which kind of joint wins a tie
NORMS = (nn.LayerNorm, nn.GroupNorm, _BatchNorm, nn.RMSNorm)
_LISTS = (nn.ModuleList, nn.Sequential)
_SEQUENCE_LAYERS = (nn.Embedding, nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.LayerNorm)


@dataclass(frozen=True)
class Place:
    """A submodule whose output a seed may change."""

    name: str
    topology: str
    shape: tuple[int, ...]  # of one sample
    in_tuple: bool = False  # whether the activation is the first of a tuple
    dtype: torch.dtype = torch.float32  # of the activation

    @property
    def width(self) -> int:
        """Channels or features."""
        return self.shape[0] if self.topology == "cnn" else self.shape[-1]

    @property
    def spatial_dims(self) -> int:
        """Axes of space: 0 but in a cnn."""
        return len(self.shape) - 1 if self.topology == "cnn" else 0


@dataclass(frozen=True)
class _Call:
    """One submodule that ran, in the order in which they ended. What it gave is described and not held:
    all activations of a large batch together are more than training needs."""

    name: str
    module: nn.Module
    gave: str  # the type of what it gave
    shape: tuple[int, ...] | None  # of the activation, None where there is none
    dtype: torch.dtype  # of the activation
    times: int  # it ran in one forward pass


def tensor_of(output: Any) -> Tensor | None:
    """The activation that a module hands on: a tensor, or the first of a tuple."""
    if type(output) is tuple and output:
        output = output[0]
    return output if isinstance(output, Tensor) else None


def is_sequence(module: nn.Module) -> bool:
    """Whether a module is no more than its children, one after another."""
    return type(module).forward is nn.Sequential.forward


def find_places(
    model: nn.Module,
    run: Callable[[], Any],
    names: Sequence[str | int] | None = None,
    topology: str | None = None,
) -> list[Place]:
    """The places after the named submodules, or at the ends of the model's blocks, in the order of its run.

    run: one forward pass of the model. All places are of one kind; a list of blocks stands for each of them.
    Raises a UserError where a name is not there, did not run, or hands on nothing that a seed could change.
    """
    calls = _calls(model, run)
    if names is not None:
        places = [_named(name, calls, model, topology) for name in _expanded(model, names)]
        _check_one_kind(places, type(model).__name__)
        order = [call.name for call in calls]
        return sorted(places, key=lambda place: order.index(place.name))
    units = _units(model)
    steps = [(call.module, _place(call, model, topology)) for call in calls if call.name in units]
    places = _block_ends(steps)
    if not places:
        raise UserError(
            f"{type(model).__name__} has no submodule after which something could grow; name one with "
            "slots=[...]: its output must be a float tensor [batch, features], [batch, time, features] or "
            "[batch, channels, *spatial]"
        )
    favourite = topology or _usual_kind(places)
    return _spread([place for place in places if place.topology == favourite])


def _check_one_kind(places: Sequence[Place], model: str) -> None:
    """Raise a UserError for slots of a model whose activations are of different kinds."""
    if len({place.topology for place in places}) > 1:
        shapes = ", ".join(f"{place.name} {list(place.shape)}" for place in places)
        raise UserError(
            f"the slots of {model} are of different kinds ({shapes}); choose slots whose activations all "
            "have the same number of axes"
        )


def _usual_kind(places: Sequence[Place]) -> str:
    """The kind of most of them."""
    counts = {kind: sum(place.topology == kind for place in places) for kind in TOPOLOGY_ORDER}
    return max(TOPOLOGY_ORDER, key=lambda kind: counts[kind])


def _spread(places: list[Place]) -> list[Place]:
    """At most `MOST_SLOTS` of them, evenly spaced, the last always among them."""
    count = len(places)
    if count <= MOST_SLOTS:
        return places
    return [places[((k + 1) * count) // MOST_SLOTS - 1] for k in range(MOST_SLOTS)]


def sequence_topology(model: nn.Module) -> str:
    """What an activation with three axes is: a signal [batch, channels, time] or [batch, time, features]."""
    modules = list(model.modules())
    signals = any(isinstance(m, nn.Conv1d) for m in modules)
    sequences = any(isinstance(m, _SEQUENCE_LAYERS) for m in modules)
    return "cnn" if signals and not sequences else "transformer"


def _calls(model: nn.Module, run: Callable[[], Any]) -> list[_Call]:
    ended: dict[str, _Call] = {}

    def watch(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def ends(module: nn.Module, inputs: Any, output: Any) -> None:
            before, value = ended.pop(name, None), tensor_of(output)
            shape = None if value is None else tuple(value.shape)
            dtype, times = torch.long if value is None else value.dtype, before.times if before else 0
            ended[name] = _Call(name, module, type(output).__name__, shape, dtype, times + 1)

        return ends

    with at_rest(model), ExitStack() as hooks:
        for name, module in model.named_modules():
            if name:
                hooks.enter_context(module.register_forward_hook(watch(name)))
        run()
    return list(ended.values())


def _units(model: nn.Module) -> set[str]:
    """Names of the parts between which slots are sought: layers, and blocks that are not looked into."""
    units: set[str] = set()

    def look(module: nn.Module, path: str) -> None:
        for name, child in module.named_children():
            below = f"{path}.{name}" if path else name
            listed = isinstance(module, _LISTS)
            if is_sequence(child) or isinstance(child, nn.ModuleList) or (not listed and _holds_list(child)):
                look(child, below)
            else:
                units.add(below)

    look(model, "")
    return units


def _holds_list(module: nn.Module) -> bool:
    """Whether a module is a frame around a list of blocks."""
    lists = [m for m in module.modules() if isinstance(m, _LISTS) and m is not module]
    return any(sum(has_weights(child) for child in blocks) > 1 for blocks in lists)


def has_weights(module: nn.Module) -> bool:
    """Whether a module has weights beyond those of a norm."""
    return not isinstance(module, NORMS) and any(True for _ in module.parameters())


def floating_dtype(model: nn.Module) -> torch.dtype:
    """The dtype of a model's first decimal parameter; float32 where it has none."""
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)


def trained(model: nn.Module) -> list[nn.Parameter]:
    """The parameters of a model that are not frozen."""
    return [p for p in model.parameters() if p.requires_grad]


def _block_ends(steps: Iterable[tuple[nn.Module, Place | None]]) -> list[Place]:
    """The last place before each further part with weights.

    steps, in the order of a run: a layer, and the place behind it, if there is one.
    """
    chosen: list[Place] = []
    candidate: Place | None = None
    weighted = opaque = False
    for layer, place in steps:
        heavy = has_weights(layer)
        ends = (heavy and not isinstance(layer, nn.Embedding)) or (opaque and isinstance(layer, NORMS))
        if ends and weighted and candidate is not None:
            chosen.append(candidate)
            candidate, weighted = None, False
        weighted = weighted or heavy
        if heavy:
            opaque = not type(layer).__module__.startswith("torch.nn")
        candidate = place or candidate
    return chosen


def _place(call: _Call, model: nn.Module, topology: str | None) -> Place | None:
    if (
        call.shape is None
        or call.times > 1
        or not call.dtype.is_floating_point
        or not 2 <= len(call.shape) <= 4
    ):
        return None
    shape = call.shape[1:]
    kind = {2: "mlp", 4: "cnn"}.get(len(call.shape)) or topology or sequence_topology(model)
    if kind == "cnn" and all(side == 1 for side in shape[1:]):
        return None  # a convolution over a single point
    return Place(call.name, kind, shape, call.gave == "tuple", call.dtype)


def _expanded(model: nn.Module, names: Sequence[str | int]) -> list[str]:
    """The names of slots; a list of blocks stands for each of its blocks."""
    if isinstance(names, str):
        raise UserError(f"slots is the name {names!r}; give a list of names: [{names!r}]")
    if not names:
        raise UserError("slots is empty; name at least one submodule, or leave slots out to have them found")
    modules, found = dict(model.named_modules()), list[str]()
    for name in map(str, names):
        module = modules.get(name)
        found += [f"{name}.{k}" for k in range(len(module))] if isinstance(module, nn.ModuleList) else [name]
    twice = next((name for k, name in enumerate(found) if name in found[:k]), None)
    if twice is not None:
        raise UserError(f"slots name {twice!r} twice; name every submodule once")
    return found


def _named(name: str, calls: Sequence[_Call], model: nn.Module, topology: str | None) -> Place:
    call = next((call for call in calls if call.name == name), None)
    place = None if call is None else _place(call, model, topology)
    if place is not None:
        return place
    known = list(dict(model.named_modules()))[1:]
    if name not in known:
        few = ", ".join(known[:12])
        raise UserError(f"slot {name!r} is no submodule of {type(model).__name__}; it has {few} ...")
    if call is None:
        reason = "which did not run in a forward pass"
    elif call.times > 1:
        reason = f"which runs {call.times} times in a forward pass"
    else:
        given = f"a {call.gave}" if call.shape is None else f"shape {list(call.shape)}"
        reason = f"which gives {given}"
    raise UserError(
        f"{type(model).__name__} cannot have a slot after {name!r}, {reason}; a slot needs one float tensor "
        "[batch, features], [batch, time, features] or [batch, channels, *spatial]"
    )
