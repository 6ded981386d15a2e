"""The learner: round after round, every member lives one episode and every controller learns from it.

    for rounds in Trainer([spec], [learner], rounds=20).run():
        print(rounds[learner.name].summary.return_mean)

The members of an episode stand in equal blocks. Each learner decides for one of them, all blocks have the
same members (the same first weights, the same order of the data), and where a learner asks for a control
variate, block 0 holds their twins, which never grow. So any number of learners costs one program.

A round begins from counters alone: episode r gives every member's initial weights, data order and random
numbers. So the state of a run between two rounds is the agents and the number of rounds done, and a run that
was stopped there goes on to the same bits as one that was not.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from esper.simic.agent.metrics import UpdateMetrics
from esper.simic.environment import GrowthEnvironment
from esper.simic.learner import Learner
from esper.simic.rollout import EpisodeRecord, play
from esper.simic.steps import EnvironmentSpec, StepResult
from esper.simic.summaries import Progress, summarise
from esper.tamiyo.blocks import Blocks
from esper.tamiyo.controller import Controller
from esper.tamiyo.scripted import Static
from esper.telemetry.schema import RoundSummary

TWINS = "twins"
_ROUNDS_DONE = "rounds_done"
_SECONDS = "seconds"


@dataclass(frozen=True)
class Round:
    """What one round left behind of one learner."""

    summary: RoundSummary
    record: EpisodeRecord  # of the learner's own members
    update: UpdateMetrics


class Trainer:
    """Plays rounds and learns; prints and writes nothing."""

    def __init__(
        self,
        worlds: Sequence[EnvironmentSpec],
        learners: Sequence[Learner],
        rounds: int,
        environment_type: type[GrowthEnvironment] = GrowthEnvironment,
    ):
        """worlds: what the rounds are played in, in turn, each with the members of one block.

        Raises ValueError where a world and an agent discount differently.
        """
        for world in worlds:
            for learner in learners:
                if world.gamma != learner.agent.config.gamma:
                    raise ValueError(
                        f"the environment's gamma is {world.gamma} and the agent's is "
                        f"{learner.agent.config.gamma}; give the environment PPOConfig.gamma"
                    )
        self.learners = {learner.name: learner for learner in learners}
        self.has_twins = any(learner.reward.control_variate for learner in learners)
        twins: dict[str, Controller] = {TWINS: Static()} if self.has_twins else {}
        self.blocks = Blocks(twins | self.learners)
        self.environments = [
            environment_type(replace(world, members=self.blocks.members(world.members))) for world in worlds
        ]
        self.rounds = rounds
        self.rounds_done = 0
        self.seconds = 0.0

    @property
    def environment(self) -> GrowthEnvironment:
        """Where the latest round was played; the first one before any."""
        return self.environments[max(self.rounds_done - 1, 0) % len(self.environments)]

    def run(self) -> Iterator[dict[str, Round]]:
        """The rounds that are left, one at a time."""
        while self.rounds_done < self.rounds:
            yield self.play_round()

    def play_round(self, on_step: Callable[[StepResult], None] | None = None) -> dict[str, Round]:
        """One episode of all blocks, then one update of every learner; `on_step` sees every step."""
        begun = time.perf_counter()
        environment = self.environments[self.rounds_done % len(self.environments)]
        spans = self.blocks.spans(environment.num_members)

        def step(result: StepResult) -> None:
            self.teach(result, spans)
            if on_step is not None:
                on_step(result)

        record = play(environment, self.blocks, self.rounds_done, on_step=step)
        for learner in self.learners.values():
            learner.settle()
        updates = {name: learner.agent.update(learner.buffer) for name, learner in self.learners.items()}
        self.rounds_done += 1
        self.seconds += time.perf_counter() - begun
        twins = record.part(spans[TWINS]) if self.has_twins else None
        return {
            name: self._round(name, record.part(spans[name]), update, twins)
            for name, update in updates.items()
        }

    def teach(self, result: StepResult, spans: Mapping[str, slice]) -> None:
        """Give every learner its block's share of a step."""
        twins = result.reward[spans[TWINS]] if self.has_twins else None
        for name, learner in self.learners.items():
            mine = spans[name]
            learner.remember(result.reward[mine], result.terminated[mine], result.active[mine], twins)

    def state_dict(self) -> dict[str, Tensor]:
        """What a checkpoint between two rounds holds."""
        agents = {
            f"{name}.{key}": value
            for name, learner in self.learners.items()
            for key, value in learner.agent.state_dict().items()
        }
        return agents | {
            _ROUNDS_DONE: torch.tensor(self.rounds_done),
            _SECONDS: torch.tensor(self.seconds, dtype=torch.float64),
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """The inverse of `state_dict`; raises ValueError where the state lacks something or does not fit."""
        missing = sorted({_ROUNDS_DONE, _SECONDS} - set(state))
        if missing:
            raise ValueError(f"the state lacks {', '.join(missing)}; give what Trainer.state_dict returned")
        for name, learner in self.learners.items():
            own = {key.removeprefix(f"{name}."): state[key] for key in state if key.startswith(f"{name}.")}
            learner.agent.load_state_dict(own)
        self.rounds_done = int(state[_ROUNDS_DONE])
        self.seconds = float(state[_SECONDS])

    def _round(
        self, name: str, record: EpisodeRecord, update: UpdateMetrics, twins: EpisodeRecord | None
    ) -> Round:
        members = len(self.blocks.controllers) * record.member_epochs
        progress = Progress(self.rounds_done, self.rounds, self.rounds_done * members, self.seconds)
        return Round(summarise(self.learners[name], progress, record, update, twins), record, update)
