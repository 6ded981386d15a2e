"""A user's model with seeds attached to its submodules by hooks, and folds that make them part of it.

A fold changes the model itself: one more block in a list, wider layers, or a plain module behind another.
`reset` takes all folds back, so that a model can return to an earlier state by doing some of them again.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from esper.growing.slots import SlotSpec, trainable_parameters
from esper.growing.surgery.insertion import (
    RepeatedBlocks,
    Undo,
    configs_of,
    insert_blocks,
    install_graft,
    trace_graft,
)
from esper.growing.surgery.probe import GrowthProbe, SlotOptions
from esper.growing.surgery.widening import (
    CannotWiden,
    GrownParameter,
    Role,
    WidenedLayer,
    Widening,
    added_parameters,
    units_out,
)
from esper.lifecycle.actions import GROWTH_BLUEPRINTS, Blend, Blueprint
from esper.population.blueprints import BlendGate, build_blueprint
from esper.population.extract import AddGraft, GateGraft, Grafted, MultiplyGraft
from esper.population.metrics import EXPLODING_NORM, VANISHING_NORM
from esper.utils.errors import UserError


class LiveSlot(nn.Module):
    """A forward hook on a submodule. Without a seed, or at alpha 0, it leaves the output as it is."""

    def __init__(self, spec: SlotSpec):
        super().__init__()
        self.spec = spec
        self.blueprint = -1
        self.seed: nn.Module | None = None
        self.gate: nn.Module | None = None
        self.blend = Blend.ADD
        self.alpha = 0.0
        self.folds_before = 0  # folds that the model had when the seed was planted
        self.also_widened: frozenset[int] = frozenset()  # slots whose activations the seed makes wider

    def set_seed(self, blueprint: int, seed: nn.Module, gate: nn.Module | None = None) -> None:
        """Put a seed into the slot, at alpha 0."""
        self.seed, self.gate, self.blueprint, self.alpha = seed, gate, blueprint, 0.0

    def clear(self) -> None:
        """Remove the seed."""
        self.seed = self.gate = None
        self.blueprint, self.alpha, self.also_widened = -1, 0.0, frozenset()

    def graft(self) -> Grafted:
        """Return a module that changes an activation as the slot does now."""
        assert self.seed is not None, "an empty slot has nothing to graft"
        if self.blend is Blend.GATE:
            assert self.gate is not None, "a seed comes with its gate"
            return GateGraft(self.seed, self.alpha, self.gate)
        return (MultiplyGraft if self.blend is Blend.MULTIPLY else AddGraft)(self.seed, self.alpha)

    def hook(self, module: nn.Module, inputs: Any, named: Any, output: Any) -> Any:
        """Change the output of the submodule; None, above all at alpha 0, leaves it as it is."""
        if self.seed is None or self.alpha == 0.0 or isinstance(self.seed, Widening):
            return None
        h = output[0] if self.spec.in_tuple else output
        if isinstance(self.seed, RepeatedBlocks):
            # At alpha 1, lerp gives the second tensor to the bit: a fold changes nothing in any dtype.
            result = torch.lerp(h, self.seed(h, inputs, named).to(h.dtype), self.alpha)
        else:
            result = self.graft()(h)
        return (result, *output[1:]) if self.spec.in_tuple else result

    @contextmanager
    def at_alpha(self, alpha: float) -> Iterator[None]:
        """Set another alpha for a while."""
        before, self.alpha = self.alpha, alpha
        try:
            yield
        finally:
            self.alpha = before

    def gradient_stats(self, device: torch.device) -> Tensor:
        """Return norm, vanishing and exploding share of the gradients, NaN without any.  # → [3]"""
        grads = [p.grad for p in self.seed.parameters() if p.grad is not None] if self.seed else []
        if not grads:
            return torch.full((3,), float("nan"), device=device)
        norms = torch.stack([g.norm() for g in grads]).to(device, torch.float32)
        vanishing = (norms < VANISHING_NORM).float().mean()
        exploding = (~(norms <= EXPLODING_NORM)).float().mean()
        return torch.stack([norms.square().sum().sqrt(), vanishing, exploding])


@dataclass
class Fold:
    """A seed that has become part of its model."""

    slot: int
    blueprint: int
    blend: Blend
    folds_before: int  # folds that there were when it was planted
    description: str
    parameters: int = 0  # that it added to the model
    grown: list[GrownParameter] = field(default_factory=list)
    moved: list[tuple[nn.Parameter, nn.Parameter]] = field(default_factory=list)  # of the seed → of the model

    @property
    def code(self) -> list[int]:
        """The numbers by which it can be done again."""
        return [self.slot, self.blueprint, int(self.blend), self.folds_before]


class LiveModel:
    """A model with its slots: what can grow in each, the hooks of seeds, and folds."""

    def __init__(self, model: nn.Module, specs: list[SlotSpec], probe: GrowthProbe):
        self.model, self.probe = model, probe
        self.names = [spec.name for spec in specs]  # as the user knows them
        self.topology = specs[0].topology
        self.modules = [model.get_submodule(spec.name) for spec in specs]  # that the slots hang on
        self.slots = [LiveSlot(spec) for spec in specs]
        self._given_modules = list(self.modules)
        self._restore_given = Undo([*model.modules(), *configs_of(model)])
        self.folds: list[Fold] = []
        self.frozen = not trainable_parameters(model)
        self.host_parameters = max(1, self.count_model_parameters())  # of the model as it was given
        self.changed = True  # whether layers or lists of the model changed since the latest scan
        self._options: list[SlotOptions] = []
        self._flops = 0.0
        self._handles: list[RemovableHandle] = []
        self._scan()

    @property
    def options(self) -> list[SlotOptions]:
        """What can grow in each slot beside the blueprints of its topology."""
        self._scan()
        return self._options

    @property
    def specs(self) -> list[SlotSpec]:
        """The slots in the model as it is now."""
        self._scan()
        return [slot.spec for slot in self.slots]

    @property
    def flops(self) -> float:
        """FLOPs of one sample's forward pass through the model without seeds.

        Torch counts products and convolutions. A model that has neither counts a multiply-add for each of its
        parameters: costs are compared with those of the model as it was given, which must not be 0.
        """
        self._scan()
        return self._flops or 2.0 * max(1, self.count_model_parameters())

    def _scan(self) -> None:
        """Find out what the model offers, if it has changed since the last time."""
        if not self.changed:
            return
        self.changed = False
        self.detach()
        specs, self._options, self._flops = self.probe.scan(self.modules, [slot.spec for slot in self.slots])
        for slot, spec in zip(self.slots, specs, strict=True):
            slot.spec = spec
        self.attach()

    # ---- hooks -----------------------------------------------------------------------------------------

    def attach(self) -> None:
        """Attach the hooks of all slots and seeds."""
        self.detach()
        # Hooks run in the order of registration: a layer that reads the new units of one slot and computes
        # those of another must read first.
        for role in Role:
            for slot in self.slots:
                if isinstance(slot.seed, Widening):
                    self._handles += slot.seed.attach(role, partial(getattr, slot, "alpha"))
        for module, slot in zip(self.modules, self.slots, strict=True):
            self._handles.append(module.register_forward_hook(slot.hook, with_kwargs=True))

    def detach(self) -> None:
        """Remove all hooks from the model."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def plant(self, k: int, blueprint: int, device: torch.device, seed: int) -> None:
        """Plant a seed in slot k; its weights are drawn from `seed`, and the caller's generator is kept."""
        slot, options, spec = self.slots[k], self.options[k], self.slots[k].spec
        self.detach()
        with torch.random.fork_rng(devices=[]):
            # Not torch.manual_seed, which seeds the generators of GPUs too: weights are drawn on the CPU.
            torch.default_generator.manual_seed(seed)
            if blueprint == Blueprint.CLONE:
                assert options.span is not None, "a clone was planted where nothing can be repeated"
                slot.set_seed(blueprint, RepeatedBlocks(options.span))
            elif blueprint in GROWTH_BLUEPRINTS:
                slot.set_seed(blueprint, Widening(self._trace(k, Blueprint(blueprint))))
                slot.also_widened = options.also_widened
            else:
                # Drawn in float32, so that the weights are the same in any dtype.
                body = build_blueprint(blueprint, spec.topology, spec.width, spec.spatial_dims)
                gate = BlendGate(spec.width, spec.spatial_dims)
                slot.set_seed(blueprint, body.to(device, spec.dtype), gate.to(device, spec.dtype))
                slot.train(self.modules[k].training)  # a clone or wider layer has the modes of its origin
        slot.folds_before = len(self.folds)
        self.attach()

    def _trace(self, k: int, blueprint: Blueprint) -> list[WidenedLayer]:
        """Return the layers of a widening of slot k; raises a UserError where they no longer take it."""
        try:
            return self.probe.trace(self.options[k], blueprint)
        except CannotWiden as error:
            raise UserError(
                f"the layers ahead of slot {self.names[k]!r} could get wider when the run began and cannot "
                f"now ({error}): the model computes something else than then, or gives NaN; name other "
                "slots, or blueprints without WIDEN_HALF and WIDEN_FULL"
            ) from error

    def clear(self, k: int) -> None:
        """Remove the seed of slot k."""
        self.slots[k].clear()
        self.attach()

    # ---- what can grow ---------------------------------------------------------------------------------

    def can_grow(self, k: int, blueprint: Blueprint) -> bool:
        """Tell whether a clone or widening can be planted in slot k now."""
        options = self.options[k]
        if blueprint not in options.parameters or self.is_widened_elsewhere(k):
            return False
        if blueprint == Blueprint.CLONE:
            return True
        others = [slot for j, slot in enumerate(self.slots) if j != k and slot.seed is not None]
        if any(self.slots[j] in others for j in options.also_widened):
            return False
        # Two widenings can share a layer that one adds inputs to and the other outputs, all of them last.
        shared = [
            (own, other)
            for slot in others
            if isinstance(slot.seed, Widening)
            for other in slot.seed.widened
            for own in options.widened
            if own.layer is other.layer
        ]
        return all(
            {own.role, other.role} == {Role.PRODUCER, Role.CONSUMER}
            and own.positions is other.positions is None
            for own, other in shared
        )

    def is_widened_elsewhere(self, k: int) -> bool:
        """Tell whether the seed of another slot makes the activations of slot k wider."""
        return any(k in slot.also_widened for j, slot in enumerate(self.slots) if j != k)

    def refusals(self, blueprint: Blueprint) -> list[str]:
        """Return why slots do not take a blueprint: at most two reasons, with the first slot of each."""
        reasons: dict[str, str] = {}
        for name, options in zip(self.names, self.options, strict=True):
            if blueprint in options.refused:
                reasons.setdefault(options.refused[blueprint], name)
        return [f"after {name}, {reason}" for reason, name in list(reasons.items())[:2]]

    # ---- sizes -----------------------------------------------------------------------------------------

    def count_model_parameters(self) -> int:
        """Count the trained parameters of the model; of one that is frozen as a whole, all."""
        own = self.model.parameters() if self.frozen else trainable_parameters(self.model)
        return sum(p.numel() for p in own)

    def count_seed_parameters(self) -> int:
        """Count the parameters of all seeds, as they are when they have become part of the model."""
        total, widened = 0, list[WidenedLayer]()
        for slot in self.slots:
            if isinstance(slot.seed, Widening):
                widened += slot.seed.widened
                continue
            used = [slot.seed, slot.gate if slot.blend is Blend.GATE else None]
            total += sum(p.numel() for module in used if module is not None for p in module.parameters())
        return total + added_parameters(widened)

    # ---- folding ---------------------------------------------------------------------------------------

    def fold(self, k: int) -> Fold:
        """Make the seed of slot k part of the model, at its alpha; the slot is empty afterwards."""
        self.detach()
        before, slot, seed = self.count_model_parameters(), self.slots[k], self.slots[k].seed
        fold = Fold(k, slot.blueprint, slot.blend, slot.folds_before, self._describe_seed(k))
        if isinstance(seed, RepeatedBlocks):
            self.modules[k] = insert_blocks(self.model, seed.span, list(seed.blocks))
            fold.moved = [(p, p) for p in seed.parameters()]
        elif isinstance(seed, Widening):
            fold.grown = seed.fold(slot.alpha)
        else:
            graft, module = slot.graft(), self.modules[k]
            plain = trace_graft(graft)
            like = next(graft.parameters(), None)
            plain.to(None if like is None else like.device, slot.spec.dtype).train(module.training)
            name = next(n for n, m in self.model.named_modules() if m is module)
            self.modules[k] = install_graft(self.model, name, slot.spec.in_tuple, plain)
            fold.moved = list(zip(graft.parameters(), plain.parameters(), strict=True))
        fold.parameters = self.count_model_parameters() - before
        self.folds.append(fold)
        slot.clear()
        self.changed = True
        self.attach()
        return fold

    def reset(self) -> None:
        """Remove all seeds and take all folds back."""
        self.detach()
        for slot in self.slots:
            slot.clear()
        if self.folds:
            self._restore_given()
            self.modules, self.folds = list(self._given_modules), []
            self.changed = True
        self.attach()

    def plain_model(self) -> nn.Module:
        """Return a copy of the model on the CPU, in eval mode, with every seed above alpha 0 folded in.

        Its class is the model's own; it loads without esper.
        """
        other = copy.copy(self)
        self.detach()
        # In one call, so that the seeds of the copy refer to the layers of the copy.
        other.model, other.slots, other.modules = copy.deepcopy((self.model, self.slots, self.modules))
        self.attach()
        other.folds, other._handles = [], []
        for k, slot in enumerate(other.slots):
            if slot.seed is not None and slot.alpha > 0:
                other.fold(k)
        other.detach()
        return other.model.cpu().eval()

    # ---- describing ------------------------------------------------------------------------------------

    def describe_growth(self) -> dict[int, tuple[str, int]]:
        """Say, by slot, how its clone or widening changes the model, and how many parameters it adds.

        Weights between new units of two slots are counted once, at the later slot, so that all add up.
        """
        found: dict[int, tuple[str, int]] = {}
        widened: list[WidenedLayer] = []
        for k, slot in enumerate(self.slots):
            if slot.alpha == 0 or not isinstance(slot.seed, RepeatedBlocks | Widening):
                continue
            if isinstance(slot.seed, Widening):
                before = added_parameters(widened)
                widened += slot.seed.widened
                size = added_parameters(widened) - before
            else:
                size = sum(p.numel() for p in slot.seed.parameters())
            found[k] = self._describe_seed(k), size
        return found

    def _describe_seed(self, k: int) -> str:
        """Say how the seed of slot k changes the model."""
        slot, names = self.slots[k], {module: name for name, module in self.model.named_modules()}
        if isinstance(slot.seed, Widening):  # as in: conv1 64 → 96 wide
            producer = next(each for each in slot.seed.widened if each.role is Role.PRODUCER)
            units = units_out(producer.layer)
            return f"{names[producer.layer]} {units} → {units + producer.extra} wide"
        if not isinstance(slot.seed, RepeatedBlocks):
            return f"{Blueprint(slot.blueprint).name} behind {self.names[k]}"
        blocks, container = slot.seed.span.blocks, slot.seed.span.container
        if names[container] and len(blocks) == len(list(container.children())) > 1:
            return f"{names[container]} repeated"
        first, last = names[blocks[0]], names[blocks[-1]]
        return f"{first} repeated" if first == last else f"{first} to {last} repeated"
