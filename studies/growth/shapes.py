"""The shapes of grown networks as text, and fresh networks of a shape.

A shape is a line of text: the hidden units of every block, "+" between the blocks of a slot, "|" between
slots. "64+64|32" is a slot with two blocks of 64 units and one with a block of 32. The attention blocks of a
gpt count their heads.
"""

from __future__ import annotations

from torch import nn

from esper.lifecycle.slot_states import SlotStates
from esper.population.blocks import Block, scale_output
from esper.population.extract import standing_forms
from esper.population.forms import SlotForms
from esper.population.hosts import EntrySegment, Host, block_of, residual_scale
from esper.population.population import Population


def shapes_of(population: Population, states: SlotStates) -> list[str] | None:
    """Return the shape of every member, or None where one holds anything but blocks."""
    network = population.network
    found = []
    for slots in standing_forms(population, states):
        if any(not forms or min(forms) < network.codes.block for forms in slots):
            return None
        pairs = zip(network.slots, slots, strict=True)
        found.append("|".join("+".join(str(_units_of(slot, f)) for f in forms) for slot, forms in pairs))
    return found


def _units_of(slot: SlotForms, form: int) -> int:
    """Return the hidden units of a block's form."""
    codes = slot.codes
    branch, first = (slot.branch, codes.block) if form < codes.lead else (slot.lead, codes.lead)
    assert branch is not None
    return slot.units(branch, form - first)


def fresh_host(host: Host, shape: str) -> Host:
    """Return a network of a shape with new blocks; stem, downsampling and head are those of `host`.

    These modules are shared with `host`: give a new one.
    """
    units = [[int(number) for number in slot.split("+")] for slot in shape.split("|")]
    scale = residual_scale(sum(map(len, units)))
    segments: list[nn.Module] = []
    widths: list[int] = []
    for slot, (segment, numbers) in enumerate(zip(host.segments, units, strict=True)):
        blocks = [_fresh_block(host, slot, k, number, scale) for k, number in enumerate(numbers)]
        first = EntrySegment(segment[0], blocks[0]) if isinstance(segment, EntrySegment) else blocks[0]
        segments += [first, *blocks[1:]]
        widths += [host.widths[slot]] * len(blocks)
    return Host(segments, host.topology, host.head, widths, host.spatial_dims)


def _fresh_block(host: Host, slot: int, k: int, units: int, scale: float) -> Block:
    """Return the block k of a slot; where a clone repeats two, every second is one of the slot ahead."""
    leads = host.repeats[slot] == 2 and k % 2 == 1
    template = block_of(host.segments[slot - leads])
    assert template is not None, "only networks of blocks have a shape"
    branch = template.branch.with_units(units)
    branch.second.reset_parameters()
    scale_output(branch.second, scale)
    return Block(branch)
