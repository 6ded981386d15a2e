"""One member in plain PyTorch: slow, obvious, and what the population is compared with."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from esper.lifecycle.actions import Blend, Blueprint
from esper.population.blocks import Block, Branch, CausalAttention
from esper.population.blueprints import BlendGate, build_blueprint
from esper.population.hosts import EntrySegment, Host

# h: the host's activation, s: the seed's answer, a: alpha, g: the gate's answer (1 where there is no gate).
BLENDS: dict[Blend, Callable[[Tensor, Tensor, float, Tensor | float], Tensor]] = {
    Blend.ADD: lambda h, s, a, g: h + a * s,
    Blend.MULTIPLY: lambda h, s, a, g: h * (1 + a * torch.tanh(s)),
    Blend.GATE: lambda h, s, a, g: h + a * g * s,
}
HALVES_OF = {Blueprint.WIDEN_HALF: 1, Blueprint.WIDEN_FULL: 2}  # new units, in halves of the first ones


class ReferenceSeed(nn.Module):
    """A seed, the way it blends and, for GATE, its gate."""

    def __init__(self, seed: nn.Module, blend: Blend, gate: BlendGate | None = None) -> None:
        super().__init__()
        self.seed, self.gate, self.blend = seed, gate, blend

    def forward(self, h: Tensor, alpha: float) -> Tensor:
        """The host's activation with the seed heard at strength alpha."""
        gate = 1.0 if self.gate is None else self.gate(h)
        return BLENDS[self.blend](h, self.seed(h), alpha, gate)


class CopiedBlocks(nn.Module):
    """The seed of a clone: h + alpha · (blocks(h) − h)."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*copy.deepcopy(list(blocks)))

    def forward(self, h: Tensor, alpha: float) -> Tensor:
        return h + alpha * (self.blocks(h) - h)


class NewUnits(nn.Module):
    """The seed of a widening: it reads what the last block read and adds to what that block said."""

    def __init__(self, branch: Branch) -> None:
        super().__init__()
        self.branch = branch


Seed = ReferenceSeed | CopiedBlocks | NewUnits


class ReferenceMember(nn.Module):
    """A host with a chain of folded parts and a seed, or nothing, in each of its slots.

    The blocks of the host are the first links of the chains; what is left of its segments is the trunk.
    """

    def __init__(self, host: Host) -> None:
        super().__init__()
        self._host = (host,)  # no submodule: a fold replaces blocks, and the host stays as it was built
        self.trunk = nn.ModuleList([*(_without_block(segment) for segment in host.segments), host.head])
        self.chains = nn.ModuleList(nn.ModuleList(_blocks(segment)) for segment in host.segments)
        self.first_units = [chain[0].branch.units if len(chain) else 0 for chain in self.chains]
        self.seeds = nn.ModuleDict()  # by slot index
        self.alphas = [0.0] * host.num_slots

    @property
    def host(self) -> Host:
        return self._host[0]

    def germinate(self, slot: int, blueprint: int, blend: Blend = Blend.ADD, alpha: float = 0.0) -> Seed:
        """Put a new seed into a slot; a clone takes the weights of what it repeats."""
        self.seeds[str(slot)] = self._newborn(slot, Blueprint(blueprint), blend)
        self.alphas[slot] = alpha
        return self.seed_at(slot)

    def _newborn(self, slot: int, blueprint: Blueprint, blend: Blend) -> Seed:
        chain = list(self.chains[slot])
        if blueprint is Blueprint.CLONE:
            behind = [*self.chains[slot - 1], *chain] if slot else chain
            return CopiedBlocks(behind[-self.host.repeats[slot] :])
        if blueprint in HALVES_OF:
            units = HALVES_OF[blueprint] * max(1, self.first_units[slot] // 2)
            return NewUnits(narrow(chain[-1].branch, units))
        width = self.host.widths[slot]
        seed = build_blueprint(blueprint, self.host.topology, width, self.host.spatial_dims)
        return ReferenceSeed(
            seed, blend, BlendGate(width, self.host.spatial_dims) if blend is Blend.GATE else None
        )

    def prune(self, slot: int) -> None:
        """Take the seed out of a slot."""
        del self.seeds[str(slot)]
        self.alphas[slot] = 0.0

    def fold(self, slot: int) -> None:
        """Make the seed part of the host at full strength; the slot is empty again."""
        seed, chain = self.seed_at(slot), self.chains[slot]
        assert isinstance(chain, nn.ModuleList)
        if isinstance(seed, CopiedBlocks):
            chain.extend(seed.blocks)
        elif isinstance(seed, NewUnits):
            chain[-1] = Block(concatenate(chain[-1].branch, seed.branch))
        else:
            chain.append(seed)
        self.prune(slot)

    def seed_at(self, slot: int) -> Seed:
        seed = self.seeds[str(slot)]
        assert isinstance(seed, Seed)
        return seed

    def forward(self, x: Tensor, alphas: Sequence[float] | None = None) -> Tensor:
        """The member's answer; other alphas than its own may be asked for. A seed at alpha 0 is not run."""
        heard = self.alphas if alphas is None else alphas
        for slot, chain in enumerate(self.chains):
            x = given = self.trunk[slot](x)
            for part in chain:
                given = x if isinstance(part, Block) else given
                x = part(x, 1.0) if isinstance(part, ReferenceSeed) else part(x)
            if str(slot) in self.seeds and heard[slot] != 0:
                seed, alpha = self.seed_at(slot), float(heard[slot])
                x = x + alpha * seed.branch(given) if isinstance(seed, NewUnits) else seed(x, alpha)
        logits: Tensor = self.trunk[-1](x)
        return logits

    def shadow(self, slot: int) -> list[float]:
        """The alphas under which a seed trains in isolation: its own at 1."""
        return [1.0 if index == slot else alpha for index, alpha in enumerate(self.alphas)]


def _blocks(segment: nn.Module) -> list[Block]:
    """The residual block that a segment is or ends with."""
    last = segment[1] if isinstance(segment, EntrySegment) else segment
    return [last] if isinstance(last, Block) else []


def _without_block(segment: nn.Module) -> nn.Module:
    if not _blocks(segment):
        return segment
    return segment[0] if isinstance(segment, EntrySegment) else nn.Identity()


def narrow(branch: Branch, units: int) -> Branch:
    """A branch of the same kind with so many units, its weights yet to be loaded."""
    each = branch.second.weight.shape[1] // branch.units
    copies = 3 if isinstance(branch.middle, CausalAttention) else 1
    first, second = copy.deepcopy(branch.first), copy.deepcopy(branch.second)
    first.weight = nn.Parameter(first.weight.detach()[:1].repeat_interleave(copies * units * each, 0))
    if first.bias is not None:
        first.bias = nn.Parameter(first.bias.detach()[:1].repeat(copies * units * each))
    second.weight = nn.Parameter(second.weight.detach()[:, :1].repeat_interleave(units * each, 1))
    middle = CausalAttention(units) if isinstance(branch.middle, CausalAttention) else branch.middle
    return Branch(branch.norm, first, middle, second)


def concatenate(old: Branch, new: Branch) -> Branch:
    """One branch with the units of two, written out unit by unit."""
    wide = narrow(old, old.units + new.units)
    copies = 3 if isinstance(old.middle, CausalAttention) else 1

    def incoming(branch: Branch, name: str) -> Tensor:
        """The incoming weights or biases of a branch as [copies, outputs per copy, ...]."""
        values: Tensor = getattr(branch.first, name).detach()
        return values.reshape(copies, -1, *values.shape[1:])

    for name in ("weight", "bias"):
        target: nn.Parameter | None = getattr(wide.first, name)
        if target is None:
            continue
        rows = [
            row for k in range(copies) for branch in (old, new) for row in incoming(branch, name)[k]
        ]  # queries of both, keys of both, values of both
        target.data.copy_(torch.stack(rows))
    wide.second.weight.data.copy_(torch.cat([old.second.weight, new.second.weight], 1).detach())
    return wide


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy over samples and, for text, positions."""
    return nn.functional.cross_entropy(logits.flatten(0, -2), targets.flatten())
