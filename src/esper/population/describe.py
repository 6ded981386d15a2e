"""What grew in a member, in words."""

from __future__ import annotations

from torch import nn

from esper.lifecycle.actions import NUM_BLUEPRINTS, Blueprint
from esper.lifecycle.legality import is_heard
from esper.lifecycle.slot_states import SlotStates
from esper.lifecycle.stages import HEARD_STAGES, Stage
from esper.population.blocks import AttendToPast, Branch
from esper.population.forms import HALVES, NO_FORM, SlotForms
from esper.population.population import Population

TIMES = {1: "once", 2: "twice"}


def describe_growth(population: Population, states: SlotStates, member: int) -> list[str]:
    """How a member differs from its bare host, a line for each change, in the order of its slots.

    "block 3 repeated twice", "hidden units 64 → 96 in block 5", "MLP behind block 2", "CLONE at block 1,
    heard at 50%". Blocks are counted from 1. A seed that is not heard is no change; empty for a member that
    did not grow.
    """
    lines: list[str] = []
    chains = standing_forms(population, states)[member]
    slots = states[member].to("cpu")
    for s, (slot, chain) in enumerate(zip(population.bodies.slots, chains, strict=True)):
        lines += _changes(slot, s, chain)
        alpha = float(slots.alpha[0, s]) if Stage(int(slots.stage[0, s])) in HEARD_STAGES else 0.0
        if 0.0 < alpha < 1.0:
            name = Blueprint(int(slots.blueprint[0, s])).name
            lines.append(f"{name} at {_at(slot, s)}, heard at {alpha:.0%}")
    return lines


def standing_forms(population: Population, states: SlotStates) -> list[list[list[int]]]:
    """Every member's forms, slot by slot, in the order in which they run; a seed counts once it is heard in
    full.
    """
    population.look(states)
    heard = (is_heard(states) & (states.alpha == 1.0)).tolist()
    found = []
    for member, forms in enumerate(population.forms.tolist()):
        chains = []
        for s, slot in enumerate(population.bodies.slots):
            chain = [form for form in forms[s][1:] if form != NO_FORM]
            chains.append(_with_seed(slot, chain, forms[s][0]) if heard[member][s] else chain)
        found.append(chains)
    return found


def units_of(slot: SlotForms, form: int) -> int:
    """The hidden units of a block's form, of the block ahead of a slot or of the one that leads it."""
    codes = slot.codes
    branch, first = (slot.branch, codes.block) if form < codes.lead else (slot.lead, codes.lead)
    assert branch is not None
    assert codes.block <= form < codes.pair, "a form of a block"
    return slot.units(branch, form - first)


def _at(slot: SlotForms, s: int) -> str:
    return f"{'segment' if slot.branch is None else 'block'} {s + 1}"


def _with_seed(slot: SlotForms, chain: list[int], seed: int) -> list[int]:
    """The forms that stand in a slot once its seed is part of the host."""
    codes = slot.codes
    if seed in tuple(HALVES):
        return [*chain[:-1], chain[-1] + HALVES[Blueprint(seed)]]
    if seed >= codes.pair:
        lead, block = divmod(seed - codes.pair, codes.classes)
        return [*chain, codes.lead + lead, codes.block + block]
    return [*chain, seed]


def _changes(slot: SlotForms, s: int, chain: list[int]) -> list[str]:
    """How the forms of slot s differ from one block as it was built."""
    codes, here = slot.codes, _at(slot, s)
    blocks = [form - codes.block for form in chain if codes.block <= form < codes.lead]
    leads = [form - codes.lead for form in chain if codes.lead <= form < codes.pair]
    lines = []
    if len(blocks) > 1:
        what = here if slot.lead is None else f"blocks {s} and {s + 1}"
        lines.append(f"{what} repeated {TIMES.get(len(blocks) - 1, f'{len(blocks) - 1} times')}")
    for copy, widened in enumerate(blocks):
        lines += _widening(slot, slot.branch, widened, here, copy)
    for copy, widened in enumerate(leads, start=1):
        lines += _widening(slot, slot.lead, widened, f"block {s}", copy)
    return lines + [f"{Blueprint(form).name} behind {here}" for form in chain if form < NUM_BLUEPRINTS]


def _widening(slot: SlotForms, branch: Branch | None, widened: int, here: str, copy: int) -> list[str]:
    """A line where a block, or a copy of it (from 1), has more units than it was built with."""
    if branch is None or not widened:
        return []
    layers = "hidden units" if isinstance(branch.first, nn.Linear) else "channels"
    unit = "heads" if isinstance(branch.middle, AttendToPast) else layers
    where = f"copy {copy} of {here}" if copy else here
    return [f"{unit} {branch.units} → {slot.units(branch, widened)} in {where}"]
