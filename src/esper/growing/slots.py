"""Find the submodules of a model after which seeds may grow, by running it once.

A seed hangs on a submodule by a forward hook and changes its output. The model is neither traced nor split,
so skip connections, several inputs, tuples as outputs and shared weights are no obstacle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from esper.utils.errors import UserError

SlotNames = Sequence[str | int]  # of submodules
MOST_SLOTS = 8  # that are chosen where none are named; every seed in one costs a validation pass an epoch
TOPOLOGY_ORDER = ("cnn", "transformer", "mlp")  # which kind of slot wins a tie
NORMS = (nn.LayerNorm, nn.GroupNorm, _BatchNorm, nn.RMSNorm)
_LISTS = (nn.ModuleList, nn.Sequential)
_SEQUENCE_LAYERS = (nn.Embedding, nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.LayerNorm)


@dataclass(frozen=True)
class SlotSpec:
    """A submodule whose output a seed may change."""

    name: str
    topology: str
    shape: tuple[int, ...]  # of one sample
    in_tuple: bool = False  # whether the activation is the first value of a tuple
    dtype: torch.dtype = torch.float32  # of the activation

    @property
    def width(self) -> int:
        """Channels or features."""
        return self.shape[0] if self.topology == "cnn" else self.shape[-1]

    @property
    def spatial_dims(self) -> int:
        """Spatial axes: 0 except in a cnn."""
        return len(self.shape) - 1 if self.topology == "cnn" else 0


@dataclass
class ModuleCall:
    """A module that ran. Its activation is described, not held: all together would take much memory."""

    name: str
    given: tuple[int, ...] | None  # the shape of its first tensor, None where there is none
    shape: tuple[int, ...] | None  # of its activation
    dtype: torch.dtype  # of its activation
    in_tuple: bool  # whether the activation is the first value of a tuple
    times: int  # it ran in one forward pass


@contextmanager
def in_eval_mode(*models: nn.Module) -> Iterator[None]:
    """Put all modules of these models into eval mode; afterwards each has its own mode again.

    `model.train()` would not do: it also changes the submodules that were frozen in eval mode.
    """
    modes = {module: module.training for model in models for module in model.modules()}
    for model in models:
        model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


def main_tensor(output: Any) -> Tensor | None:
    """Return the activation in a module's output: a tensor, or the first of a tuple."""
    if type(output) is tuple and output:
        output = output[0]
    return output if isinstance(output, Tensor) else None


def is_sequence(module: nn.Module) -> bool:
    """Tell whether a module runs its children one after another and does nothing else."""
    return type(module).forward is nn.Sequential.forward


def has_weights(module: nn.Module) -> bool:
    """Tell whether a module has weights beyond those of a norm."""
    return not isinstance(module, NORMS) and any(True for _ in module.parameters())


def floating_dtype(model: nn.Module) -> torch.dtype:
    """Return the dtype of a model's first floating-point parameter; float32 where it has none."""
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)


def trainable_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of a model that are not frozen."""
    return [p for p in model.parameters() if p.requires_grad]


def find_slots(model: nn.Module, run: Callable[[], Any], names: SlotNames | None = None) -> list[SlotSpec]:
    """Return the slots after the named submodules, or at the ends of the model's blocks, in execution order.

    run: one forward pass of the model. All slots have one topology; the name of a list stands for each of its
    blocks. Raises a UserError for a submodule that is missing, did not run, or has no output for a seed.
    """
    calls = record_calls(model, run)
    if names is not None:
        slots = [_named_slot(name, calls, model) for name in _expand_lists(model, names)]
        if len({slot.topology for slot in slots}) > 1:
            shapes = ", ".join(f"{slot.name} {list(slot.shape)}" for slot in slots)
            raise UserError(
                f"the slots of {type(model).__name__} are of different kinds ({shapes}); choose slots whose "
                "activations all have the same number of axes"
            )
        order = [call.name for call in calls.values()]
        return sorted(slots, key=lambda slot: order.index(slot.name))
    candidates = _candidate_modules(model)
    steps = [(m, _slot_after(call, model)) for m, call in calls.items() if call.name in candidates]
    slots = _block_ends(steps)
    if not slots:
        raise UserError(
            f"{type(model).__name__} has no submodule after which something could grow; name one with "
            "slots=[...]: it must run once in a step and give one float tensor [batch, features], "
            "[batch, time, features] or [batch, channels, *spatial]"
        )
    counts = {kind: sum(slot.topology == kind for slot in slots) for kind in TOPOLOGY_ORDER}
    chosen = max(TOPOLOGY_ORDER, key=lambda kind: counts[kind])
    slots = [slot for slot in slots if slot.topology == chosen]
    if len(slots) <= MOST_SLOTS:
        return slots
    # Evenly spaced, the last one always among them.
    return [slots[((k + 1) * len(slots)) // MOST_SLOTS - 1] for k in range(MOST_SLOTS)]


def record_calls(model: nn.Module, run: Callable[[], Any]) -> dict[nn.Module, ModuleCall]:
    """Return the modules that run, in the order in which they end."""
    names = {module: name for name, module in model.named_modules()}
    ended: dict[nn.Module, ModuleCall] = {}

    def record(module: nn.Module, inputs: Any, named: Any, output: Any) -> None:
        before, value = ended.pop(module, None), main_tensor(output)
        given = next((tuple(x.shape) for x in (*inputs, *named.values()) if isinstance(x, Tensor)), None)
        shape, dtype = (None, torch.long) if value is None else (tuple(value.shape), value.dtype)
        times = before.times + 1 if before else 1
        ended[module] = ModuleCall(names[module], given, shape, dtype, type(output) is tuple, times)

    with in_eval_mode(model), torch.no_grad(), ExitStack() as hooks:
        for module in names:
            hooks.enter_context(module.register_forward_hook(record, with_kwargs=True))
        run()
    return ended


def _candidate_modules(model: nn.Module) -> set[str]:
    """Return the names of the layers and blocks between which slots are sought."""
    found: set[str] = set()

    def collect(module: nn.Module, path: str) -> None:
        for name, child in module.named_children():
            below = f"{path}.{name}" if path else name
            lists = [m for m in child.modules() if isinstance(m, _LISTS) and m is not child]
            # An entry of a list is a block, whatever it contains; any other module may be a trunk of blocks.
            trunk = not isinstance(module, _LISTS) and any(sum(map(has_weights, m)) > 1 for m in lists)
            if is_sequence(child) or isinstance(child, nn.ModuleList) or trunk:
                collect(child, below)
            else:
                found.add(below)

    collect(model, "")
    return found


def _block_ends(steps: Iterable[tuple[nn.Module, SlotSpec | None]]) -> list[SlotSpec]:
    """Return the last slot before each further module with weights; steps: modules in order, with slots."""
    chosen: list[SlotSpec] = []
    candidate: SlotSpec | None = None
    weighted = opaque = False  # whether the block so far has weights; whether its last layer is not torch's
    for layer, slot in steps:
        heavy = has_weights(layer)
        ends = (heavy and not isinstance(layer, nn.Embedding)) or (opaque and isinstance(layer, NORMS))
        if ends and weighted and candidate is not None:
            chosen.append(candidate)
            candidate, weighted = None, False
        weighted = weighted or heavy
        if heavy:
            opaque = not type(layer).__module__.startswith("torch.nn")
        candidate = slot or candidate
    return chosen


def _slot_after(call: ModuleCall, model: nn.Module) -> SlotSpec | None:
    shape = call.shape or ()
    if call.times > 1 or not call.dtype.is_floating_point or not 2 <= len(shape) <= 4:
        return None
    kind = {2: "mlp", 4: "cnn"}.get(len(shape)) or _sequence_topology(model)
    if kind == "cnn" and all(side == 1 for side in shape[2:]):
        return None  # a convolution over a single point
    return SlotSpec(call.name, kind, shape[1:], call.in_tuple, call.dtype)


def _sequence_topology(model: nn.Module) -> str:
    """Tell whether three axes are a signal [batch, channels, time] or a sequence [batch, time, features]."""
    modules = list(model.modules())
    signals = any(isinstance(m, nn.Conv1d) for m in modules)
    sequences = any(isinstance(m, _SEQUENCE_LAYERS) for m in modules)
    return "cnn" if signals and not sequences else "transformer"


def _expand_lists(model: nn.Module, names: SlotNames) -> list[str]:
    """Return the names of slots, with the name of a list replaced by those of its blocks."""
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


def _named_slot(name: str, calls: Mapping[nn.Module, ModuleCall], model: nn.Module) -> SlotSpec:
    call = next((call for call in calls.values() if call.name == name), None)
    slot = None if call is None else _slot_after(call, model)
    if slot is not None:
        return slot
    known = list(dict(model.named_modules()))[1:]
    if name not in known:
        few = ", ".join(known[:12])
        raise UserError(f"slot {name!r} is no submodule of {type(model).__name__}; it has {few} ...")
    times = 0 if call is None else call.times
    shape = None if call is None or call.shape is None else list(call.shape)
    raise UserError(
        f"{type(model).__name__} cannot have a slot after {name!r}, which runs {times} times in a pass and "
        f"gives a tensor of shape {shape}; it must run once and give one float tensor [batch, features], "
        "[batch, time, features] or [batch, channels, *spatial]"
    )
