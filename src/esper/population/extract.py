"""Read one member out of a population: as a plain module, or in words."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from esper.lifecycle.actions import NUM_BLUEPRINTS, STYLE_BLEND, Blend, Blueprint, Style
from esper.lifecycle.legality import in_forward_pass
from esper.lifecycle.slot_states import SlotStates
from esper.lifecycle.stages import FORWARD_STAGES, Stage
from esper.population.blocks import Block, Branch, CausalAttention, fold_units
from esper.population.blueprints import BlendGate
from esper.population.forms import HALVES, NO_FORM, SlotForms
from esper.population.population import Population
from esper.population.row_module import load_flat

# ---- as a module ----


class Grafted(nn.Module):
    """A seed joined to the host's activation at a fixed strength."""

    def __init__(self, seed: nn.Module, alpha: float):
        super().__init__()
        self.seed = seed
        self.alpha = alpha


class AddGraft(Grafted):
    """h + alpha · seed(h)"""

    def forward(self, h: Tensor) -> Tensor:
        return h + self.alpha * self.seed(h)


class MultiplyGraft(Grafted):
    """h · (1 + alpha · tanh(seed(h)))"""

    def forward(self, h: Tensor) -> Tensor:
        return h * (1.0 + self.alpha * torch.tanh(self.seed(h)))


class GateGraft(Grafted):
    """h + alpha · gate(h) · seed(h)"""

    def __init__(self, seed: nn.Module, alpha: float, gate: nn.Module):
        super().__init__(seed, alpha)
        self.gate = gate

    def forward(self, h: Tensor) -> Tensor:
        return h + self.alpha * self.gate(h) * self.seed(h)


class _Pair(nn.Module):
    """What two blocks in a row add to their input."""

    def __init__(self, first: Branch, second: Branch) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x: Tensor) -> Tensor:
        first = self.first(x)
        return first + self.second(x + first)


def extract(population: Population, states: SlotStates, member: int) -> nn.Sequential:
    """Return a member as an ordinary `nn.Sequential` of segments, blocks, grafts and head, on the CPU.

    Clones are blocks like their origins, widened blocks have wider layers; a clone or widening that is only
    partly blended in has its outgoing weights scaled by its alpha.
    """
    population.read_slots(states)  # writes the weights of seeds that wait to germinate or to be folded
    network, slots = population.network, states[member].to("cpu")
    weights = population.hosts.weights[member].cpu().split(network.trunk_sizes)
    modules: list[nn.Module] = []
    for k, (body, row) in enumerate(zip(network.trunk, weights, strict=True)):
        if body is not None:
            modules.append(load_flat(copy.deepcopy(body.module).cpu(), row))
        if k < population.num_slots:
            heard = Stage(int(slots.stage[0, k])) in FORWARD_STAGES
            alpha = float(slots.alpha[0, k]) if heard else 0.0
            modules += _SlotParts(population, Style(int(slots.style[0, k])), member, k).modules(alpha)
    return nn.Sequential(*modules).eval()


class _SlotParts:
    """The parts of one slot of one member, as modules."""

    def __init__(self, population: Population, style: Style, member: int, slot: int) -> None:
        self.forms, self.codes = population.network.slots[slot], population.network.codes
        self.form = population.forms[member, slot].tolist()
        self.blend = [int(STYLE_BLEND[style]), *population.folded_blends[member, slot].tolist()]
        # Rows of parts are ordered by position, then member, then slot.
        each, first = population.num_members * population.num_slots, member * population.num_slots + slot
        self.rows = population.parts.weights[first::each].cpu()  # [positions, P]

    def modules(self, alpha: float) -> list[nn.Module]:
        """Return what was folded in, then the seed unless its alpha is 0."""
        positions = [p for p in range(1, len(self.form)) if self.form[p] != NO_FORM]
        found = [self._module(position, 1.0) for position in positions]
        seed = self.form[0]
        if alpha == 0:
            return found
        if seed in HALVES:
            return [*found[:-1], self._widened(positions[-1], alpha)]
        if seed >= self.codes.pair:
            lead, block = self.codes.blocks_of_pair(seed)
            first, second = self._branch(lead, 0), self._branch(block, 0, self.forms.pair_start)
            # Partly blended in, a pair adds alpha times what both blocks add, which no two blocks compute.
            pair = [Block(first), Block(second)] if alpha == 1.0 else [AddGraft(_Pair(first, second), alpha)]
            return [*found, *pair]
        return [*found, self._module(0, alpha)]

    def _branch(self, form: int, position: int, start: int = 0) -> Branch:
        """Return the branch that a row holds from column `start` on."""
        branch = self.forms.module(form)
        assert isinstance(branch, Branch)
        load_flat(branch, self.rows[position, start:])
        return branch

    def _module(self, position: int, alpha: float) -> nn.Module:
        form = self.form[position]
        if form >= self.codes.block:
            branch = self._branch(form, position)
            with torch.no_grad():
                branch.second.weight.mul_(alpha)
            return Block(branch)
        seed = load_flat(self.forms.module(form), self.rows[position])
        if self.blend[position] == Blend.GATE:
            host = self.forms.host
            gate = BlendGate(host.widths[self.forms.slot], host.spatial_dims)
            return GateGraft(seed, alpha, load_flat(gate, self.rows[position, self.forms.gate_start :]))
        return (MultiplyGraft if self.blend[position] == Blend.MULTIPLY else AddGraft)(seed, alpha)

    def _widened(self, position: int, alpha: float) -> Block:
        """Return the block at a position with the units of the seed beside its own."""
        form, seed = self.form[position], Blueprint(self.form[0])
        host, new = self._branch(form, position), self._branch(int(seed), 0)
        with torch.no_grad():
            new.second.weight.mul_(alpha)
        wider = self.forms.module(form + HALVES[seed])
        assert isinstance(wider, Branch)
        folded = fold_units(dict(host.named_parameters()), dict(new.named_parameters()), host.copies)
        wider.load_state_dict({name: value.detach() for name, value in folded.items()})
        return Block(wider)


# ---- in words ----

TIMES = {1: "once", 2: "twice"}


def describe_growth(population: Population, states: SlotStates, member: int) -> list[str]:
    """Say how a member differs from its host as it was built, a line for each change, slot by slot.

    "block 3 repeated twice", "hidden units 64 → 96 in block 5", "MLP behind block 2", "CLONE at block 1,
    heard at 50%". Blocks are counted from 1. A seed that is not heard is no change; empty for a member that
    did not grow.
    """
    lines: list[str] = []
    slots = states[member].to("cpu")
    pairs = zip(population.network.slots, standing_forms(population, states)[member], strict=True)
    for s, (slot, forms) in enumerate(pairs):
        here = f"{'segment' if slot.branch is None else 'block'} {s + 1}"
        lines += _changes(slot, s, forms, here)
        alpha = float(slots.alpha[0, s]) if Stage(int(slots.stage[0, s])) in FORWARD_STAGES else 0.0
        if 0.0 < alpha < 1.0:
            lines.append(f"{Blueprint(int(slots.blueprint[0, s])).name} at {here}, heard at {alpha:.0%}")
    return lines


def standing_forms(population: Population, states: SlotStates) -> list[list[list[int]]]:
    """Return the forms of every member, slot by slot, in the order in which they run.

    A seed counts once it is heard at full strength.
    """
    population.read_slots(states)
    codes = population.network.codes
    heard = (in_forward_pass(states) & (states.alpha == 1.0)).tolist()

    def forms_of(positions: list[int], with_seed: bool) -> list[int]:
        seed, *folded = [form for k, form in enumerate(positions) if k == 0 or form != NO_FORM]
        if not with_seed:
            return folded
        if seed in HALVES:
            return [*folded[:-1], folded[-1] + HALVES[Blueprint(seed)]]
        return [*folded, *(codes.blocks_of_pair(seed) if seed >= codes.pair else (seed,))]

    return [
        [forms_of(positions, full) for positions, full in zip(slots, fulls, strict=True)]
        for slots, fulls in zip(population.forms.tolist(), heard, strict=True)
    ]


def _changes(slot: SlotForms, s: int, forms: list[int], here: str) -> list[str]:
    """Say how the forms of slot s differ from one block as it was built."""
    codes = slot.codes
    blocks = [form - codes.block for form in forms if codes.block <= form < codes.lead]
    leads = [form - codes.lead for form in forms if codes.lead <= form < codes.pair]
    lines = []
    if len(blocks) > 1:
        what = here if slot.lead is None else f"blocks {s} and {s + 1}"
        lines.append(f"{what} repeated {TIMES.get(len(blocks) - 1, f'{len(blocks) - 1} times')}")
    for number, widened in enumerate(blocks):
        lines += _widening(slot, slot.branch, widened, here, number)
    for number, widened in enumerate(leads, start=1):
        lines += _widening(slot, slot.lead, widened, f"block {s}", number)
    return lines + [f"{Blueprint(form).name} behind {here}" for form in forms if form < NUM_BLUEPRINTS]


def _widening(slot: SlotForms, branch: Branch | None, widened: int, here: str, number: int) -> list[str]:
    """Return a line where a block, or a copy of it (number from 1), has more units than it was built with."""
    if branch is None or not widened:
        return []
    layers = "hidden units" if isinstance(branch.first, nn.Linear) else "channels"
    unit = "heads" if isinstance(branch.middle, CausalAttention) else layers
    where = f"copy {number} of {here}" if number else here
    return [f"{unit} {branch.units} → {slot.units(branch, widened)} in {where}"]
