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
from dataclasses import dataclass, replace

import torch
from scipy.special import stdtrit
from torch import Tensor

from esper.lifecycle.legality import holds_seed
from esper.lifecycle.slot_states import SlotStates
from esper.lifecycle.stages import Stage
from esper.simic.bodies import BlockScores
from esper.simic.environment import Environment
from esper.simic.governor import MemberRows
from esper.simic.rollout import EpisodeRecord, play
from esper.simic.steps import StepResult
from esper.tamiyo.controller import Controller
from esper.utils.rows import choose, refill, tensors_of, under_prefix, with_prefix

LEVEL = 0.01  # the chance, for a whole network, that a useless seed stays
BLOCKS = 20  # into which the validation data are dealt


Measure = Callable[[Tensor], BlockScores]  # of networks with the seeds of a mask  # kept [N, S] bool


@dataclass(frozen=True)
class Decision:
    """Which seeds stay, and the evidence: points of score, NaN where no seed was."""

    kept: Tensor  # [N, S] bool
    worth: Tensor  # [N, S] mean gain over the blocks when it was last measured
    surely: Tensor  # [N, S] the lower bound of the gain, alone or together; above 0 where a seed stays


def decide_seeds(measure: Measure, alive: Tensor, planted: Tensor) -> Decision:
    """Decide every living seed.  # alive [N, S] bool, planted [N] how many seeds each network has had"""
    kept, level = alive.clone(), LEVEL / (planted + alive.sum(dim=1) - 1).clamp(min=1)
    worth, surely = (torch.full(alive.shape, float("nan"), device=alive.device) for _ in range(2))
    all_alive: Tensor | None = None  # [blocks, N] the score with every seed
    while bool(kept.any()):
        scores = measure(kept)
        all_alive = scores.whole if all_alive is None else all_alive
        together = (all_alive - scores.whole).unsqueeze(2) + scores.worth  # [blocks, N, S]
        mean, low = lower_bounds(scores.worth, level)
        low = torch.maximum(low, lower_bounds(together, level)[1])
        worth, surely = torch.where(kept, mean, worth), torch.where(kept, low, surely)
        worst = low.nan_to_num(-torch.inf).masked_fill(~kept, torch.inf).min(dim=1, keepdim=True)
        out = torch.zeros_like(kept).scatter(1, worst.indices, worst.values <= 0)
        if not bool(out.any()):
            break
        kept = kept & ~out
    return Decision(kept, worth, surely)


def lower_bounds(gains: Tensor, level: Tensor) -> tuple[Tensor, Tensor]:
    """The mean over blocks and its one-sided lower bound.  # gains [B, N, S], level [N] → [N, S], [N, S]

    Fewer than two blocks show nothing: the bound is NaN.
    """
    blocks = gains.shape[0]
    mean = gains.mean(dim=0)
    if blocks < 2:
        return mean, torch.full_like(mean, float("nan"))
    quantile = torch.from_numpy(stdtrit(blocks - 1, 1.0 - level.cpu().double().numpy())).to(mean)
    return mean, mean - quantile.unsqueeze(1) * gains.std(dim=0) / blocks**0.5


def at_full_strength(slots: SlotStates, kept: Tensor) -> SlotStates:
    """The kept seeds as fossils at full strength, and no others.  # kept [N, S] bool"""
    blank = SlotStates.empty(slots.num_members, slots.num_slots, slots.device)
    full = torch.where(kept, 1.0, blank.alpha)
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


OnStep = Callable[[StepResult], None]


class BestRows:
    """For every member, everything that it was when its validation score was best; of equals the last."""

    def __init__(self, environment: Environment):
        self.environment = environment
        self.rows: MemberRows | None = None
        self.saved: dict[str, Tensor] = {}

    def look(self) -> Tensor:
        """Keep the members that are better than ever, and say which.  # [N] bool"""
        environment, rows = self.environment, self.environment.rows
        score = rows.signals.accuracy.nan_to_num(-torch.inf)
        if self.rows is None:
            self.rows, self.saved = rows, _lasting(environment.bodies.snapshot())
            return torch.ones_like(score, dtype=torch.bool)
        better = score >= self.rows.signals.accuracy.nan_to_num(-torch.inf)
        self.rows = choose(better, rows, self.rows)
        self.saved = _lasting(environment.bodies.keep(self.saved, better))
        return better

    def restore(self) -> None:
        """Put every member back to what was kept; who is finished stays so."""
        assert self.rows is not None, "nothing was looked at yet"
        bodies = self.environment.bodies
        bodies.restore({**self.saved, "finished": bodies.finished})
        self.environment.put(self.rows)

    def state_dict(self) -> dict[str, Tensor]:
        """What was kept, as plain tensors."""
        assert self.rows is not None, "nothing was looked at yet"
        return {**with_prefix("rows", tensors_of(self.rows)), **with_prefix("bodies", self.saved)}

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        """The inverse of `state_dict`."""
        device = self.environment.bodies.device
        self.rows = refill(self.environment.rows, under_prefix("rows", tensors))
        self.saved = {name: value.to(device) for name, value in under_prefix("bodies", tensors).items()}


def _lasting(bodies: dict[str, Tensor]) -> dict[str, Tensor]:
    """A snapshot without what an optimizer of torch's remembers: at the end nothing is trained any more."""
    return {name: value for name, value in bodies.items() if not name.startswith("optimizer.")}


class Ending:
    """Plays an episode and ends it as a growth ends."""

    def __init__(self, environment: Environment):
        self.environment = environment
        self.best = BestRows(environment)
        members, device = environment.num_members, environment.device
        self.planted = torch.zeros(members, dtype=torch.long, device=device)  # [N] seeds so far
        self.epoch = torch.zeros_like(self.planted)  # [N] whose weights a network ends with, from 1 on
        self.last_epoch = torch.zeros_like(self.planted)  # [N] that a network lived through

    def play(
        self,
        controller: Controller,
        episode: int = 0,
        initial_slots: SlotStates | None = None,
        on_step: OnStep | None = None,
    ) -> EpisodeRecord:
        """Let a controller live through one episode; the record ends with the decided networks.

        `on_step` sees every result as it comes. The environment is left with the decided networks.
        """

        def watch(result: StepResult) -> None:
            self.look(result)
            if on_step is not None:
                on_step(result)

        return play(self.environment, controller, episode, initial_slots, watch, self.finish)

    def state_dict(self) -> dict[str, Tensor]:
        """What it remembers after at least one epoch, as plain tensors."""
        own = {"planted": self.planted, "epoch": self.epoch, "last_epoch": self.last_epoch}
        return {**with_prefix("best", self.best.state_dict()), **own}

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        """The inverse of `state_dict`."""
        self.best.load_state_dict(under_prefix("best", tensors))
        device = self.environment.device
        self.planted, self.epoch = tensors["planted"].to(device), tensors["epoch"].to(device)
        self.last_epoch = tensors["last_epoch"].to(device)

    def look(self, result: StepResult) -> None:
        """Another epoch is over."""
        self.planted += result.outcome.germinated.sum(dim=1)
        self.last_epoch = torch.where(result.active, self.environment.clock, self.last_epoch)
        self.epoch = torch.where(self.best.look(), self.last_epoch, self.epoch)

    def finish(self) -> None:
        """Decide every seed of the best and of the last epoch, and keep whichever then scores higher."""
        environment = self.environment
        if bool((self.epoch == environment.clock).all()):  # the last epoch is the best of every member
            self._decide()
            return
        last, ended = BestRows(environment), BestRows(environment)
        last.look()
        for candidate in (self.best, last):
            candidate.restore()
            self._decide()
            improved = ended.look()
        self.epoch = torch.where(improved, self.last_epoch, self.epoch)
        ended.restore()

    def _decide(self) -> None:
        """Decide the seeds of the rows as they are, and measure what is left."""
        environment, rows = self.environment, self.environment.rows
        slots, alive = rows.slots, holds_seed(rows.slots)
        measured_with = torch.zeros_like(alive)  # the seeds of the latest measurement

        def measure(kept: Tensor) -> BlockScores:
            nonlocal measured_with
            states = at_full_strength(slots, kept)
            # Decided members are measured again with the others; they pay only for what is new.
            environment.charge_validation(states, (kept != measured_with).any(dim=1))
            measured_with = kept
            return environment.bodies.score_blocks(states, BLOCKS)

        decision = decide_seeds(measure, alive, self.planted)
        states, signals = at_full_strength(slots, decision.kept), rows.signals
        environment.bodies.prune(~decision.kept)
        if bool(alive.any()):
            measured = environment.bodies.run_validation(states, ablate=False)
            environment.charge_validation(states, alive.any(dim=1), ablate=False)
            signals = signals.update(measured.loss, measured.accuracy)
        contribution = torch.where(decision.kept, decision.worth, torch.nan)
        evidence = rows.evidence.forget(~decision.kept).replace(contribution=contribution)
        environment.put(replace(rows, slots=states, evidence=evidence, signals=signals))
