"""Find which blocks can be repeated and which layers widened, by trial forward passes.

Everything is tried before it is offered: a block is inserted into its list, or units are added to layers, the
model is run on two samples, and its outputs must be as expected. Then all changes are taken back.

One pass with marks tells where the units of a layer go: it gets new units that hold NaN, and whatever these
reach is marked. The marks tell where in the input of each consumer the new units arrive, whatever the model's
own code does between (activations, pooling, flattening, concatenation). Code that mixes units (a norm over
all channels, a softmax) marks others too, and code that takes no more units (a residual connection) raises:
both are refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr
from dataclasses import dataclass, field, replace
from io import StringIO
from typing import Any

import torch
from torch import Tensor, nn

from esper.growing.criterion import Criterion
from esper.growing.data import count_samples, map_batch
from esper.growing.slots import ModuleCall, SlotSpec, in_eval_mode, main_tensor, record_calls
from esper.growing.surgery.insertion import (
    BlockSpan,
    CannotRepeat,
    RepeatedBlocks,
    Undo,
    configs_of,
    find_span,
    insert_blocks,
)
from esper.growing.surgery.widening import (
    CannotWiden,
    Role,
    WidenedLayer,
    Widening,
    is_dense,
    layer_kind,
    merge_units,
    other_positions,
    units_in,
    units_out,
)
from esper.lifecycle.actions import Blueprint
from esper.utils.errors import one_line
from esper.utils.flops import flop_counter

SAMPLES = 2  # on which everything is tried
# Share of the FLOPs between two slots. A layer whose units cost less, as in a squeeze-and-excite, is not what
# makes the model narrow there, so that the search goes on.
MIN_FLOPS_SHARE = 0.1
# The tolerance of outputs, as a share of the largest one. New units change the shapes of products, so that
# sums are rounded in another order: about 1e-6 in float32, 1e-2 in bfloat16 after a dozen layers.
TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}
# On a GPU float32 may be TF32, which has the precision of float16: 5e-4 in a GPT of width 256.
TF32_TOLERANCE = 1e-2
UNITS_PER_NEW_UNIT = {Blueprint.WIDEN_HALF: 2, Blueprint.WIDEN_FULL: 1}


@dataclass(frozen=True)
class SlotOptions:
    """What can grow at a slot beside the blueprints of its topology, and what it costs."""

    span: BlockSpan | None = None
    widened: tuple[WidenedLayer, ...] = ()  # by a doubling of units; the layer that computes them is last
    also_widened: frozenset[int] = frozenset()  # slots whose activations get wider too
    parameters: Mapping[Blueprint, int] = field(default_factory=dict)
    flops: Mapping[Blueprint, float] = field(default_factory=dict)  # of one sample's forward pass
    refused: Mapping[Blueprint, str] = field(default_factory=dict)  # why the others cannot grow there


class GrowthProbe:
    """Runs trials on a model; call `scan` again whenever the model has changed."""

    def __init__(self, model: nn.Module, criterion: Criterion, batch: Any, enabled: bool = True):
        """Keep a batch of a few validation samples; enabled: else nothing is tried or offered."""
        self.model, self.criterion, self.enabled, self.batch = model, criterion, enabled, batch
        self.device = next((p.device for p in model.parameters()), torch.device("cpu"))

    def run(self) -> Tensor:
        """Run the model once; return its loss and, where they are known, its outputs.  # [1 + outputs]"""
        result = self.criterion(self.model, self.batch)
        outputs = [] if result.outputs is None else [result.outputs.flatten().double()]
        return torch.cat([result.loss.detach().double().view(1), *outputs])

    def scan(
        self, modules: Sequence[nn.Module], slots: Sequence[SlotSpec]
    ) -> tuple[list[SlotSpec], list[SlotOptions], float]:
        """Return the slots after these modules as they are now, what each offers, and the FLOPs of one
        sample's forward pass.

        slots: as they were. A module that does not run for the two samples keeps its slot, without options.
        No hook of a seed may be attached. The caller's random generators are left as they were.
        """
        self.modules = modules
        self._inserts: dict[nn.Module, str | None] = {}  # by container: why it takes no more entries
        with self._trial_passes(), torch.random.fork_rng(devices=[]):
            self.calls, self.outputs, self.flops, by_name = self._run_recorded()
            root, every = type(self.model).__name__, self.model.named_modules()
            self.costs = {module: by_name.get(f"{root}.{name}", 0.0) for name, module in every}  # FLOPs
            uses = Counter(p for _, p in self.model.named_parameters(remove_duplicate=False))
            self.shared = {p for p, times in uses.items() if times > 1}
            options = [self._options(k) if self.enabled else SlotOptions() for k in range(len(modules))]
        names = {module: name for name, module in self.model.named_modules()}
        found = []
        for module, slot in zip(modules, slots, strict=True):
            slot, call = replace(slot, name=names[module]), self.calls.get(module)
            if call is not None and call.shape is not None:
                slot = replace(slot, shape=call.shape[1:], dtype=call.dtype)
            found.append(slot)
        return found, options, self.flops

    def trace(self, options: SlotOptions, blueprint: Blueprint) -> list[WidenedLayer]:
        """Return the layers of a widening, with the positions of new units; raises CannotWiden."""
        producer = options.widened[-1].layer
        with self._trial_passes():
            extra = units_out(producer) // UNITS_PER_NEW_UNIT[blueprint]
            return trace_units(self.model, producer, extra, self.run)

    @contextmanager
    def _trial_passes(self) -> Iterator[None]:
        """Run without dropout, gradients and autocast, so that equivalent passes differ by rounding only."""
        with in_eval_mode(self.model), torch.no_grad(), ExitStack() as stack:
            for kind in {"cpu", self.device.type}:
                stack.enter_context(torch.autocast(kind, enabled=False))
            yield

    def _run_recorded(self) -> tuple[dict[nn.Module, ModuleCall], Tensor, float, dict[str, float]]:
        """Run the model; return its calls, its outputs, and a sample's FLOPs, in all and by module name."""
        samples, outputs = count_samples(self.batch), list[Tensor]()
        with flop_counter() as counter:
            calls = record_calls(self.model, lambda: outputs.append(self.run()))
        by_name = {name: sum(ops.values()) / samples for name, ops in counter.get_flop_counts().items()}
        return calls, outputs[0], counter.get_total_flops() / samples, by_name

    def _options(self, k: int) -> SlotOptions:
        """Return what can grow behind module k."""
        call = self.calls.get(self.modules[k])
        times = 0 if call is None else call.times
        if times != 1:
            idle = f"it runs {times} times in a forward pass of {SAMPLES} samples"
            return SlotOptions(refused=dict.fromkeys((Blueprint.CLONE, *UNITS_PER_NEW_UNIT), idle))
        options = self._widening_options(k)
        try:
            span = find_span(self.model, self.modules[k], self.calls)
            if span.container not in self._inserts:
                self._inserts[span.container] = self._try_insert(span)
            reason = self._inserts[span.container]
        except CannotRepeat as error:
            reason = str(error)
        if reason is not None:
            return replace(options, refused={**options.refused, Blueprint.CLONE: reason})
        size = sum(p.numel() for block in span.blocks for p in block.parameters())
        cost = sum(self.costs[block] for block in span.blocks)
        parameters = {**options.parameters, Blueprint.CLONE: size}
        flops = {**options.flops, Blueprint.CLONE: cost}
        return replace(options, span=span, parameters=parameters, flops=flops)

    def _difference(self, found: Tensor, wanted: Tensor) -> str | None:
        """Say how loss or outputs differ by more than rounding; None where they do not."""
        if found.shape != wanted.shape:
            return f"the model then gives {found.numel() - 1} numbers instead of {wanted.numel() - 1}"
        allowed = max((TOLERANCES.get(call.dtype, 0.0) for call in self.calls.values()), default=0.0)
        if found.is_cuda and allowed == TOLERANCES[torch.float32]:
            allowed = TF32_TOLERANCE
        for what, part in (("the loss", slice(1)), ("an output", slice(1, None))):
            if found[part].numel():
                largest = float(wanted[part].abs().max())
                apart = float((found[part] - wanted[part]).abs().max())
                if not apart <= allowed * largest:
                    return f"{what} differs by {apart:.1e}, more than {allowed:.0e} of {largest:.1e}"
        return None

    # ---- repeating -------------------------------------------------------------------------------------

    def _try_insert(self, span: BlockSpan) -> str | None:
        """Return why a list takes no more entries; None where it does.

        The expected outputs are those of the blocks called twice in a row by a hook. One more entry then runs
        the same operations on the same numbers, so that rounding does not matter.
        """
        seed = RepeatedBlocks(span)

        def run_twice(module: nn.Module, inputs: Any, named: Any, output: Any) -> Any:
            again = seed(main_tensor(output), inputs, named)
            return (again, *output[1:]) if isinstance(output, tuple) else again

        try:
            with span.blocks[-1].register_forward_hook(run_twice, with_kwargs=True):
                wanted = self.run()
        except Exception as error:  # whatever the user's block raises
            return f"it cannot be called on its own output ({one_line(error)})"
        blocks, ran = list(RepeatedBlocks(span).blocks), set[nn.Module]()
        entries = [*(entry for entry in span.container.children() if entry in self.calls), *blocks]
        try:
            with ExitStack() as stack:
                stack.callback(Undo([*configs_of(self.model), *span.container.modules()]))
                insert_blocks(self.model, span, blocks)
                for entry in entries:
                    stack.enter_context(entry.register_forward_hook(lambda m, *_: ran.add(m)))
                found = self.run()
        except Exception as error:  # whatever the user's model raises
            return f"its list takes no more entries ({one_line(error)})"
        # Equal outputs do not show that a block runs, since one that begins as the identity changes none.
        idle = "the model then leaves one out" if len(ran) < len(entries) else None
        reason = idle or self._difference(found, wanted)
        return None if reason is None else f"its list takes no more entries ({reason})"

    # ---- widening --------------------------------------------------------------------------------------

    def _widening_options(self, k: int) -> SlotOptions:
        """Return the layer to widen at slot k: the first whose units are more than a small part of the
        computation, inside of its module or else since the slot before; where there is none, the best one."""
        run, inside = self._modules_before(k), set(self.modules[k].modules())
        best, refusals = SlotOptions(), list[str]()
        for modules in ([module for module in run if module in inside], run):
            layers = [module for module in modules if is_dense(module)]
            small = MIN_FLOPS_SHARE * sum(self.costs[layer] for layer in layers)
            for layer in layers:
                try:
                    best = max(best, self._double(layer), key=_doubling_flops)
                except (CannotWiden, ValueError) as error:
                    refusals.append(str(error))
                if _doubling_flops(best) > small:
                    return best
        nothing = "no layer with units of its own runs between the slot before and this one"
        reason = "; ".join(dict.fromkeys(refusals)) or nothing
        return replace(best, refused={b: reason for b in UNITS_PER_NEW_UNIT if b not in best.parameters})

    def _modules_before(self, k: int) -> list[nn.Module]:
        """Return the modules that ran once and ended after the slot before k, no later than k."""
        order = list(self.calls)
        here = order.index(self.modules[k])
        earlier = [order.index(m) for m in self.modules if m in order[:here]]
        run = order[max(earlier, default=-1) + 1 : here + 1]
        return [module for module in run if self.calls[module].times == 1]

    def _double(self, producer: nn.Module) -> SlotOptions:
        """Double the units of a layer for one pass.

        Raises CannotWiden where the outputs then differ, and ValueError for part of a group of channels.
        """
        count = units_out(producer)
        widened = trace_units(self.model, producer, count, self.run)
        seed = Widening(widened)
        own = [p for each in widened for p in each.layer.parameters()]
        if not all(p.requires_grad and p not in self.shared for p in own):
            raise CannotWiden("a layer that would grow is frozen, or shares its weights")
        try:
            with ExitStack() as hooks:
                for handle in (handle for role in Role for handle in seed.attach(role, lambda: 1.0)):
                    hooks.enter_context(handle)
                calls, outputs, flops, _ = self._run_recorded()
        except Exception as error:  # whatever the user's model raises
            raise CannotWiden(f"the model takes no more units there ({one_line(error)})") from error
        reason = self._difference(outputs, self.outputs)
        if reason is not None:
            raise CannotWiden(f"with new units that nothing reads yet, {reason}")
        size = sum(p.numel() for p in seed.parameters())
        # One new unit for every n old ones: whole units, and whole groups of every norm.
        sizes = [count, *(w.layer.num_groups for w in widened if isinstance(w.layer, nn.GroupNorm))]
        whole = {b: n for b, n in UNITS_PER_NEW_UNIT.items() if all(size % n == 0 for size in sizes)}
        return SlotOptions(
            widened=tuple(widened),
            also_widened=frozenset(
                k for k, m in enumerate(self.modules) if m in calls and calls[m].shape != self.calls[m].shape
            ),
            parameters={b: size // divisor for b, divisor in whole.items()},
            flops={b: (flops - self.flops) / divisor for b, divisor in whole.items()},
        )


def _doubling_flops(options: SlotOptions) -> float:
    return options.flops.get(Blueprint.WIDEN_FULL, 0.0)


def first_samples(batch: Any) -> Any:
    """Return the first samples of a batch of any structure."""
    samples = count_samples(batch)
    return map_batch(batch, lambda x: x[:SAMPLES] if x.ndim and len(x) == samples else x)


# ---- where units go ------------------------------------------------------------------------------------


def trace_units(
    model: nn.Module, producer: nn.Module, extra_units: int, run: Callable[[], Tensor]
) -> list[WidenedLayer]:
    """Return all layers that grow when a layer gets more units, by one pass with marked units.

    Consumers come first, then channelwise layers, then the producer. Raises CannotWiden.
    """
    found: dict[nn.Module, WidenedLayer] = {}
    kinds = {layer: kind for layer in model.modules() if (kind := layer_kind(layer)) is not None}
    given = WidenedLayer(producer, Role.PRODUCER, kinds[producer].axis, extra_units)

    def before(layer: nn.Module, inputs: Any) -> Any:
        """Note which inputs are marked, and take them out again."""
        if not inputs or not isinstance(inputs[0], Tensor):
            return None
        x, axis = inputs[0], kinds[layer].axis
        marked = x.isnan().movedim(axis % x.ndim, 0).flatten(1).any(1)  # [units]
        extra = x.shape[axis] - units_in(layer)
        if extra == 0 and not marked.any():
            return None
        positions = marked.nonzero().flatten()
        if extra <= 0 or len(positions) != extra or layer in found:
            raise CannotWiden(f"units are mixed before {type(layer).__name__}")
        role = Role.CONSUMER if is_dense(layer) else Role.CHANNELWISE
        last = bool(positions[0] == x.shape[axis] - extra)
        found[layer] = WidenedLayer(layer, role, axis, extra, None if last else positions)
        return (x.index_select(axis, other_positions(positions, x.shape[axis])), *inputs[1:])

    def after(layer: nn.Module, inputs: Any, output: Any) -> Tensor | None:
        """Add marked units to the output."""
        each = given if layer is producer else found.get(layer)
        if each is None or each.role is Role.CONSUMER:
            return None
        shape = list(output.shape)
        shape[each.axis] = each.extra
        return merge_units(output, output.new_full(shape, torch.nan), each.axis, each.positions)

    def refuse(layer: nn.Module, inputs: Any) -> None:
        if any(isinstance(x, Tensor) and bool(x.isnan().any()) for x in inputs):
            raise CannotWiden(f"{type(layer).__name__} takes no more units")

    with ExitStack() as stack:
        for layer in model.modules():
            if layer in kinds:
                stack.enter_context(layer.register_forward_pre_hook(before))
                stack.enter_context(layer.register_forward_hook(after))
            elif layer._parameters:
                stack.enter_context(layer.register_forward_pre_hook(refuse))
        stack.enter_context(redirect_stderr(StringIO()))  # where a traced module prints what it raises
        try:
            outputs = run()
        except CannotWiden:
            raise
        except Exception as error:  # whatever the user's forward raises about a shape
            raise CannotWiden(f"the model takes no more units there ({one_line(error)})") from error
    if not bool(outputs.isfinite().all()):
        raise CannotWiden("units reach the output of the model")
    widened = sorted(found.values(), key=lambda each: each.role is Role.CHANNELWISE)
    if not widened or widened[0].role is not Role.CONSUMER:
        raise CannotWiden("nothing reads these units")
    return [*widened, given]
