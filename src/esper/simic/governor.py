"""The governor: it takes a member whose training broke back to its last good state.

Three signs of a break, each judged for a member alone: a loss that is not finite; a spike (far above what is
usual, several epochs in a row); a collapse back to chance. What grew since the snapshot is pruned, so that
the same failure is not repeated.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from esper.lifecycle.engine import force_prune
from esper.lifecycle.legality import holds_seed
from esper.lifecycle.slot_states import SlotStates
from esper.simic.bodies import Bodies
from esper.simic.config import GovernorConfig
from esper.simic.state import MemberState
from esper.utils.graphs import copy_all
from esper.utils.rows import add_prefix, map_tensors, refill, strip_prefix, tensors_of, where_rows

WINDOW = 20  # losses that a spike is judged against
WINDOW_MIN = 10  # losses needed before anything is a spike: a standard deviation of fewer says little
# A spike is all three at once. Six deviations and three means leave the noise of minibatches alone, and no
# built-in task has a loss of 12 unless its network is worse than chance.
SPIKE_LOSS = 12.0
SPIKE_DEVIATIONS = 6.0
SPIKE_RATIO = 3.0
SPIKE_EPOCHS = 3  # epochs in a row that make spikes a panic: most recover by themselves
LEARNED_SHARE = 0.6  # a loss below this share of ln(classes) has left chance
COLLAPSE_BAND = 0.065  # a loss within this share of ln(classes) is chance again


@dataclass(frozen=True)
class LossHistory:
    """What the governor remembers of each member's losses."""

    window: Tensor  # [N, window] the latest losses that were no spikes, NaN = not yet
    spikes: Tensor  # [N] int64: spikes in a row
    learned: Tensor  # [N] bool: the loss has been well under that of chance

    @staticmethod
    def empty(num_members: int, device: torch.device) -> LossHistory:
        """Return a history without any loss."""
        none = torch.zeros(num_members, dtype=torch.long, device=device)
        window = torch.full((num_members, WINDOW), math.nan, device=device)
        return LossHistory(window, none, none.bool())


def judge(
    history: LossHistory, training_loss: Tensor, loss: Tensor, chance_loss: float
) -> tuple[LossHistory, Tensor, Tensor]:
    """Judge one epoch of every member.  # training_loss, loss [N]; chance_loss = ln(classes)

    Returns the history after it, whom to roll back [N] bool, and whose state may be kept [N] bool.
    """
    finite = training_loss.isfinite() & loss.isfinite()
    spike = finite & _spikes(history.window, loss)
    spikes = torch.where(spike, history.spikes + 1, 0)
    near_chance = (loss - chance_loss).abs() <= COLLAPSE_BAND * chance_loss
    panicked = ~finite | (spikes >= SPIKE_EPOCHS) | (history.learned & near_chance)
    usual = finite & ~spike & ~panicked
    shifted = torch.cat((history.window[:, 1:], loss.unsqueeze(1)), dim=1)
    after = LossHistory(
        window=torch.where(usual.unsqueeze(1), shifted, history.window),
        spikes=spikes.masked_fill(panicked, 0),
        learned=history.learned | (finite & (loss < LEARNED_SHARE * chance_loss)),
    )
    return after, panicked, usual


def _spikes(window: Tensor, loss: Tensor) -> Tensor:
    """Find losses far above those of the window.  # [N] bool"""
    known = window.isfinite()
    count = known.sum(1).clamp(min=1)
    mean = window.nan_to_num(0.0).sum(1) / count
    gaps = torch.where(known, window - mean.unsqueeze(1), 0.0)
    deviation = (gaps.square().sum(1) / count).sqrt()
    far = (loss > mean + SPIKE_DEVIATIONS * deviation) & (loss > SPIKE_RATIO * mean)
    return far & (loss > SPIKE_LOSS) & (known.sum(1) >= WINDOW_MIN)


def grown_since(saved: SlotStates, now: SlotStates, ticks: Tensor) -> Tensor:
    """Find seeds that began, moved on, or got a larger alpha, `ticks` [N] after a snapshot.  # [N, S]"""
    # Another seed in the same slot shows by its age.
    planted = ~holds_seed(saved) | (now.age != saved.age + ticks.unsqueeze(1))
    moved = (now.stage != saved.stage) | (now.alpha > saved.alpha)
    return holds_seed(now) & (planted | moved)


def roll_back(
    saved: MemberState, state: MemberState, panicked: Tensor, ticks: Tensor
) -> tuple[MemberState, Tensor]:
    """Return the saved state for those who panicked, less what grew since, and the seeds that this ended.

    panicked [N] bool; ticks [N] since the state was saved → the state and [N, S] bool
    """
    suspects = panicked.unsqueeze(1) & grown_since(saved.slots, state.slots, ticks)
    # An older seed that made way for a suspect, as a fossil does that is folded, comes back.
    replaced = holds_seed(saved.slots) & (state.slots.age != saved.slots.age + ticks.unsqueeze(1))
    pruned = suspects & ~replaced
    taken_back = panicked.unsqueeze(1) & ~pruned
    undone = where_rows(taken_back, saved.slots, state.slots)
    # A fold since the snapshot is undone with the bodies, so its room is free again.
    room = torch.where(panicked.unsqueeze(1), saved.slots.room, state.slots.room)
    slots = force_prune(undone.replace(room=room), pruned)
    after = where_rows(panicked, replace(saved, slots=slots), replace(state, slots=slots))
    return replace(after, evidence=after.evidence.forget(pruned)), suspects


@dataclass(frozen=True)
class GovernorState:
    """What the governor knows of each member, and the state that it would be taken back to."""

    losses: LossHistory
    saved: MemberState
    ticks: Tensor  # [N] since each member's state was saved


class Governor:
    """Keep the last good state of every member and put it back where training broke.

    What it knows is written in place, so that `review` can be captured in a CUDA graph.
    """

    def __init__(
        self, config: GovernorConfig, bodies: Bodies, state: MemberState, chance_loss: float
    ) -> None:
        """Save the first state."""
        self.config, self.bodies, self.chance_loss = config, bodies, chance_loss
        self._saved_bodies: dict[str, Tensor] = {}
        self.state = map_tensors(torch.clone, self._initial(state))
        self.begin(state)

    def _initial(self, state: MemberState) -> GovernorState:
        losses = LossHistory.empty(self.bodies.num_members, self.bodies.device)
        return GovernorState(losses, state, torch.zeros_like(losses.spikes))

    def begin(self, state: MemberState) -> None:
        """Start an episode: the present state and bodies are the last good ones of every member."""
        self._set(self._initial(state))
        if self._saved_bodies and self.bodies.replays:  # a captured review reads these very tensors
            copy_all(self._saved_bodies.values(), self.bodies.tensors().values())
        elif self.config.enabled:
            self._saved_bodies = self.bodies.snapshot()

    def _set(self, state: GovernorState) -> None:
        copy_all(tensors_of(self.state).values(), tensors_of(state).values())

    def review(
        self, state: MemberState, training_loss: Tensor, active: Tensor
    ) -> tuple[MemberState, Tensor, Tensor]:
        """Judge an epoch, roll back where it broke, and save where it is good.

        active [N] bool: who trained; the others are neither judged nor saved.
        Returns the state to go on with, who was rolled back [N], and the seeds that this ended [N, S].
        """
        if not self.config.enabled:
            return state, torch.zeros_like(active), torch.zeros_like(state.slots.enabled)
        known, bodies = self.state, self.bodies
        losses, panicked, usual = judge(known.losses, training_loss, state.history.loss, self.chance_loss)
        panicked, good, ticks = panicked & active, usual & active, known.ticks + 1
        after, suspects = roll_back(known.saved, state, panicked, ticks)
        # Whoever was rolled back is at its snapshot again, less the seeds that were just pruned.
        saved, ticks = where_rows(panicked | good, after, known.saved), ticks.masked_fill(panicked | good, 0)
        self._set(GovernorState(losses, saved, ticks))
        # Births are counted on: the next seed is another draw, not the one that just failed.
        bodies.restore({**self._saved_bodies, "births": bodies.births}, panicked)
        bodies.prune(panicked.unsqueeze(1) & ~holds_seed(after.slots))  # the saved bodies may hold a seed
        self._saved_bodies = bodies.keep(self._saved_bodies, good)
        return after, panicked, suspects

    def state_dict(self) -> dict[str, Tensor]:
        return {**add_prefix("state", tensors_of(self.state)), **add_prefix("bodies", self._saved_bodies)}

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        """Load what `state_dict` returned; names and shapes are the caller's to check."""
        self._set(refill(self.state, strip_prefix("state", tensors)))
        bodies = strip_prefix("bodies", tensors)
        if self.bodies.replays:
            copy_all(self._saved_bodies.values(), [bodies[name] for name in self._saved_bodies])
        else:
            self._saved_bodies = {name: value.to(self.bodies.device) for name, value in bodies.items()}
