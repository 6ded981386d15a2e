"""Write the weights of new seeds, and of seeds that are folded into their hosts.

Germinations and folds are asked for on the device while a step runs. They are carried out when the slots are
next read, because the host then knows which rows they concern: only these are touched, and initial weights
are drawn only for seeds that germinate.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from esper.lifecycle.actions import Blend, Blueprint
from esper.population.config import PopulationConfig
from esper.population.forms import HALVES, NO_FORM
from esper.population.network import RowNetwork
from esper.population.optimizer import RowWeights, moment_decays, moment_scale
from esper.population.plan.rows import Ints, to_device
from esper.utils.streams import SEED_MASK

SEED_BYTES = 1 << 28  # initial weights of one blueprint at one kind of slot take at most this much
HOST_BYTES = 1 << 30  # initial hosts that take more in sum are built anew for every episode


class InitialHosts:
    """Initial weights of hosts by number, kept for later episodes while they take little memory."""

    def __init__(self, network: RowNetwork, seed: int) -> None:
        self.network, self.seed = network, seed
        self._made: dict[int, tuple[Tensor, Tensor]] = {}  # by number

    def rows(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Return the hosts with these numbers and their blocks.  # [N] on the CPU → [N, P], [N, S, P]"""
        wanted: list[int] = numbers.tolist()
        for number in sorted(set(wanted) - self._made.keys()):
            # By a hash, so that neighbouring runs share no hosts.
            host, blocks = self.network.initial_host(hash((self.seed, number)) & SEED_MASK)
            self._made[number] = host.to(self.network.device), blocks.to(self.network.device)
        found = [self._made[number] for number in wanted]
        hosts, blocks = torch.stack([host for host, _ in found]), torch.stack([block for _, block in found])
        if sum(host.nbytes + blocks.nbytes for host, blocks in self._made.values()) > HOST_BYTES:
            self._made.clear()
        return hosts, blocks


class InitialSeeds:
    """Initial weights of seeds: a few draws for each blueprint and kind of slot, made when first needed."""

    def __init__(self, network: RowNetwork, seed: int, draws: int) -> None:
        """draws: at most this many of each blueprint at each kind of slot"""
        self.network, self.seed = network, seed
        self.draws = max(1, min(draws, SEED_BYTES // (4 * network.part_width)))
        self._rows = torch.zeros(0, network.part_width, device=network.device)
        self._kinds = np.array([network.slots.index(forms) for forms in network.slots])  # by first slot
        self._first = np.full((len(network.slots), len(Blueprint)), -1)  # the first draw of each kind

    def first(self, slot: Ints, blueprint: Ints) -> Ints:
        """Return where the draws of these seeds begin; missing ones are made.  # [k] each → [k]"""
        kinds = self._kinds[slot]
        new = self._first[kinds, blueprint] < 0
        for kind, name in sorted(set(zip(kinds[new].tolist(), blueprint[new].tolist(), strict=True))):
            # A hash of integers is the same in every process, so weights follow from the run's seed alone.
            seeds = [hash((self.seed, kind, name, d)) & SEED_MASK for d in range(self.draws)]
            made = torch.stack([self.network.initial_seed(kind, Blueprint(name), s) for s in seeds])
            self._first[kind, name] = len(self._rows)
            self._rows = torch.cat([self._rows, made.to(self._rows)])
        return self._first[kinds, blueprint]

    def rows(self, first: Tensor, words: Tensor) -> Tensor:
        """Return the draws that random words choose.  # [k] int64 each → [k, part_width]"""
        return self._rows[first + words.remainder(self.draws)]


@dataclass(frozen=True)
class SlotIndex:
    """Slots of members, k of them, on the host."""

    member: Ints  # [k]
    slot: Ints  # [k]

    def where(self, chosen: NDArray[np.bool_]) -> SlotIndex:
        """Return some of them.  # chosen [k]"""
        return SlotIndex(self.member[chosen], self.slot[chosen])


class PartEditor:
    """Writes germinations and folds into the rows of parts and into the table of forms.

    `form` [N, S, positions] and `blend` [N, S, positions - 1] are those on the host, changed in place by
    folds; position 0 is the seed. Rows of parts are ordered by position, then member, then slot.
    """

    def __init__(
        self, parts: RowWeights, network: RowNetwork, config: PopulationConfig, form: Ints, blend: Ints
    ) -> None:
        self.parts, self.network, self.config, self.form, self.blend = parts, network, config, form, blend
        self.folded: Ints = (form[:, :, 1:] != NO_FORM).sum(2)  # [N, S] parts of each slot; raised by folds

    def _rows(self, position: Ints | int, at: SlotIndex, slot: Ints | None = None) -> Tensor:
        """Return the rows of parts at a position of these slots, or of other slots of the members.  # [k]"""
        num_members, num_slots = self.form.shape[:2]
        rows = (position * num_members + at.member) * num_slots + (at.slot if slot is None else slot)
        return to_device(rows, self.parts.weights.device)

    def germinate(self, at: SlotIndex, blueprint: Ints, initial: InitialSeeds, words: Tensor) -> None:
        """Write initial weights and empty optimizer states.  # blueprint [k], words [N, S] random"""
        copied = blueprint == Blueprint.CLONE
        if not copied.all():
            fresh = at.where(~copied)
            first = initial.first(fresh.slot, blueprint[~copied])
            sent = to_device(np.stack([fresh.member, fresh.slot, first]), words.device)
            self.parts.rewrite_rows(self._rows(0, fresh), initial.rows(sent[2], words[sent[0], sent[1]]))
        clones = at.where(copied)
        for s in np.unique(clones.slot):
            some = clones.where(clones.slot == s)
            self.parts.rewrite_rows(self._rows(0, some), self._copied_blocks(some, int(s)))

    def _copied_blocks(self, at: SlotIndex, s: int) -> Tensor:
        """Return the weights of the last block of slot s, or of the last two, as rows of seeds.  # [k, P]"""
        slot, last = self.network.slots[s], self.folded[at.member, at.slot]
        rows = self.parts.weights[self._rows(last, at)]
        if slot.repeats == 1:
            return rows
        inside = last > 1  # else the first of the two blocks stands at the end of the slot ahead
        of = np.where(inside, s, s - 1)
        position = np.where(inside, last - 1, self.folded[at.member, of])
        lead, start = self.parts.weights[self._rows(position, at, of)], slot.pair_start
        # The row of a pair: the first block from column 0, the second from pair_start.
        return torch.cat([lead[:, :start], rows[:, : rows.shape[1] - start]], dim=1)

    def fold(self, at: SlotIndex, blend: Ints) -> None:
        """Fold fossils into their hosts: as a wider block, or as one more part behind the others.

        blend [k] of plain seeds. Raises ValueError where a slot is full.
        """
        codes, seed = self.network.codes, self.form[at.member, at.slot, 0]
        for s, form in sorted(set(zip(at.slot.tolist(), seed.tolist(), strict=True))):
            which = (at.slot == s) & (seed == form)
            some = at.where(which)
            if form in HALVES:
                self._widen(some, s, Blueprint(form))
            elif form >= codes.pair:
                lead, block = codes.blocks_of_pair(form)
                self._append(some, lead, int(Blend.ADD))
                self._append(some, block, int(Blend.ADD), self.network.slots[s].pair_start)
            else:
                self._append(some, form, int(Blend.ADD) if form >= codes.block else blend[which])
            self.form[some.member, some.slot, 0] = NO_FORM

    def _append(self, at: SlotIndex, form: int, blend: Ints | int, start: int = 0) -> None:
        """Move the rows of the seeds, from column `start` on, behind the parts of their slots."""
        self.folded[at.member, at.slot] += 1
        position = self.folded[at.member, at.slot]
        if position.max() >= self.form.shape[2]:
            member, most = int(at.member[position.argmax()]), self.form.shape[2] - 1
            raise ValueError(f"member {member} has a slot full of {most} parts; raise population.folds")
        self.parts.move_rows(self._rows(0, at), self._rows(position, at), start)
        self.form[at.member, at.slot, position] = form
        self.blend[at.member, at.slot, position - 1] = blend

    def _widen(self, at: SlotIndex, s: int, blueprint: Blueprint) -> None:
        """Put the units of the seeds beside those of the last blocks, with their moments."""
        width, last = self.network.slots[s].width, self.folded[at.member, at.slot]
        classes = self.form[at.member, at.slot, last]
        for form in np.unique(classes):
            some = at.where(classes == form)
            index = self.network.slots[s].fold_index(int(form), blueprint).to(self.parts.weights.device)
            source, target = self._rows(0, some), self._rows(last[classes == form], some)
            # A wider block keeps the step count of the old one; the moments of new units are rescaled to it.
            old, new = (self.parts.steps[rows].clamp(min=1.0).unsqueeze(1) for rows in (target, source))
            decays = moment_decays(self.config)
            scales = [torch.ones_like(old), *(moment_scale(decay, old, new) for decay in decays)]
            fields = (self.parts.weights, self.parts.first, self.parts.second)
            for field, scale in zip(fields, scales, strict=True):
                both = torch.cat([field[target, :width], field[source, :width] * scale], dim=1)
                wider = torch.zeros_like(field[target])
                wider[:, : index.shape[0]] = both[:, index]
                field.index_copy_(0, target, wider)
            self.form[some.member, some.slot, last[classes == form]] += HALVES[blueprint]
