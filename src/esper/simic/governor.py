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

from esper.foundation.rows import choose, named, part, refill, tensors_of
from esper.lifecycle.engine import force_prune
from esper.lifecycle.evidence import SlotEvidence
from esper.lifecycle.legality import holds_seed
from esper.lifecycle.slot_states import SlotStates
from esper.population.population import Population
from esper.simic.config import GovernorConfig
from esper.simic.signals import Signals


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


class Governor:
    """Keeps the last good rows of every member and puts them back where training broke."""

    def __init__(self, config: GovernorConfig, population: Population, rows: MemberRows, chance_loss: float):
        self.config = config
        self.population = population
        self.chance_loss = chance_loss
        self.watch = Watch.blank(population.num_members, config, population.device)
        self._rows = rows
        self._bodies = population.snapshot() if config.enabled else {}
        self._ticks = torch.zeros_like(self.watch.spikes)  # [N] since each member's rows were saved
        self._reviews = 0

    def review(
        self, rows: MemberRows, training_loss: Tensor, active: Tensor
    ) -> tuple[MemberRows, Tensor, Tensor]:
        """The rows to go on with, who was rolled back [N], and the seeds that this ended [N, S].

        active [N] bool: who trained; the others are neither judged nor kept.
        """
        if not self.config.enabled:
            nobody = torch.zeros_like(self.watch.learned)
            return rows, nobody, torch.zeros_like(rows.slots.enabled)
        verdict = judge(self.watch, training_loss, rows.signals.loss, self.chance_loss, self.config)
        self.watch = verdict.watch
        panicked = verdict.panicked & active
        self._ticks += 1
        rows, pruned = self._roll_back(rows, panicked)
        # Whoever was rolled back stands at its snapshot again, less the seeds that were just pruned.
        self._rows = choose(panicked, rows, self._rows)
        self._ticks = self._ticks.masked_fill(panicked, 0)
        self._reviews += 1
        if self._reviews % self.config.snapshot_every == 0:
            self._keep(rows, verdict.good & active)
        return rows, panicked, pruned

    def _roll_back(self, rows: MemberRows, panicked: Tensor) -> tuple[MemberRows, Tensor]:
        """Saved rows for those who panicked, less what grew since."""
        saved, now = self._rows.slots, rows.slots
        suspects = panicked.unsqueeze(1) & grown_since(saved, now, self._ticks)
        taken_back, present = panicked.unsqueeze(1) & ~suspects, now.tensors()
        undone = SlotStates(
            **{n: torch.where(taken_back, value, present[n]) for n, value in saved.tensors().items()}
        )
        room = torch.where(panicked.unsqueeze(1), saved.room, now.room)  # a fold since then is undone
        slots = force_prune(undone.replace(room=room), suspects)
        # Births are counted on: the next seed is another draw, not the one that just failed.
        self.population.restore({**self._bodies, "births": self.population.births}, panicked)
        self.population.prune(panicked.unsqueeze(1) & ~holds_seed(slots))  # a snapshot may hold ended seeds
        after = MemberRows(
            slots=slots,
            evidence=choose(panicked, self._rows.evidence, rows.evidence).forget(suspects),
            signals=choose(panicked, self._rows.signals, rows.signals),
        )
        return after, suspects

    def _keep(self, rows: MemberRows, good: Tensor) -> None:
        """These are the rows to come back to."""
        self._rows = choose(good, rows, self._rows)
        self._ticks = self._ticks.masked_fill(good, 0)
        self._bodies = self.population.keep(self._bodies, good)

    def state_dict(self) -> dict[str, Tensor]:
        """Everything that it remembers, as plain tensors."""
        return {
            **named("watch", tensors_of(self.watch)),
            **named("rows", tensors_of(self._rows)),
            **named("bodies", self._bodies),
            "ticks": self._ticks.clone(),
            "reviews": torch.tensor(self._reviews),
        }

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        """The inverse of `state_dict`; names and shapes are the caller's to check."""
        self.watch = refill(self.watch, part("watch", tensors))
        self._rows = refill(self._rows, part("rows", tensors))
        self._bodies = {n: value.to(self.population.device) for n, value in part("bodies", tensors).items()}
        self._ticks = tensors["ticks"].to(self._ticks.device)
        self._reviews = int(tensors["reviews"])
