"""Which parts every row of work meets, station by station."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from esper.lifecycle.actions import NUM_BLUEPRINTS
from esper.population.forms import NO_FORM
from esper.population.plan import NO_ROW, Bools, Floats, Ints, Rows, SlotView


@dataclass(frozen=True)
class Entries:
    """The (row, station) pairs that meet a part, by station, then form, those that learn first."""

    row: Ints  # [E]
    at: Ints  # [E] the station
    member: Ints  # [E]
    form: Ints  # [E]
    held: Bools  # [E] the weights are held fixed there
    part: Ints  # [E]
    alpha: Floats  # [E]
    blend: Ints  # [E]
    source: Ints  # [E] the incoming row
    fork: Ints  # [R] the station where a row joins, -1 for own rows

    @staticmethod
    def of(rows: Rows, met: Stations) -> Entries:
        view, places = met.view, met.places
        fork, shadow_at = (
            np.where(slot < 0, NO_ROW, (slot + 1) * places - 1) for slot in (rows.fork, rows.shadow_slot)
        )
        heard = met.folded[rows.member]  # [R, V]
        heard[:, met.seeds] = rows.alpha > 0
        own = np.searchsorted(fork, NO_ROW, side="right")
        heard[own:] &= np.arange(met.count) >= fork[own:, None]
        row, at = np.divmod(np.flatnonzero(heard), met.count)  # faster than over two axes
        member = rows.member[row]
        form = view.form[member, at // places, (at + 1) % places]
        if (shadow_at[own:] == NO_ROW).any():  # rows that measure: a part learns in the first that meets it
            held = _met_before(view.part[member, at // places, (at + 1) % places])
        else:  # in a shadow all but its own seed is held fixed
            held = (row >= own) & (shadow_at[row] != at)
        order = _order((at * (form.max(initial=0) + 1) + form) * 2 + held)
        row, at, member = row[order], at[order], member[order]
        slot, place = at // places, (at + 1) % places
        return Entries(
            row=row,
            at=at,
            member=member,
            form=form[order],
            held=held[order],
            part=view.part[member, slot, place],
            alpha=np.where(place == 0, rows.alpha[row, slot], 1.0),
            blend=view.blend[member, slot, place],
            source=np.where(fork[row] == at, member, row),
            fork=fork,
        )


@dataclass(frozen=True)
class Stations:
    """The places of all slots in the order in which rows meet them: folded parts first, the seed last."""

    view: SlotView
    folded: Bools  # [N, V] where something was folded in
    seeds: Ints  # [S] the stations of the seeds
    places: int  # of a slot

    @staticmethod
    def of(view: SlotView) -> Stations:
        num_members, num_slots, places = view.form.shape
        folded = np.zeros(view.form.shape, dtype=bool)
        folded[:, :, :-1] = view.form[:, :, 1:] != NO_FORM
        seeds = np.arange(1, num_slots + 1) * places - 1
        return Stations(view, folded.reshape(num_members, -1), seeds, places)

    @cached_property
    def last_block(self) -> Ints:
        """The place of the last residual block that was folded into each slot, 0 for none.  # [N, S]"""
        is_block = self.view.form[:, :, 1:] >= NUM_BLUEPRINTS
        place: Ints = (is_block * np.arange(1, self.places)).max(axis=2, initial=0)
        return place

    @property
    def count(self) -> int:
        return int(self.folded.shape[1])

    def place(self, station: int) -> int:
        """The place of a slot that a station stands for: 1 and up, then 0, the seed."""
        return (station + 1) % self.places


def _met_before(part: Ints) -> Bools:
    """Whether each was there before.  # [E] → [E]"""
    number, first = np.arange(len(part)), np.zeros(int(part.max(initial=-1)) + 1, dtype=np.int64)
    first[part[::-1]] = number[::-1]
    before: Bools = first[part] != number
    return before


def _order(keys: Ints) -> Ints:
    """What puts keys in ascending order, equal ones as they come; numpy counts small numbers out."""
    small = np.int16 if keys.max(initial=0) < 1 << 15 else np.int64
    return np.argsort(keys.astype(small), kind="stable")
