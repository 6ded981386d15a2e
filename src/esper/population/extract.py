"""Taking a member out of the population: a plain module, equal in output."""

from __future__ import annotations

import copy
from collections.abc import Collection

import torch
from torch import Tensor, nn

from esper.lifecycle.actions import STYLE_BLEND, Blend, Blueprint, Style
from esper.lifecycle.slot_states import SlotStates
from esper.lifecycle.stages import HEARD_STAGES, Stage
from esper.population.blocks import Block, Branch, fold_units
from esper.population.blueprints import BlendGate
from esper.population.forms import HALVES, NO_FORM
from esper.population.layout import load_flat
from esper.population.population import Population


class Grafted(nn.Module):
    """A seed joined to the host's activation at a fixed strength."""

    def __init__(self, seed: nn.Module, alpha: float):
        super().__init__()
        self.seed = seed
        self.alpha = alpha


class AddGraft(Grafted):
    """h + alpha · seed(h)"""

    def forward(self, h: Tensor) -> Tensor:
        result: Tensor = h + self.alpha * self.seed(h)
        return result


class MultiplyGraft(Grafted):
    """h · (1 + alpha · tanh(seed(h)))"""

    def forward(self, h: Tensor) -> Tensor:
        result: Tensor = h * (1.0 + self.alpha * torch.tanh(self.seed(h)))
        return result


class GateGraft(Grafted):
    """h + alpha · gate(h) · seed(h)"""

    def __init__(self, seed: nn.Module, alpha: float, gate: nn.Module):
        super().__init__(seed, alpha)
        self.gate = gate

    def forward(self, h: Tensor) -> Tensor:
        result: Tensor = h + self.alpha * self.gate(h) * self.seed(h)
        return result


def extract(
    population: Population, states: SlotStates, member: int, fossilised_only: bool = False
) -> nn.Sequential:
    """Member `member` as an ordinary `nn.Sequential` of segments, blocks, grafts and head, on the CPU.

    Clones are blocks like their origins, widened blocks have wider layers; a clone or widening that is only
    partly blended in has its outgoing weights scaled by its alpha. With `fossilised_only` the seeds that were
    never made permanent are left out. Raises IndexError for a member that is not there.
    """
    if not 0 <= member < population.num_members:
        raise IndexError(
            f"member {member} is out of range; this population has members 0..{population.num_members - 1}"
        )
    population.look(states)  # what waits to be born or folded has its weights from here on
    stages = {Stage.FOSSILIZED} if fossilised_only else HEARD_STAGES
    slots = states[member].to("cpu")
    parts: list[nn.Module] = []
    for k, module in enumerate(trunk_modules(population, member)):
        parts += [] if module is None else [module]
        if k < population.num_slots:
            parts += slot_modules(population, slots, member, k, stages)
    return nn.Sequential(*parts).eval()


def slot_modules(
    population: Population, slots: SlotStates, member: int, k: int, stages: Collection[Stage] = HEARD_STAGES
) -> list[nn.Module]:
    """What stands at slot k of one member, whose slots are given: what was folded in, then the seed.

    The seed is left out where its stage is none of `stages` or its alpha is 0.
    """
    heard = Stage(int(slots.stage[0, k])) in stages
    alpha = float(slots.alpha[0, k]) if heard else 0.0
    return _SlotParts(population, Style(int(slots.style[0, k])), member, k).modules(alpha)


def trunk_modules(population: Population, member: int) -> list[nn.Module | None]:
    """One member's segments without their blocks, and the head, with its weights."""
    bodies = population.bodies
    weights = population.hosts.weights[member].cpu().split(bodies.trunk_sizes)
    return [
        None if body is None else load_flat(copy.deepcopy(body.module).cpu(), row)
        for body, row in zip(bodies.trunk, weights, strict=True)
    ]


class _SlotParts:
    """What stands at one slot of one member, as modules."""

    def __init__(self, population: Population, style: Style, member: int, slot: int) -> None:
        self.forms, self.codes = population.bodies.slots[slot], population.bodies.codes
        self.form = population.forms[member, slot].tolist()
        self.blend = [int(STYLE_BLEND[style]), *population.folded_blends[member, slot].tolist()]
        each = population.num_members * population.num_slots
        self.rows = population.parts.weights[
            member * population.num_slots + slot :: each
        ].cpu()  # [places, P]

    def modules(self, alpha: float) -> list[nn.Module]:
        """What was folded in, then the seed if it is heard."""
        places = [p for p in range(1, len(self.form)) if self.form[p] != NO_FORM]
        found = [self._module(place, 1.0) for place in places]
        seed = self.form[0]
        if alpha == 0:
            return found
        if seed in tuple(HALVES):
            return [*found[:-1], self._widened(places[-1], alpha)]
        if seed >= self.codes.pair:
            lead, block = divmod(seed - self.codes.pair, self.codes.classes)
            first = self._branch(self.codes.lead + lead, 0)
            second = self._branch(self.codes.block + block, 0, self.forms.pair_start)
            pair = [Block(first), Block(second)] if alpha == 1.0 else [AddGraft(_Pair(first, second), alpha)]
            return [*found, *pair]
        return [*found, self._module(0, alpha)]

    def _branch(self, form: int, place: int, start: int = 0) -> Branch:
        """The branch that a row holds from a column on."""
        branch = self.forms.module(form)
        assert isinstance(branch, Branch)
        load_flat(branch, self.rows[place, start:])
        return branch

    def _module(self, place: int, alpha: float) -> nn.Module:
        form = self.form[place]
        if form >= self.codes.block:
            branch = self._branch(form, place)
            with torch.no_grad():
                branch.second.weight.mul_(alpha)
            return Block(branch)
        seed = load_flat(self.forms.module(form), self.rows[place])
        if self.blend[place] == Blend.GATE:
            gate = load_flat(BlendGate(*self._joint), self.rows[place, self.forms.gate_start :])
            return GateGraft(seed, alpha, gate)
        return (MultiplyGraft if self.blend[place] == Blend.MULTIPLY else AddGraft)(seed, alpha)

    @property
    def _joint(self) -> tuple[int, str]:
        host = self.forms.host
        return host.widths[self.forms.slot], host.topology

    def _widened(self, place: int, alpha: float) -> Block:
        """The block at a place with the units of the seed beside its own."""
        form, seed = self.form[place], Blueprint(self.form[0])
        host, new = self._branch(form, place), self._branch(int(seed), 0)
        with torch.no_grad():
            new.second.weight.mul_(alpha)
        wider = self.forms.module(form + HALVES[seed])
        assert isinstance(wider, Branch)
        folded = fold_units(dict(host.named_parameters()), dict(new.named_parameters()), host.copies)
        wider.load_state_dict({name: value.detach() for name, value in folded.items()})
        return Block(wider)


class _Pair(nn.Module):
    """What two blocks in a row add to their input."""

    def __init__(self, first: Branch, second: Branch) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x: Tensor) -> Tensor:
        said = self.first(x)
        result: Tensor = said + self.second(x + said)
        return result
