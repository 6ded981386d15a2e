"""The slots of one living model: seeds that are wired into it, and folds that make them part of it.

A fold changes the model itself: one more block in a list, wider layers, or a plain graft behind a module. It
can be taken back, so that a model can return to what it was before.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from esper.growing.coupling import CannotWiden, Part, new_to_new
from esper.growing.ground import WIDENINGS, Ground, Offer
from esper.growing.live_slots import LiveSlot, install
from esper.growing.places import Place, trained
from esper.growing.plain import plain_graft
from esper.growing.repeating import Repeat, insert, touched_by
from esper.growing.undoing import Undo
from esper.growing.units import Role, units_out
from esper.growing.widening import Joined, Widening
from esper.lifecycle.actions import GROWTH_BLUEPRINTS, Blend, Blueprint, selectable_blueprints
from esper.population.blueprints import gate_parameter_count, parameter_count
from esper.utils.errors import UserError


@dataclass(frozen=True)
class Fold:
    """A seed that has become part of its model."""

    slot: int
    blueprint: int
    blend: Blend
    born: int  # folds that there were when it was planted
    was_at: nn.Module  # the module that the slot hung on
    words: str  # what a person would say has changed
    undo: Undo
    parameters: int = 0  # that it added to the model
    joined: list[Joined] = field(default_factory=list)  # parameters that got wider
    moved: list[tuple[nn.Parameter, nn.Parameter]] = field(default_factory=list)  # of the seed → of the model

    @property
    def code(self) -> list[int]:
        """What is needed to do it again: slot, blueprint, blend, and how many folds were before its birth."""
        return [self.slot, self.blueprint, int(self.blend), self.born]


class Hooks:
    """The slots of one model, attached to it."""

    def __init__(self, model: nn.Module, places: list[Place], ground: Ground):
        self.model, self.ground = model, ground
        self.names = [place.name for place in places]  # as the user knows them
        self.topology = places[0].topology
        self.modules = [model.get_submodule(place.name) for place in places]  # that the slots hang on
        self.slots = [LiveSlot(place) for place in places]
        self.folds: list[Fold] = []
        self.frozen = not trained(model)
        self.host_parameters = max(1, self.model_parameters())  # of the model as it was given
        self.version = 0  # rises whenever the model's layers or lists change
        self._looked = -1  # at which version
        self._offers: list[Offer] = []
        self._flops = 0.0
        self._handles: list[RemovableHandle] = []
        self._look()

    @property
    def offers(self) -> list[Offer]:
        """What can grow in each slot beside the blueprints of its kind."""
        self._look()
        return self._offers

    @property
    def flops(self) -> float:
        """Operations of one sample's forward pass through the model without seeds.

        Torch counts products and convolutions. A model that has neither counts a multiply-add for each of its
        parameters: costs are compared with those of the model as it was given, which must not be 0.
        """
        self._look()
        return self._flops or 2.0 * max(1, self.model_parameters())

    def place(self, k: int) -> Place:
        """Slot k's place in the model as it is now."""
        self._look()
        return self.slots[k].place

    def _look(self) -> None:
        """Find out what the model offers, if it has changed since the last time."""
        if self._looked == self.version:
            return
        self._looked = self.version
        self.detach()
        before = [slot.place for slot in self.slots]
        places, self._offers, self._flops = self.ground.look(self.modules, before)
        for slot, place in zip(self.slots, places, strict=True):
            slot.place = place
        self.attach()

    # ---- wiring ----------------------------------------------------------------------------------------

    def attach(self) -> None:
        """Let the model hear its seeds: what reads new units goes before what makes them."""
        self.detach()
        for role in Role:
            for slot in self.slots:
                if isinstance(slot.seed, Widening):
                    now, alone = partial(getattr, slot, "strength"), partial(getattr, slot, "alone")
                    self._handles += slot.seed.attach(role, now, alone)
        for module, slot in zip(self.modules, self.slots, strict=True):
            self._handles.append(module.register_forward_hook(slot.hook, with_kwargs=True))

    def detach(self) -> None:
        """Leave the model without hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def plant(self, k: int, blueprint: int, device: torch.device, draw: int) -> None:
        """Begin a seed; its first weights belong to `draw`, and the caller's generator is left as it was."""
        slot, offer = self.slots[k], self.offers[k]
        self.detach()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(draw)
            if blueprint == Blueprint.CLONE:
                assert offer.span is not None, "a clone was planted where nothing can be repeated"
                slot.put(blueprint, Repeat(offer.span))
            elif blueprint in GROWTH_BLUEPRINTS:
                slot.put(blueprint, Widening(self._parts(k, Blueprint(blueprint))))
                slot.touched = offer.touched
            else:
                slot.plant(blueprint, device)
        slot.born = len(self.folds)
        self.attach()

    def _parts(self, k: int, blueprint: Blueprint) -> list[Part]:
        """The layers that a widening of slot k is about; raises a UserError where they no longer take it."""
        try:
            return self.ground.parts(self.offers[k], blueprint)
        except CannotWiden as error:
            raise UserError(
                f"the layers ahead of slot {self.names[k]!r} could get wider when the run began and cannot "
                f"now ({error}): the model computes something else than then, or gives NaN; name other "
                "slots, or blueprints without WIDEN_HALF and WIDEN_FULL"
            ) from error

    def clear(self, k: int) -> None:
        """End a seed."""
        self.slots[k].clear()
        self.attach()

    # ---- what fits -------------------------------------------------------------------------------------

    def fits(self, k: int, blueprint: Blueprint) -> bool:
        """Whether a blueprint that grows the user's own modules can be planted in slot k now."""
        offer = self.offers[k]
        if blueprint not in offer.parameters or self.disturbed(k):
            return False
        if blueprint == Blueprint.CLONE:
            return True
        others = [slot for j, slot in enumerate(self.slots) if j != k and slot.seed is not None]
        if any(self.slots[j] in others for j in offer.touched):
            return False
        growing = [slot.seed for slot in others if isinstance(slot.seed, Widening)]
        return all(
            compatible(own, other)
            for seed in growing
            for other in seed.parts
            for own in offer.parts
            if own.layer is other.layer
        )

    def refusals(self, blueprint: Blueprint) -> list[str]:
        """Why slots do not take a blueprint, at most two reasons with the first slot that each holds for."""
        reasons: dict[str, str] = {}
        for name, offer in zip(self.names, self.offers, strict=True):
            if blueprint in offer.refused:
                reasons.setdefault(offer.refused[blueprint], name)
        return [f"after {name}, {reason}" for reason, name in list(reasons.items())[:2]]

    def disturbed(self, k: int) -> bool:
        """Whether the seed of another slot makes the activations of slot k wider."""
        return any(k in slot.touched for j, slot in enumerate(self.slots) if j != k)

    def price(self, k: int, blueprint: Blueprint) -> int:
        """The parameters that such a seed in slot k adds in the end, beside those that live now."""
        offer, share = self.offers[k], WIDENINGS.get(blueprint)
        size = offer.parameters[blueprint]
        for slot in self.slots if share is not None else []:
            if isinstance(slot.seed, Widening) and share is not None:
                both = new_to_new(slot.seed.parts, offer.parts) + new_to_new(offer.parts, slot.seed.parts)
                size += both // share
        return size

    # ---- sizes: what an environment asks of bodies -----------------------------------------------------

    def seed_parameters(self) -> Tensor:
        """Parameters of a seed by slot and blueprint, 0 where it does not fit.  # [S, blueprints]"""
        table = torch.zeros(len(self.slots), len(Blueprint), dtype=torch.long)
        for s, offer in enumerate(self.offers):
            place = self.place(s)
            for b in selectable_blueprints(place.topology):
                table[s, b] = parameter_count(b, place.topology, place.width, place.spatial_dims)
            for grown in offer.parameters:
                table[s, grown] = self.price(s, grown)
        return table

    def gate_parameters(self) -> Tensor:
        """Parameters of a gate by slot.  # [S]"""
        widths = [self.place(k).width for k in range(len(self.slots))]
        return torch.tensor([gate_parameter_count(width) for width in widths])

    def model_parameters(self) -> int:
        """Trained parameters of the model; of one that is frozen as a whole, all."""
        return sum(p.numel() for p in (self.model.parameters() if self.frozen else trained(self.model)))

    def parameters(self) -> int:
        """Those of all seeds, as they are when they have become part of the model."""
        growing = [slot.seed for slot in self.slots if isinstance(slot.seed, Widening)]
        parts = [part for seed in growing for part in seed.parts]
        seeds = sum(seed.padding() for seed in growing)
        for slot in self.slots:
            used = [slot.seed, slot.gate if slot.blend is Blend.GATE else None]
            seeds += sum(p.numel() for part in used if part is not None for p in part.parameters())
        return seeds + new_to_new(parts, parts)

    # ---- folding ---------------------------------------------------------------------------------------

    def fold(self, k: int) -> Fold:
        """Make the seed of slot k part of the model, at the strength that it has; the slot is empty after."""
        self.detach()
        before = self.model_parameters()
        try:
            fold = self._folded(k)
        except BaseException:
            self.attach()
            raise
        fold = replace(fold, parameters=self.model_parameters() - before)
        self.folds.append(fold)
        self.slots[k].clear()
        self.version += 1
        self.attach()
        return fold

    def _folded(self, k: int) -> Fold:
        slot, name = self.slots[k], self.names[k]
        fold = partial(Fold, k, slot.blueprint, slot.blend, slot.born, self.modules[k])
        assert slot.seed is not None, "an empty slot has nothing to fold"
        if isinstance(slot.seed, Repeat):
            words, undo = self._repeated(slot.seed), Undo(touched_by(self.model, slot.seed.span))
            slot.seed.copy_modes()
            with _undone_if_it_fails(undo):
                self.modules[k] = insert(self.model, slot.seed.span, list(slot.seed.blocks))
            moved = [(p, p) for p in slot.seed.parameters()]
            return fold(words, undo, moved=moved)
        if isinstance(slot.seed, Widening):
            words, undo = self._wider(slot.seed), Undo(part.layer for part in slot.seed.parts)
            with _undone_if_it_fails(undo):
                joined = slot.seed.fold(slot.strength)
            return fold(words, undo, joined=joined)
        module, graft = self.modules[k], slot.graft()
        plain = plain_graft(graft, slot.place.spatial_dims)
        like = next(graft.parameters(), None)
        plain.to(None if like is None else like.device, slot.place.dtype).train(module.training)
        undo = Undo(m for m in self.model.modules() if module in (m, *m.children()))
        current = next(n for n, m in self.model.named_modules() if m is module)
        with _undone_if_it_fails(undo):
            self.modules[k] = install(self.model, current, slot.place.in_tuple, plain)
        moved = list(zip(graft.parameters(), plain.parameters(), strict=True))
        return fold(f"{Blueprint(slot.blueprint).name} behind {name}", undo, moved=moved)

    def _repeated(self, seed: Repeat) -> str:
        """What is repeated: a block of a list, some entries of a sequence or a whole one."""
        blocks, container = seed.span.blocks, seed.span.container
        names = {module: name for name, module in self.model.named_modules()}
        if names[container] and len(blocks) == len(list(container.children())) > 1:
            return f"{names[container]} repeated"
        first, last = names[blocks[0]], names[blocks[-1]]
        return f"{first} repeated" if first == last else f"{first} to {last} repeated"

    def _wider(self, seed: Widening) -> str:
        """What a widening changes, as in: conv1 64 → 96 wide, or attn 4 → 6 heads."""
        makers = [part for part in seed.parts if part.role is Role.MAKER]
        counters = [part for part in seed.parts if part.role is Role.COUNTER]
        units, more, what = units_out(makers[0].layer), makers[0].more, "wide"
        if counters:
            units, more, what = units * counters[0].more // more, counters[0].more, "heads"
        names = _named(self.model, [part.layer for part in counters or makers])
        return f"{names} {units} → {units + more} {what}"

    def unfold(self) -> Fold:
        """Take the latest fold back; its slot is empty."""
        self.detach()
        fold = self.folds.pop()
        fold.undo()
        self.modules[fold.slot] = fold.was_at
        self.slots[fold.slot].clear()
        self.version += 1
        self.attach()
        return fold

    def plain_model(self) -> nn.Module:
        """A copy of the model on the CPU, in eval mode, with every heard seed folded in.

        Its class is the model's own; it needs no esper to be loaded.
        """
        version, as_before, folds = self.version, Undo(self.slots), len(self.folds)
        heard = [k for k, slot in enumerate(self.slots) if slot.seed is not None and slot.strength > 0]
        try:
            for k in heard:
                self.fold(k)
            self.detach()
            return copy.deepcopy(self.model).cpu().eval()
        finally:
            while len(self.folds) > folds:  # a fold may have failed
                self.unfold()
            as_before()
            self.version = version
            self.attach()

    def folded(self) -> tuple[str, ...]:
        """What has become part of the model, in words, in the order in which it did."""
        return tuple(f"{fold.words}, for good, {fold.parameters:,} parameters" for fold in self.folds)

    def widened(self) -> dict[int, tuple[str, int]]:
        """By slot, how the seed that is heard there changes the model's own lists and layers, in words, and
        how many parameters it adds.

        Weights between new units of two slots are counted once, at the later slot, so that all add up.
        """
        found: dict[int, tuple[str, int]] = {}
        earlier: list[Part] = []
        for k, slot in enumerate(self.slots):
            seed = slot.seed
            if slot.strength == 0 or not isinstance(seed, Repeat | Widening):
                continue
            size = sum(p.numel() for p in seed.parameters())
            if isinstance(seed, Repeat):
                found[k] = self._repeated(seed), size
                continue
            size += seed.padding() + new_to_new(seed.parts, seed.parts)
            size += new_to_new(seed.parts, earlier) + new_to_new(earlier, seed.parts)
            found[k] = self._wider(seed), size
            earlier += seed.parts
        return found


@contextmanager
def _undone_if_it_fails(undo: Undo) -> Iterator[None]:
    """Take a change back where it raises in the middle."""
    try:
        yield
    except BaseException:
        undo()
        raise


def compatible(one: Part, other: Part) -> bool:
    """Whether two widenings can have parts in one layer: one makes, one reads, and what is new comes last."""
    return {one.role, other.role} == {Role.MAKER, Role.READER} and one.where is None and other.where is None


def _named(model: nn.Module, layers: list[nn.Module]) -> str:
    names = {module: name for name, module in model.named_modules()}
    found = [names[layer] for layer in layers]
    return found[0] if len(found) == 1 else f"{', '.join(found[:-1])} and {found[-1]}"
