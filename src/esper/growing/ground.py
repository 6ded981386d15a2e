"""What a user's model offers behind each of its places: blocks to repeat, units to add.

Everything is tried before it is offered: a block is put into its list and units are put beside a layer's own,
the model is run on two samples, and the outputs must be those that they should be. Then all is taken back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from esper.growing.batches import Judge, over_tensors, samples_in
from esper.growing.coupling import CannotWiden, Part, Reach, find_parts, new_to_new
from esper.growing.heads import Units, heads_in
from esper.growing.places import Place, tensor_of
from esper.growing.repeating import CannotRepeat, Repeat, Span, find_span, insert, touched_by
from esper.growing.undoing import at_rest, full_precision, undone
from esper.growing.units import Role, dense, units_out
from esper.growing.widening import Widening
from esper.lifecycle.actions import Blueprint
from esper.utils.errors import one_line

SAMPLES = 2  # on which everything is tried
SMALL = 0.1  # of the operations between two places: units that cost less are not what makes them wide
# By how much outputs may differ, as a share of the largest one. New units take products of other shapes, so
# that sums are rounded in another order: about 1e-6 in float32, 1e-2 in bfloat16 after a dozen layers.
TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}
WIDENINGS = {Blueprint.WIDEN_HALF: 2, Blueprint.WIDEN_FULL: 1}  # units of a layer per new unit


@dataclass(frozen=True)
class Offer:
    """What can grow at a place beside the blueprints of its kind, and what it costs."""

    span: Span | None = None
    units: Units | None = None
    parts: tuple[Part, ...] = ()  # with as many new units as there are
    touched: frozenset[int] = frozenset()  # places whose activations get wider too
    parameters: Mapping[Blueprint, int] = field(default_factory=dict)
    flops: Mapping[Blueprint, float] = field(default_factory=dict)  # of one sample's forward pass
    refused: Mapping[Blueprint, str] = field(default_factory=dict)  # why the others cannot grow there


Found = tuple[list[Place], list[Offer], float]


class Ground:
    """A model as a place to grow in. `look` has to be called again whenever the model has changed."""

    def __init__(self, model: nn.Module, judge: Judge, batch: Any, grows: bool = True):
        """batch: of validation data, on the model's device. grows: else nothing is tried and offered."""
        self.model, self.judge, self.grows = model, judge, grows
        self.batch = few_samples(batch)
        self.device = next((p.device for p in model.parameters()), torch.device("cpu"))

    def run(self) -> Tensor:
        """One pass of the model, as one row of numbers: its loss and, where they are known, its outputs."""
        judged = self.judge(self.model, self.batch)
        outputs = [] if judged.outputs is None else [judged.outputs.flatten().double()]
        return torch.cat([judged.loss.detach().double().view(1), *outputs])

    def look(self, modules: Sequence[nn.Module], places: Sequence[Place]) -> Found:
        """The places behind these modules as they are now, what each offers, and the operations of one
        sample's forward pass.

        places: as they were. A module that does not run for the two samples stays as it was, without offer.
        No hook of a seed may be attached; the generators of the caller are left as they were.
        """
        with at_rest(self.model), full_precision(self.device), torch.random.fork_rng(devices=[]):
            look = _Look(self, modules)
            offers = [look.offer(k) if self.grows else Offer() for k in range(len(modules))]
            return look.places(places), offers, look.flops

    def parts(self, offer: Offer, blueprint: Blueprint) -> list[Part]:
        """The layers of a widening, with where the new units arrive; raises CannotWiden."""
        assert offer.units is not None, "a widening was asked for where there is none"
        with at_rest(self.model), full_precision(self.device):
            return find_parts(self.model, offer.units.parts(new_units(offer.units, blueprint)), self.run)


class _Look:
    """One look at a model."""

    def __init__(self, ground: Ground, modules: Sequence[nn.Module]):
        self.ground, self.model, self.modules = ground, ground.model, modules
        self.shapes: dict[nn.Module, tuple[Any, Any]] = {}
        self.order: list[nn.Module] = []  # modules in the order in which they ended
        self.costs: dict[nn.Module, float] = {}  # of one run of a module, for one sample
        self.dtypes: dict[nn.Module, torch.dtype] = {}  # of what modules gave
        self.inserts: dict[nn.Module, bool | CannotRepeat] = {}  # by list: whether counts must follow
        self.refusals: list[str] = []  # why units of the place at hand cannot be added to
        self.clean, self.flops = self._first_pass()
        self.reach = Reach(self.model, ground.run)
        self.shared = _shared_parameters(self.model)

    def places(self, before: Sequence[Place]) -> list[Place]:
        """The places with the names and shapes of now."""
        names = {module: name for name, module in self.model.named_modules()}
        found = []
        for module, place in zip(self.modules, before, strict=True):
            shape = self.shapes.get(module, (None, None))[1]
            now = place.shape if shape is None else tuple(shape[1:])
            dtype = self.dtypes.get(module, place.dtype)
            found.append(replace(place, name=names[module], shape=now, dtype=dtype))
        return found

    def _first_pass(self) -> tuple[Tensor, float]:
        def ends(module: nn.Module, inputs: Any, named: Any, output: Any) -> None:
            given = [x for x in (*inputs, *named.values()) if isinstance(x, Tensor)]
            gave = tensor_of(output)
            shape = None if gave is None else gave.shape
            if gave is not None and gave.is_floating_point():
                self.dtypes[module] = gave.dtype
            self.shapes[module] = (given[0].shape if given else None, shape)
            self.order.append(module)

        with ExitStack() as hooks:
            for module in self.model.modules():
                hooks.enter_context(module.register_forward_hook(ends, with_kwargs=True))
            result, flops, by_name = self._counted()
        root = type(self.model).__name__
        for name, module in self.model.named_modules():
            self.costs[module] = by_name.get(f"{root}.{name}", 0.0)
        return result, flops

    def _counted(self) -> tuple[Tensor, float, dict[str, float]]:
        """A pass, and what a sample of it cost: in all, and by the names of modules."""
        samples = samples_in(self.ground.batch)
        with FlopCounterMode(display=False) as counter:
            result = self.ground.run()
        by_name = {name: sum(ops.values()) / samples for name, ops in counter.get_flop_counts().items()}
        return result, counter.get_total_flops() / samples, by_name

    def _difference(self, found: Tensor, wanted: Tensor) -> str | None:
        """How loss or outputs differ by more than rounding; None where they do not."""
        if found.shape != wanted.shape:
            return f"the model then gives {found.numel() - 1} numbers instead of {wanted.numel() - 1}"
        allowed = max((TOLERANCES.get(dtype, 0.0) for dtype in self.dtypes.values()), default=0.0)
        for what, part in (("the loss", slice(1)), ("an output", slice(1, None))):
            if found[part].numel():
                largest = float(wanted[part].abs().max())
                apart = float((found[part] - wanted[part]).abs().max())
                if not apart <= allowed * largest:
                    return f"{what} differs by {apart:.1e}, more than {allowed:.0e} of {largest:.1e}"
        return None

    def offer(self, k: int) -> Offer:
        """What can grow behind module k."""
        times = self.order.count(self.modules[k])
        if times != 1:
            reason = f"it runs {times} times in a forward pass of {SAMPLES} samples"
            return Offer(refused=dict.fromkeys((Blueprint.CLONE, *WIDENINGS), reason))
        offer = self._widening(k)
        try:
            span = self._repetition(k)
        except CannotRepeat as error:
            return replace(offer, refused={**offer.refused, Blueprint.CLONE: str(error)})
        price = sum(p.numel() for block in span.blocks for p in block.parameters())
        cost = sum(self.costs[block] for block in span.blocks)
        parameters = {**offer.parameters, Blueprint.CLONE: price}
        return replace(offer, span=span, parameters=parameters, flops={**offer.flops, Blueprint.CLONE: cost})

    # ---- repeating -------------------------------------------------------------------------------------

    def _repetition(self, k: int) -> Span:
        """What can be repeated behind module k; raises CannotRepeat."""
        span = find_span(self.model, self.modules[k], self.shapes)
        if span.container not in self.inserts:
            try:
                self.inserts[span.container] = self._try_insert(span)
            except CannotRepeat as error:
                self.inserts[span.container] = error
        counted = self.inserts[span.container]
        if isinstance(counted, CannotRepeat):
            raise counted
        return replace(span, counted=counted)

    def _try_insert(self, span: Span) -> bool:
        """Whether counts must follow where one more entry is put into a list; raises CannotRepeat.

        The wanted outputs are those of the blocks called twice in a row by a hook. One more entry then runs
        the same operations on the same numbers, so that rounding does not matter.
        """
        seed = Repeat(span)

        def run_twice(module: nn.Module, inputs: Any, named: Any, output: Any) -> Any:
            h = tensor_of(output)
            assert h is not None
            again = seed.output(h, inputs, named)
            return (again, *output[1:]) if isinstance(output, tuple) else again

        try:
            with span.blocks[-1].register_forward_hook(run_twice, with_kwargs=True):
                wanted = self.ground.run()
        except Exception as error:  # whatever the user's block raises
            raise CannotRepeat(f"it cannot be called on its own output ({one_line(error)})") from error
        reasons = []
        for counted in (False, True):
            tried, blocks, ran = replace(span, counted=counted), list(Repeat(span).blocks), set[nn.Module]()
            entries = [*(entry for entry in span.container.children() if entry in self.shapes), *blocks]
            try:
                with undone(touched_by(self.model, tried)), ExitStack() as hooks:
                    insert(self.model, tried, blocks)
                    for entry in entries:
                        hooks.enter_context(entry.register_forward_hook(lambda m, *_, ran=ran: ran.add(m)))
                    found = self.ground.run()
            except Exception as error:  # whatever the user's model raises
                reasons.append(one_line(error))
                continue
            # Blocks that begin as the identity change no output: that they run has to be seen.
            idle = "the model then leaves one out" if len(ran) < len(entries) else None
            reason = idle or self._difference(found, wanted)
            if reason is None:
                return counted
            reasons.append(reason)
        raise CannotRepeat(f"its list takes no more entries ({'; '.join(dict.fromkeys(reasons))})")

    # ---- widening --------------------------------------------------------------------------------------

    def _widening(self, k: int) -> Offer:
        """What is inside the module of the place and nobody else makes, else what is ahead of it; where that
        is but a small part of what happens there, the first layer together with its partners."""
        self.refusals = []
        run, inside = self._run_before(k), set(self.modules[k].modules())
        for modules in ([module for module in run if module in inside], run):
            best, enough = self._hidden(modules)
            if enough:
                return best
        groups = (self._coupled(layer) for layer in run if dense(layer) is not None)
        partners = (self._widened(Units(makers)) for makers in groups if len(makers) > 1)
        found = next((offer for offer in partners if offer is not None), best)
        nothing = "no layer with units of its own runs between the slot before and this one"
        reason = "; ".join(dict.fromkeys(self.refusals)) or nothing
        return replace(found, refused={b: reason for b in WIDENINGS if b not in found.parameters})

    def _hidden(self, modules: Sequence[nn.Module]) -> tuple[Offer, bool]:
        """The units of the first layer that makes its own, or else the heads of an attention; and whether
        they are more than a small part of what these modules do."""
        layers, best = [module for module in modules if dense(module) is not None], Offer()
        small = SMALL * sum(self.costs[layer] for layer in layers)
        own = (Units((layer,)) for layer in layers)
        heads = (units for module in modules for units in heads_in(module, layers))
        for units in chain(own, heads):
            best = max(best, self._widened(units) or best, key=_weight)
            if _weight(best) > small:
                return best, True
        return best, False

    def _run_before(self, k: int) -> list[nn.Module]:
        """Modules that ended after the place before this one and no later than this one, and ran once."""
        ends = {module: place for place, module in enumerate(self.order)}
        here = ends[self.modules[k]]
        earlier = [ends[m] for m in self.modules if m in ends and ends[m] < here]
        run = self.order[max(earlier, default=-1) + 1 : here + 1]
        return [module for module in dict.fromkeys(run) if self.order.count(module) == 1]

    def _coupled(self, layer: nn.Module) -> tuple[nn.Module, ...]:
        try:
            return tuple(self.reach.coupled(layer))
        except CannotWiden as error:
            self.refusals.append(str(error))
            return ()

    def _widened(self, units: Units) -> Offer | None:
        """Try to double the units; None, and the reason among `refusals`, where that is not possible."""
        try:
            return self._doubled(units)
        except (CannotWiden, ValueError) as error:
            self.refusals.append(str(error))
            return None

    def _doubled(self, units: Units) -> Offer:
        """Double the units for one pass. Raises CannotWiden where the model then gives something else, and
        ValueError for part of a group of channels."""
        count = units.count
        if any(units_out(maker) != units_out(units.makers[0]) for maker in units.makers):
            raise CannotWiden("layers whose outputs meet have different widths")
        parts = find_parts(self.model, units.parts(count), self.ground.run)
        seed = Widening(parts)
        if not self._all_trained(parts):
            raise CannotWiden("a layer that would grow is frozen, or shares its weights")
        shapes: dict[int, Any] = {}
        handles = [h for role in Role for h in seed.attach(role, lambda: 1.0)]
        handles += [
            m.register_forward_hook(lambda _m, _i, out, k=k: shapes.update({k: _shape(out)}))
            for k, m in enumerate(self.modules)
        ]
        try:
            with ExitStack() as hooks:
                for handle in handles:
                    hooks.enter_context(handle)
                result, flops, _ = self._counted()
        except Exception as error:  # whatever the user's model raises
            raise CannotWiden(f"the model takes no more units there ({one_line(error)})") from error
        reason = self._difference(result, self.clean)
        if reason is not None:
            raise CannotWiden(f"with new units that nothing reads yet, {reason}")
        size, inner = sum(p.numel() for p in seed.parameters()), new_to_new(parts, parts)
        sizes = {b: new_units(units, b) for b in WIDENINGS if _whole(parts, units, b)}
        touched = {k for k, shape in shapes.items() if shape != self.shapes[self.modules[k]][1]}
        return Offer(
            units=units,
            parts=tuple(parts),
            touched=frozenset(touched),
            parameters={b: size * n // count + inner * n * n // count**2 for b, n in sizes.items()},
            flops={b: (flops - self.flops) * n / count for b, n in sizes.items()},
        )

    def _all_trained(self, parts: Sequence[Part]) -> bool:
        """Whether every parameter of these layers is trained, and belongs to one layer alone."""
        own = [p for part in parts if part.role is not Role.COUNTER for p in part.layer.parameters()]
        return all(p.requires_grad and p not in self.shared for p in own)


def _weight(offer: Offer) -> float:
    """What it costs to double the units of an offer."""
    return offer.flops.get(Blueprint.WIDEN_FULL, 0.0)


def new_units(units: Units, blueprint: Blueprint) -> int:
    """How many units a widening adds."""
    return max(1, units.count // WIDENINGS[blueprint])


def _whole(parts: Sequence[Part], units: Units, blueprint: Blueprint) -> bool:
    """Whether the norms between the layers then have whole groups."""
    share = WIDENINGS[blueprint]
    norms = [part.layer for part in parts if isinstance(part.layer, nn.GroupNorm)]
    return units.count % share == 0 and all(norm.num_groups % share == 0 for norm in norms)


def _shape(output: Any) -> Any:
    found = tensor_of(output)
    return None if found is None else found.shape


def _shared_parameters(model: nn.Module) -> set[nn.Parameter]:
    """Parameters that stand in more than one place."""
    seen, twice = set[nn.Parameter](), set[nn.Parameter]()
    for _, parameter in model.named_parameters(remove_duplicate=False):
        (twice if parameter in seen else seen).add(parameter)
    return twice


def few_samples(batch: Any) -> Any:
    """The first samples of a batch of any structure."""
    samples = samples_in(batch)
    return over_tensors(batch, lambda x: x[:SAMPLES] if x.ndim and len(x) == samples else x)
