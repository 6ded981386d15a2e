"""Births and folds: what changes in the rows of parts when a seed germinates or becomes part of its host.

Both are asked for on the device while a step runs and carried out at the next look at the slots, when the
host knows which rows they concern: nothing else is touched, and first weights are drawn only for seeds that
are born.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from esper.lifecycle.actions import Blend, Blueprint
from esper.population.bodies import Bodies
from esper.population.config import PopulationConfig
from esper.population.first_weights import SeedBank
from esper.population.forms import HALVES, NO_FORM
from esper.population.optimizer import RowWeights, moment_decays
from esper.population.plan import Ints, ship
from esper.utils.streams import normal_of


@dataclass(frozen=True)
class Events:
    """Slots in which something happens, k of them, on the host."""

    member: Ints  # [k]
    slot: Ints  # [k]

    def those(self, where: NDArray[np.bool_]) -> Events:
        """Some of them.  # where [k]"""
        return Events(self.member[where], self.slot[where])


class Surgeon:
    """Writes births and folds into the rows of parts and into the table of forms.

    `form` [N, S, places] and `blend` [N, S, places - 1] are those on the host, changed in place by folds;
    place 0 is the seed. Rows of parts lie place by place, then member by member, then slot by slot.
    """

    def __init__(
        self, parts: RowWeights, bodies: Bodies, config: PopulationConfig, form: Ints, blend: Ints
    ) -> None:
        self.parts, self.bodies, self.config, self.form, self.blend = parts, bodies, config, form, blend

    @cached_property
    def folded(self) -> Ints:
        """How many parts stand behind each other; counted up by folds.  # [N, S]"""
        count: Ints = (self.form[:, :, 1:] != NO_FORM).sum(2)
        return count

    def _places(self, place: Ints | int, at: Events, slot: Ints | None = None) -> Ints:
        """The rows of parts at a place of these slots, or of other slots of the same members.  # [k]"""
        num_members, num_slots = self.form.shape[:2]
        rows: Ints = (place * num_members + at.member) * num_slots + (at.slot if slot is None else slot)
        return rows

    def _rows(self, place: Ints | int, at: Events, slot: Ints | None = None) -> Tensor:
        """The same on the device.  # [k]"""
        return ship(self._places(place, at, slot), self.parts.weights.device)

    def bear(self, at: Events, blueprint: Ints, bank: SeedBank, picks: Tensor) -> None:
        """First weights and clean optimizers for new seeds.  # blueprint [k], picks [N, S] random words"""
        copied = blueprint == Blueprint.CLONE
        if self.config.widen_copies > 0:
            copied |= np.isin(blueprint, tuple(HALVES))
        if not copied.all():
            fresh = at.those(~copied)
            first = bank.first(fresh.slot, blueprint[~copied])
            rows = self._places(0, fresh)
            sent = ship(np.stack([fresh.member, fresh.slot, first, rows]), picks.device)
            self.parts.rewrite_rows(sent[3], bank.rows(sent[2], picks[sent[0], sent[1]]))
        for s, name in sorted(set(zip(at.slot[copied].tolist(), blueprint[copied].tolist(), strict=True))):
            which = (at.slot == s) & (blueprint == name)
            some = at.those(which)
            clones = name == Blueprint.CLONE
            weights = self._copies(some, s) if clones else self._copied_units(some, s, Blueprint(name))
            if self.config.copy_noise > 0:
                keys = picks[ship(some.member, picks.device), ship(some.slot, picks.device)]  # [k]
                noise = normal_of(keys, weights.shape[1]).to(weights)
                weights = weights * (1.0 + self.config.copy_noise * noise)
            self.parts.rewrite_rows(self._rows(0, some), weights)

    def _copied_units(self, at: Events, s: int, blueprint: Blueprint) -> Tensor:
        """Units of the last block of slot s as rows of seeds, in pairs that say nothing.  # [k, P]"""
        last = self.folded[at.member, at.slot]
        blocks, classes = self.parts.weights[self._rows(last, at)], self.form[at.member, at.slot, last]
        rows = torch.zeros_like(blocks)
        for form in np.unique(classes):
            index, factor = self.bodies.slots[s].copy_index(int(form), blueprint, self.config.widen_copies)
            some = ship(np.flatnonzero(classes == form), rows.device)
            copied = blocks[some][:, index.to(rows.device)] * factor.to(rows)
            rows[some, : index.shape[0]] = copied
        return rows

    def _copies(self, at: Events, s: int) -> Tensor:
        """The weights of the last block of slot s, or of the last two, as rows of seeds.  # [k, P]"""
        slot, last = self.bodies.slots[s], self.folded[at.member, at.slot]
        rows = self.parts.weights[self._rows(last, at)]
        if slot.repeats == 1:
            return rows
        inside = last > 1  # else the leading block stands at the end of the slot ahead
        of = np.where(inside, s, s - 1)
        place = np.where(inside, last - 1, self.folded[at.member, of])
        lead, start = self.parts.weights[self._rows(place, at, of)], slot.pair_start
        return torch.cat([lead[:, :start], rows[:, : rows.shape[1] - start]], dim=1)

    def fold(self, at: Events, blend: Ints) -> None:
        """Fossils become part of the host: a wider block, or one more part behind the others.

        blend [k] of plain seeds. Raises ValueError where a slot is full.
        """
        codes, seed = self.bodies.codes, self.form[at.member, at.slot, 0]
        for s, form in sorted(set(zip(at.slot.tolist(), seed.tolist(), strict=True))):
            which = (at.slot == s) & (seed == form)
            some = at.those(which)
            if form in tuple(HALVES):
                self._widen(some, s, Blueprint(form))
            elif form >= codes.pair:
                lead, block = divmod(form - codes.pair, codes.classes)
                self._append(some, codes.lead + lead, int(Blend.ADD))
                self._append(some, codes.block + block, int(Blend.ADD), self.bodies.slots[s].pair_start)
            else:
                self._append(some, form, int(Blend.ADD) if form >= codes.block else blend[which])
            self.form[some.member, some.slot, 0] = NO_FORM

    def _append(self, at: Events, form: int, blend: Ints | int, start: int = 0) -> None:
        """The rows of the seeds, from a column on, behind what stands there already."""
        self.folded[at.member, at.slot] += 1
        place = self.folded[at.member, at.slot]
        if place.max() >= self.form.shape[2]:
            member, most = int(at.member[place.argmax()]), self.form.shape[2] - 1
            raise ValueError(
                f"a slot of member {member} holds {most} folded parts and has no place for another; raise "
                "population.folds"
            )
        self.parts.move_rows(self._rows(0, at), self._rows(place, at), start)
        self.form[at.member, at.slot, place] = form
        self.blend[at.member, at.slot, place - 1] = blend

    def _widen(self, at: Events, s: int, blueprint: Blueprint) -> None:
        """The units of the seeds beside those of the last blocks.

        Moments come along; those of the new units are brought to the step count of the old ones.
        """
        width, last = self.bodies.slots[s].width, self.folded[at.member, at.slot]
        classes = self.form[at.member, at.slot, last]
        for form in np.unique(classes):
            some = at.those(classes == form)
            index = self.bodies.slots[s].fold_index(int(form), blueprint).to(self.parts.weights.device)
            source, target = self._rows(0, some), self._rows(last[classes == form], some)
            old, new = (self.parts.steps[rows].clamp(min=1.0).unsqueeze(1) for rows in (target, source))
            decays = moment_decays(self.config)
            scales = [torch.ones_like(old), *((1 - decay**old) / (1 - decay**new) for decay in decays)]
            fields = (self.parts.weights, self.parts.first, self.parts.second)
            for field, scale in zip(fields, scales, strict=True):
                both = torch.cat([field[target, :width], field[source, :width] * scale], dim=1)
                wider = torch.zeros_like(field[target])
                wider[:, : index.shape[0]] = both[:, index]
                field.index_copy_(0, target, wider)
            self.form[some.member, some.slot, last[classes == form]] += HALVES[blueprint]
