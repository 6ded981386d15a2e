"""The governor: it takes a member whose training broke back to its last good rows.

Three signs of a break, each judged for a member alone: a loss that is not finite; a spike (far above what is
usual, several epochs in a row); a collapse back to chance. What grew since the snapshot is pruned, so that
the member does not walk into the same wall again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from esper.lifecycle.engine import force_prune
from esper.lifecycle.legality import holds_seed
from esper.lifecycle.slot_states import SlotEvidence, SlotStates
from esper.simic.bodies import Bodies
from esper.simic.config import GovernorConfig
from esper.simic.signals import Signals
from esper.utils.graphs import copy_all
from esper.utils.rows import choose, map_tensors, refill, tensors_of, under_prefix, with_prefix


@dataclass(frozen=True)
class MemberRows:
    """Everything that a member is apart from its bodies."""

    slots: SlotStates
    evidence: SlotEvidence
    signals: Signals


@dataclass(frozen=True)
class Watch:
    """What the governor remembers of each member."""

    window: Tensor  # [N, window] the latest losses that were no spikes, NaN = not yet
    spikes: Tensor  # [N] int64: spikes in a row
    learned: Tensor  # [N] bool: the loss has been well under that of chance

    @staticmethod
    def blank(num_members: int, config: GovernorConfig, device: torch.device) -> Watch:
        """Nothing has been seen of any member."""
        none = torch.zeros(num_members, dtype=torch.long, device=device)
        window = torch.full((num_members, config.window), math.nan, device=device)
        return Watch(window, none, none.bool())


@dataclass(frozen=True)
class Judgement:
    """What one epoch says about every member."""

    watch: Watch
    panicked: Tensor  # [N] bool: roll this member back
    good: Tensor  # [N] bool: nothing is odd, so its rows may be kept


def judge(
    watch: Watch, training_loss: Tensor, loss: Tensor, chance_loss: float, config: GovernorConfig
) -> Judgement:
    """Look at one epoch of every member.  # training_loss, loss [N]; chance_loss = ln(classes)"""
    finite = training_loss.isfinite() & loss.isfinite()
    spike = finite & _spikes(watch.window, loss, config)
    spikes = torch.where(spike, watch.spikes + 1, 0)
    near_chance = (loss - chance_loss).abs() <= config.collapse_band * chance_loss
    panicked = ~finite | (spikes >= config.spike_epochs) | (watch.learned & near_chance)
    usual = finite & ~spike & ~panicked
    shifted = torch.cat((watch.window[:, 1:], loss.unsqueeze(1)), dim=1)
    after = Watch(
        window=torch.where(usual.unsqueeze(1), shifted, watch.window),
        spikes=spikes.masked_fill(panicked, 0),
        learned=watch.learned | (finite & (loss < config.learned_share * chance_loss)),
    )
    return Judgement(after, panicked, usual)


def _spikes(window: Tensor, loss: Tensor, config: GovernorConfig) -> Tensor:
    """Losses far above what the window holds.  # [N] bool"""
    known = window.isfinite()
    count = known.sum(1).clamp(min=1)
    mean = window.nan_to_num(0.0).sum(1) / count
    gaps = torch.where(known, window - mean.unsqueeze(1), 0.0)
    deviation = (gaps.square().sum(1) / count).sqrt()
    far = (loss > mean + config.spike_deviations * deviation) & (loss > config.spike_ratio * mean)
    return far & (loss > config.spike_loss) & (known.sum(1) >= config.window_min)


def grown_since(saved: SlotStates, now: SlotStates, ticks: Tensor) -> Tensor:
    """Seeds that germinated, moved on, or became louder since a snapshot `ticks` [N] ago.  # [N, S] bool"""
    planted = ~holds_seed(saved) | (now.age != saved.age + ticks.unsqueeze(1))
    moved = (now.stage != saved.stage) | (now.alpha > saved.alpha)
    return holds_seed(now) & (planted | moved)


@dataclass(frozen=True)
class Vigil:
    """What the governor knows of each member, and the rows that it would be taken back to."""

    watch: Watch
    rows: MemberRows
    ticks: Tensor  # [N] since each member's rows were saved


@dataclass(frozen=True)
class Review:
    """What one epoch led to."""

    vigil: Vigil
    rows: MemberRows  # to go on with
    panicked: Tensor  # [N] bool: rolled back
    suspects: Tensor  # [N, S] bool: the seeds that this ended
    emptied: Tensor  # [N, S] bool: slots of the rolled back without a seed; the saved bodies may hold one
    kept: Tensor  # [N] bool: whose rows are the new ones to come back to


def review(
    vigil: Vigil,
    rows: MemberRows,
    training_loss: Tensor,
    active: Tensor,
    keeps: bool,
    chance_loss: float,
    config: GovernorConfig,
) -> Review:
    """Judge an epoch and choose the rows to go on with; the bodies are the caller's to take back and keep.

    active [N] bool: who trained; the others are neither judged nor kept. keeps: good rows are saved.
    """
    verdict = judge(vigil.watch, training_loss, rows.signals.loss, chance_loss, config)
    panicked, ticks = verdict.panicked & active, vigil.ticks + 1
    after, suspects = _rolled_back(vigil.rows, rows, panicked, ticks)
    kept = verdict.good & active & keeps
    # Whoever was rolled back stands at its snapshot again, less the seeds that were just pruned.
    saved, ticks = choose(panicked | kept, after, vigil.rows), ticks.masked_fill(panicked | kept, 0)
    emptied = panicked.unsqueeze(1) & ~holds_seed(after.slots)
    return Review(Vigil(verdict.watch, saved, ticks), after, panicked, suspects, emptied, kept)


def _rolled_back(
    saved: MemberRows, rows: MemberRows, panicked: Tensor, ticks: Tensor
) -> tuple[MemberRows, Tensor]:
    """Saved rows for those who panicked, less what grew since; and which seeds that ended.  # → [N, S]"""
    suspects = panicked.unsqueeze(1) & grown_since(saved.slots, rows.slots, ticks)
    taken_back, present = panicked.unsqueeze(1) & ~suspects, rows.slots.tensors()
    undone = SlotStates(
        **{n: torch.where(taken_back, value, present[n]) for n, value in saved.slots.tensors().items()}
    )
    room = torch.where(panicked.unsqueeze(1), saved.slots.room, rows.slots.room)  # a fold since is undone
    after = MemberRows(
        slots=force_prune(undone.replace(room=room), suspects),
        evidence=choose(panicked, saved.evidence, rows.evidence).forget(suspects),
        signals=choose(panicked, saved.signals, rows.signals),
    )
    return after, suspects


class Governor:
    """Keeps the last good rows of every member and puts them back where training broke.

    What it knows is written in place, so that `settle` can be part of something that is captured.
    """

    def __init__(
        self,
        config: GovernorConfig,
        bodies: Bodies,
        rows: MemberRows,
        chance_loss: float,
        in_place: bool = False,
    ) -> None:
        """in_place: saved bodies are written over, as something captured needs it."""
        self.config, self._in_place = config, in_place
        self.bodies = bodies
        self.chance_loss = chance_loss
        self._saved: dict[str, Tensor] = {}  # the last good ones
        self.vigil = map_tensors(torch.clone, self._blank(rows))
        self.begin(rows)

    def _blank(self, rows: MemberRows) -> Vigil:
        """Nothing was seen yet, and these rows are the last good ones."""
        watch = Watch.blank(self.bodies.num_members, self.config, self.bodies.device)
        return Vigil(watch, rows, torch.zeros_like(watch.spikes))

    def begin(self, rows: MemberRows) -> None:
        """A new episode: the rows and bodies of now are the last good ones of every member."""
        self._know(self._blank(rows))
        self._reviews = 0
        if self._saved and self._in_place:
            copy_all(self._saved.values(), self.bodies.tensors().values())
        elif self.config.enabled:
            self._saved = self.bodies.snapshot()

    def _know(self, vigil: Vigil) -> None:
        copy_all(tensors_of(self.vigil).values(), tensors_of(vigil).values())

    def keeps_next(self) -> bool:
        """One more epoch: whether good rows are kept after it."""
        self._reviews += 1
        return self.config.enabled and self._reviews % self.config.snapshot_every == 0

    def settle(
        self, rows: MemberRows, training_loss: Tensor, active: Tensor, keeps: bool
    ) -> tuple[MemberRows, Tensor, Tensor]:
        """The rows to go on with, who was rolled back [N], and the seeds that this ended [N, S].

        active [N] bool: who trained; the others are neither judged nor kept. keeps: good rows are kept now.
        """
        if not self.config.enabled:
            nobody = torch.zeros_like(active)
            return rows, nobody, torch.zeros_like(rows.slots.enabled)
        found = review(self.vigil, rows, training_loss, active, keeps, self.chance_loss, self.config)
        self._know(found.vigil)
        self._take_back(found.panicked, found.emptied, found.kept, keeps)
        return found.rows, found.panicked, found.suspects

    def _take_back(self, panicked: Tensor, emptied: Tensor, kept: Tensor, keeps: bool) -> None:
        """Take back the bodies of those who panicked, and keep those that are good: see `Review`."""
        live = self.bodies
        # Births are counted on: the next seed is another draw, not the one that just failed.
        live.restore({**self._saved, "births": live.births}, panicked)
        live.prune(emptied)
        if keeps:
            self._saved = live.keep(self._saved, kept)

    def state_dict(self) -> dict[str, Tensor]:
        """Everything that it remembers, as plain tensors."""
        return {
            **with_prefix("watch", tensors_of(map_tensors(torch.clone, self.vigil.watch))),
            **with_prefix("rows", tensors_of(map_tensors(torch.clone, self.vigil.rows))),
            **with_prefix("bodies", self._saved),
            "ticks": self.vigil.ticks.clone(),
            "reviews": torch.tensor(self._reviews),
        }

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        """The inverse of `state_dict`; names and shapes are the caller's to check."""
        watch, rows = (
            refill(self.vigil.watch, under_prefix("watch", tensors)),
            refill(self.vigil.rows, under_prefix("rows", tensors)),
        )
        self._know(Vigil(watch, rows, tensors["ticks"]))
        bodies = under_prefix("bodies", tensors)
        if self._in_place:
            copy_all(self._saved.values(), [bodies[name] for name in self._saved])
        else:
            self._saved = {name: value.to(self.bodies.device) for name, value in bodies.items()}
        self._reviews = int(tensors["reviews"])
