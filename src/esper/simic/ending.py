"""How an episode of growth ends: the better of the best and the last epoch, with every seed decided."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from esper.foundation.rows import choose, fit
from esper.lifecycle.legality import holds_seed
from esper.lifecycle.slot_states import SlotStates
from esper.population.data import MemberData
from esper.simic.deciding import BLOCKS, Decision, at_full_strength, decide_seeds
from esper.simic.environment import GrowthEnvironment, StepResult
from esper.simic.governor import MemberRows
from esper.simic.rollout import EpisodeRecord, play
from esper.tamiyo.controller import Controller

OnStep = Callable[[StepResult], None]


class BestRows:
    """For every member, everything that it was when its validation score was best; of equals the last."""

    def __init__(self, environment: GrowthEnvironment):
        self.environment = environment
        self.rows: MemberRows | None = None
        self.bodies: dict[str, Tensor] = {}

    def look(self) -> Tensor:
        """Keep the members that are better than ever, and say which.  # [N] bool"""
        environment, rows = self.environment, self.environment.rows
        score = rows.signals.accuracy.nan_to_num(-torch.inf)
        if self.rows is None:
            self.rows, self.bodies = rows, environment.population.snapshot()
            return torch.ones_like(score, dtype=torch.bool)
        better = score >= self.rows.signals.accuracy.nan_to_num(-torch.inf)
        self.rows = choose(better, rows, self.rows)
        for name, value in environment.population.tensors().items():
            self.bodies[name] = torch.where(fit(better, value), value, self.bodies[name])
        return better

    def restore(self) -> None:
        """Put every member back to what was kept."""
        assert self.rows is not None, "nothing was looked at yet"
        self.environment.population.restore(self.bodies)
        self.environment.put(self.rows)


class Ending:
    """Plays an episode and ends it as a growth ends."""

    def __init__(self, environment: GrowthEnvironment):
        self.environment = environment
        self.best = BestRows(environment)
        members, device = environment.num_members, environment.device
        self.planted = torch.zeros(members, dtype=torch.long, device=device)  # [N] seeds so far
        self.epoch = torch.zeros_like(self.planted)  # [N] whose weights a network ends with, from 1 on
        self.decision: Decision | None = None

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
            self._look(result)
            if on_step is not None:
                on_step(result)

        return play(self.environment, controller, episode, initial_slots, watch, self._finish)

    def _look(self, result: StepResult) -> None:
        """Another epoch is over."""
        self.planted += result.outcome.germinated.sum(dim=1)
        self.epoch = torch.where(self.best.look(), self.environment.clock, self.epoch)

    def _finish(self) -> None:
        """Decide every seed of the best and of the last epoch, and keep whichever then scores higher."""
        last = BestRows(self.environment)
        last.look()
        ended, decisions = BestRows(self.environment), []
        for candidate in (self.best, last):
            candidate.restore()
            decisions.append(self._decide())
            improved = ended.look()
        self.epoch = torch.where(improved, self.environment.clock, self.epoch)
        self.decision = choose(improved, decisions[1], decisions[0])
        ended.restore()

    def _decide(self) -> Decision:
        """Decide the seeds of the rows as they are, and measure what is left."""
        environment = self.environment
        slots, blocks = environment.slots, dealt(environment.validation)

        def measure(kept: Tensor) -> Tensor:
            states = at_full_strength(slots, kept)
            found = [environment.population.validate(states, block).contribution for block in blocks]
            return torch.stack(found)

        decision = decide_seeds(measure, holds_seed(slots), self.planted)
        states = at_full_strength(slots, decision.kept)
        environment.population.prune(~decision.kept)
        measured = environment.population.validate(states, environment.validation, ablate=False)
        rows = environment.rows
        contribution = torch.where(decision.kept, decision.worth, torch.nan)
        evidence = rows.evidence.forget(~decision.kept).replace(contribution=contribution)
        signals = rows.signals.update(measured.loss, measured.accuracy)
        environment.put(replace(rows, slots=states, evidence=evidence, signals=signals))
        return decision


def dealt(data: MemberData, blocks: int = BLOCKS) -> list[MemberData]:
    """The samples in at most that many blocks of nearly equal size, dealt like cards."""
    count = min(blocks, data.num_samples)
    return [
        MemberData(data.inputs[:, k::count], data.targets[:, k::count], data.task_of) for k in range(count)
    ]
