"""The shape of a grown network, and a fresh network of the same shape.

A shape is a line of text: the hidden units of every block, "+" between the blocks of a slot, "|" between
slots. "64+64|32" is a slot with two blocks of 64 units and one with a block of 32. The attention blocks of a
gpt count their heads.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from esper.lifecycle.slot_states import SlotStates
from esper.population.blocks import Block
from esper.population.describe import standing_forms, units_of
from esper.population.hosts import Entered, Host, block_of, residual_scale
from esper.population.population import Population


def shapes_of(population: Population, states: SlotStates) -> list[str] | None:
    """The shape of every member; None where something else than blocks stands in one."""
    slots, codes = population.bodies.slots, population.bodies.codes
    found = []
    for chains in standing_forms(population, states):
        if any(not chain or min(chain) < codes.block for chain in chains):
            return None
        pairs = zip(slots, chains, strict=True)
        found.append("|".join("+".join(str(units_of(slot, f)) for f in chain) for slot, chain in pairs))
    return found


def fresh_host(host: Host, shape: str) -> Host:
    """A network with new weights: stem, joints and head of a host of blocks, and the blocks of a shape.

    The parts that are kept are those of `host` itself: give a new one.
    """
    units = [[int(number) for number in slot.split("+")] for slot in shape.split("|")]
    scale = residual_scale(sum(len(chain) for chain in units))
    segments: list[nn.Module] = []
    widths: list[int] = []
    for slot, (segment, numbers) in enumerate(zip(host.segments, units, strict=True)):
        blocks = _fresh_blocks(host, slot, numbers, scale)
        first = Entered(segment[0], blocks[0]) if isinstance(segment, Entered) else blocks[0]
        segments += [first, *blocks[1:]]
        widths += [host.widths[slot]] * len(blocks)
    return Host(segments, host.topology, host.head, widths, host.spatial_dims)


def _fresh_blocks(host: Host, slot: int, units: Sequence[int], scale: float) -> list[Block]:
    """The blocks of one slot; where a clone repeats two, leading blocks alternate with its own."""
    blocks = []
    for place, number in enumerate(units):
        leads = host.repeats[slot] == 2 and place % 2 == 1
        template = block_of(host.segments[slot - leads])
        assert template is not None, "only networks of blocks have a shape"
        branch = template.branch.with_units(number)
        branch.second.reset_parameters()
        with torch.no_grad():
            branch.second.weight.mul_(scale)
        blocks.append(Block(branch))
    return blocks
