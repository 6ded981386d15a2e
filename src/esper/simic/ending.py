"""The end of a growth: the better of the best and the last epoch, with every seed kept or taken out.

The validation data are dealt into 20 blocks. On each block the score of the network is measured with and
without a seed, all others being there at full strength. A seed earns its place if the mean of the differences
is above 0 at 99 % by a one-sided t test. The seed that is furthest from passing is taken out first and the
others are measured again, until all that are left pass. From the second on, a seed also stays if it and those
that were taken out before it are shown in the same way to help together: several losses that are each within
the noise can add up to one that is not. The 1 % is divided by the number of these tests: one for each seed
that was planted in that network, and one more for each that lives at the end, but for the first. What cannot
be shown to help is taken out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from scipy.special import stdtrit
from torch import Tensor

from esper.lifecycle.legality import holds_seed
from esper.lifecycle.slot_states import SlotStates
from esper.lifecycle.stages import Stage
from esper.simic.bodies import BlockScores
from esper.simic.environment import Environment, StepResult
from esper.simic.state import MemberState
from esper.utils.rows import add_prefix, refill, strip_prefix, tensors_of, where_rows

LEVEL = 0.01  # the chance, for a whole network, that a useless seed stays
BLOCKS = 20  # into which the validation data are dealt


def decide_seeds(
    measure: Callable[[Tensor], BlockScores], alive: Tensor, planted: Tensor
) -> tuple[Tensor, Tensor]:
    """Decide which living seeds stay.

    measure: the scores of networks with the seeds of a mask [N, S]; alive [N, S] bool; planted [N]: how many
    seeds each network has had.
    Returns which stay [N, S] bool, and each seed's gain in points of score when it was last measured [N, S],
    NaN where no seed was.
    """
    # Bonferroni: the level of a network is divided by its number of tests.
    kept, level = alive.clone(), LEVEL / (planted + alive.sum(dim=1) - 1).clamp(min=1)
    gain = torch.full(alive.shape, float("nan"), device=alive.device)
    all_alive: Tensor | None = None  # [blocks, N] the score with every seed
    while bool(kept.any()):
        scores = measure(kept)
        all_alive = scores.whole if all_alive is None else all_alive
        # What is lost without this seed and without all that were taken out before it.
        together = (all_alive - scores.whole).unsqueeze(2) + scores.worth  # [blocks, N, S]
        mean, low = lower_bounds(scores.worth, level)
        low = torch.maximum(low, lower_bounds(together, level)[1])
        gain = torch.where(kept, mean, gain)
        worst = low.nan_to_num(-torch.inf).masked_fill(~kept, torch.inf).min(dim=1, keepdim=True)
        out = torch.zeros_like(kept).scatter(1, worst.indices, worst.values <= 0)
        if not bool(out.any()):
            break
        kept = kept & ~out
    return kept, gain


def lower_bounds(gains: Tensor, level: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean over blocks and its one-sided lower bound.  # [B, N, S], [N] → [N, S], [N, S]

    Fewer than two blocks show nothing: the bound is NaN.
    """
    blocks = gains.shape[0]
    mean = gains.mean(dim=0)
    if blocks < 2:
        return mean, torch.full_like(mean, float("nan"))
    # mean − t_{blocks − 1}(1 − level) · s / sqrt(blocks)
    quantile = torch.from_numpy(stdtrit(blocks - 1, 1.0 - level.cpu().double().numpy())).to(mean)
    return mean, mean - quantile.unsqueeze(1) * gains.std(dim=0) / blocks**0.5


def at_full_strength(slots: SlotStates, kept: Tensor) -> SlotStates:
    """Return the kept seeds as fossils at full strength, and no others.  # kept [N, S] bool"""
    blank = SlotStates.empty(slots.num_members, slots.num_slots, slots.device)
    full = kept.float()
    return blank.replace(
        stage=blank.stage.masked_fill(kept, int(Stage.FOSSILIZED)),
        blueprint=torch.where(kept, slots.blueprint, blank.blueprint),
        style=torch.where(kept, slots.style, blank.style),
        tempo=torch.where(kept, slots.tempo, blank.tempo),
        alpha=full,
        alpha_start=full,
        alpha_target=full,
        room=slots.room,
        enabled=slots.enabled,
    )


class BestStates:
    """A snapshot of every member at its best validation score; of equal scores, the last."""

    def __init__(self, environment: Environment):
        self.environment = environment
        self.state: MemberState | None = None
        self.bodies: dict[str, Tensor] = {}

    def update(self) -> Tensor:
        """Renew the snapshot of the members that are better than ever, and return which.  # [N] bool"""
        bodies, state = self.environment.bodies, self.environment.state
        score = state.history.accuracy.nan_to_num(-torch.inf)
        if self.state is None:
            self.state, self.bodies = state, _without_moments(bodies.snapshot())
            return torch.ones_like(score, dtype=torch.bool)
        better = score >= self.state.history.accuracy.nan_to_num(-torch.inf)
        self.state = where_rows(better, state, self.state)
        self.bodies = _without_moments(bodies.keep(self.bodies, better))
        return better

    def restore(self) -> None:
        """Take every member back to its snapshot; who is finished stays so."""
        assert self.state is not None, "there was no update yet"
        bodies = self.environment.bodies
        bodies.restore({**self.bodies, "finished": bodies.finished})
        self.environment.set_state(self.state)

    def state_dict(self) -> dict[str, Tensor]:
        assert self.state is not None, "there was no update yet"
        return {**add_prefix("state", tensors_of(self.state)), **add_prefix("bodies", self.bodies)}

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        device = self.environment.bodies.device
        self.state = refill(self.environment.state, strip_prefix("state", tensors))
        self.bodies = {name: value.to(device) for name, value in strip_prefix("bodies", tensors).items()}


def _without_moments(bodies: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a snapshot without the state of a torch optimizer: at the end nothing is trained any more."""
    return {name: value for name, value in bodies.items() if not name.startswith("optimizer.")}


class FinalSelection:
    """Choose the weights and the seeds that the networks of an episode end with."""

    def __init__(self, environment: Environment):
        self.environment = environment
        self.best = BestStates(environment)
        members, device = environment.num_members, environment.device
        self.planted = torch.zeros(members, dtype=torch.long, device=device)  # [N] seeds so far
        self.epoch = torch.zeros_like(self.planted)  # [N] whose weights a network ends with, from 1 on
        self.last_epoch = torch.zeros_like(self.planted)  # [N] that a network trained

    def state_dict(self) -> dict[str, Tensor]:
        """Return what it remembers after at least one epoch, as plain tensors."""
        own = {"planted": self.planted, "epoch": self.epoch, "last_epoch": self.last_epoch}
        return {**add_prefix("best", self.best.state_dict()), **own}

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        self.best.load_state_dict(strip_prefix("best", tensors))
        device = self.environment.device
        self.planted, self.epoch = tensors["planted"].to(device), tensors["epoch"].to(device)
        self.last_epoch = tensors["last_epoch"].to(device)

    def update(self, result: StepResult) -> None:
        """Take one more epoch into account."""
        self.planted += result.outcome.germinated.sum(dim=1)
        self.last_epoch = torch.where(result.active, self.environment.clock, self.last_epoch)
        self.epoch = torch.where(self.best.update(), self.last_epoch, self.epoch)

    def finish(self) -> None:
        """Decide every seed of the best and of the last epoch, and keep whichever then scores higher.

        A member whose last epoch is its best pays once.
        """
        environment = self.environment
        both = self.epoch != self.last_epoch
        if not bool(both.any()):
            self._decide(~both)
            return
        last, ended = BestStates(environment), BestStates(environment)
        last.update()
        for candidate, paying in ((self.best, torch.ones_like(both)), (last, both)):
            candidate.restore()
            self._decide(paying)
            improved = ended.update()
        self.epoch = torch.where(improved, self.last_epoch, self.epoch)
        ended.restore()

    def _decide(self, paying: Tensor) -> None:
        """Decide the seeds of the present state, and validate what is left.

        paying: who is charged for it.  # [N] bool
        """
        environment, state = self.environment, self.environment.state
        slots, alive = state.slots, holds_seed(state.slots)
        measured_with = torch.zeros_like(alive)  # the seeds of the latest measurement

        def measure(kept: Tensor) -> BlockScores:
            nonlocal measured_with
            states = at_full_strength(slots, kept)
            scores = environment.bodies.score_blocks(states, BLOCKS)
            # Decided members are measured again with the others; they pay only for what is new.
            new = paying & (kept != measured_with).any(dim=1)
            environment.charge_validation(states, new, scores.samples)
            measured_with = kept
            return scores

        kept, gain = decide_seeds(measure, alive, self.planted)
        states, history = at_full_strength(slots, kept), state.history
        environment.bodies.prune(~kept)
        if bool(alive.any()):
            measured = environment.bodies.run_validation(states, ablate=False)
            samples = environment.bodies.samples[1]
            environment.charge_validation(states, paying & alive.any(dim=1), samples, ablate=False)
            history = history.append(measured.loss, measured.accuracy)
        evidence = state.evidence.forget(~kept).replace(contribution=torch.where(kept, gain, torch.nan))
        environment.set_state(replace(state, slots=states, evidence=evidence, history=history))
