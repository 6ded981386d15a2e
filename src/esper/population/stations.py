"""Which parts every row of work meets, station by station."""

from __future__ import annotations

from dataclasses import dataclass

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
        alpha_at = met.alpha[rows.member]  # [R, V]
        alpha_at[:, met.seeds] = rows.alpha
        fork, shadow_at = (
            np.where(slot < 0, NO_ROW, (slot + 1) * met.places - 1) for slot in (rows.fork, rows.shadow_slot)
        )
        row, at = np.nonzero((alpha_at > 0) & (np.arange(met.count) >= fork[:, None]))
        form = met.form[rows.member[row], at]
        held = (shadow_at[row] != NO_ROW) & (shadow_at[row] != at)
        if ((fork != NO_ROW) & (shadow_at == NO_ROW)).any():  # rows that measure: the first that meets a part
            first = np.unique(met.part[rows.member[row], at], return_index=True)[1]
            held = ~np.isin(np.arange(len(row)), first)
        order = np.lexsort((held, form, at))
        row, at = row[order], at[order]
        member = rows.member[row]
        return Entries(
            row=row,
            at=at,
            member=member,
            form=form[order],
            held=held[order],
            part=met.part[member, at],
            alpha=alpha_at[row, at],
            blend=met.blend[member, at],
            source=np.where(fork[row] == at, member, row),
            fork=fork,
        )


@dataclass(frozen=True)
class Stations:
    """The places of all slots in the order in which rows meet them: folded parts first, the seed last."""

    alpha: Floats  # [N, V] of what was folded in: 1, or 0 where nothing was
    form: Ints  # [N, V]
    blend: Ints  # [N, V]
    part: Ints  # [N, V]
    seeds: Ints  # [S] the stations of the seeds
    places: int  # of a slot
    last_block: Ints  # [N, S] the place of the last residual block that was folded in, 0 for none

    @staticmethod
    def of(view: SlotView) -> Stations:
        num_members, num_slots, places = view.form.shape
        form, blend, part = (
            np.concatenate([field[:, :, 1:], field[:, :, :1]], axis=2).reshape(num_members, -1)
            for field in (view.form, view.blend, view.part)
        )
        seeds = np.arange(1, num_slots + 1) * places - 1
        alpha = (form != NO_FORM).astype(np.float64)
        alpha[:, seeds] = 0.0
        is_block = view.form[:, :, 1:] >= NUM_BLUEPRINTS
        last_block = (is_block * np.arange(1, places)).max(axis=2, initial=0)
        return Stations(alpha, form, blend, part, seeds, places, last_block)

    @property
    def count(self) -> int:
        return int(self.form.shape[1])

    def place(self, station: int) -> int:
        """The place of a slot that a station stands for: 1 and up, then 0, the seed."""
        return (station % self.places + 1) % self.places
