"""The trainer: in every round all members play one episode, and every controller learns from it.

    for rounds in Trainer([spec], [learner], rounds=20).run():
        print(rounds[learner.name].summary.return_mean)

The members of an episode form equal blocks. Each learner decides for one of them, all blocks have the same
members (the same first weights, the same order of the data), and where a learner asks for a control variate,
block 0 holds control runs, which never grow. So any number of learners costs one program.

The members are dealt to shards by their ids, the same ids in every block, so that a member and its control
run stay together. A process plays the episodes of its shards one after the other, gathers those of all
others, and then every process makes the same updates from the same numbers: the update is replicated.

A round begins from counters alone: episode r gives every member's initial weights, data order and random
numbers. So the state of a run between two rounds is the agents and the number of rounds done, and a run that
was stopped there goes on to the same bits as one that was not.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from esper.runs.schema import RoundSummary
from esper.simic.agent.ppo import UpdateMetrics
from esper.simic.environment import EnvironmentSpec, GrowthEnvironment, StepResult
from esper.simic.learner import Learner
from esper.simic.rollout import EpisodeRecord, play
from esper.simic.telemetry import summarize_round
from esper.tamiyo.controller import Blocks, Controller
from esper.tamiyo.scripted import Static
from esper.utils.errors import UserError
from esper.utils.gather import Gather, Piece, gather_pieces, held_shards
from esper.utils.rows import add_prefix, strip_prefix

CONTROL = "control"


@dataclass(frozen=True)
class Round:
    """What one round left behind of one learner."""

    summary: RoundSummary
    record: EpisodeRecord  # of the learner's own members
    update: UpdateMetrics


class Trainer:
    """Play rounds and learn; prints and writes nothing."""

    def __init__(
        self,
        specs: Sequence[EnvironmentSpec],
        learners: Sequence[Learner],
        rounds: int,
        shards: int = 1,
        gather: Gather | None = None,
    ):
        """Make the environments; specs: one per task, played in turn, each with the members of one block.

        shards: how many parts the members are computed in, whoever computes them; gather: the processes that
        share them, this one alone by default. Raises UserError where there are too few members or shards, or
        more steps than a learner keeps.
        """
        self.learners = {learner.name: learner for learner in learners}
        self.has_control = any(learner.reward.control_variate for learner in learners)
        control: dict[str, Controller] = {CONTROL: Static()} if self.has_control else {}
        self.blocks = Blocks(control | self.learners)
        self.shards, self.gather = shards, gather or Gather()
        # Of each spec, of each shard that this process holds; and those of rounds in which plans are tried.
        self.environments = self._make_environments(specs, 1)
        plans = max(learner.plans for learner in learners)
        self._taught = self.environments if plans == 1 else self._make_environments(specs, plans)
        most = max(shards[0].steps for shards in self.environments)
        capacity = min(learner.steps for learner in learners)
        if most > capacity:
            raise UserError(
                f"episode.flops pays for {most:,} steps of the bare host, and a learner keeps {capacity:,}; "
                f"set episode.steps to {most:,}, or give fewer FLOPs"
            )
        self.rounds = rounds
        self.rounds_done = 0
        self.member_epochs = 0  # trained so far, in all blocks
        self.seconds = 0.0
        self.on_step: Callable[[float], None] | None = None  # gets the share of the round that is played

    def _make_environments(
        self, specs: Sequence[EnvironmentSpec], plans: int
    ) -> list[list[GrowthEnvironment]]:
        """Make the environments of all specs; plans: how many rows of a block have the same member."""

        def environment(spec: EnvironmentSpec, shard: range) -> GrowthEnvironment:
            different = max(1, len(shard) // plans)
            ids = spec.members[shard.start + torch.arange(len(shard)) % different]
            return GrowthEnvironment(replace(spec, members=self.blocks.members(ids)))

        return [
            [environment(spec, s) for s in held_shards(len(spec.members), self.shards, self.gather)]
            for spec in specs
        ]

    @property
    def environment(self) -> GrowthEnvironment:
        """Return the environment of the latest round, of this process's first shard; the first before any."""
        return self.environments[max(self.rounds_done - 1, 0) % len(self.environments)][0]

    def run(self) -> Iterator[dict[str, Round]]:
        """Return the rounds that are left, one at a time."""
        while self.rounds_done < self.rounds:
            yield self.play_round()

    def play_round(self) -> dict[str, Round]:
        """Play one episode of all blocks, then update every learner."""
        begun = time.perf_counter()
        taught = any(learner.plans > 1 for learner in self.learners.values())
        environments = self._taught if taught else self.environments
        records = self._play_shards(environments[self.rounds_done % len(environments)])
        updates = {
            name: learner.agent.update(learner.buffer, imitate=learner.imitates)
            for name, learner in self.learners.items()
        }
        self.rounds_done += 1
        self.member_epochs += sum(int(record.active.sum()) for record in records.values())
        self.seconds += time.perf_counter() - begun
        rounds = {}
        for name, update in updates.items():
            summary = summarize_round(
                records[name],
                update,
                records.get(CONTROL),
                round=self.rounds_done,
                rounds=self.rounds,
                member_epochs=self.member_epochs,
                seconds=self.seconds,
                learning_rate=self.learners[name].agent.config.learning_rate,
            )
            rounds[name] = Round(summary, records[name], update)
        return rounds

    def _play_shards(self, shards: Sequence[GrowthEnvironment]) -> dict[str, EpisodeRecord]:
        """Play one episode of every shard, those of other processes too; return the record of each block.

        Afterwards the buffers of the learners hold the transitions of all shards.
        """
        pieces: list[Piece] = []
        state = self._fingerprint()  # before the episode: weights change at the end of a round alone
        for done, environment in enumerate(shards):
            records = self._play(environment, done / len(shards), 1 / len(shards))
            if self.shards == 1:
                return records
            # Shards exchange records and rollouts; the digest shows whether all played with the same weights.
            piece = {"state": state}
            for block, record in records.items():
                piece |= add_prefix(f"record.{block}", record.tensors())
            for name, learner in self.learners.items():
                # Copies: the next shard writes its transitions into the same buffer.
                piece |= add_prefix(f"rollout.{name}", learner.buffer.tensors())
            pieces.append(piece)
        everyone = gather_pieces(self.gather, pieces)
        if any(not torch.equal(piece["state"], state) for piece in everyone):
            raise UserError(
                f"after round {self.rounds_done} the processes have different weights, and all must make the "
                "same updates; give them the same versions of esper and torch, and machines of one kind"
            )
        for name, learner in self.learners.items():
            learner.load_rollouts([strip_prefix(f"rollout.{name}", piece) for piece in everyone])
        return {
            block: record.concatenate([strip_prefix(f"record.{block}", piece) for piece in everyone])
            for block, record in records.items()
        }

    def _play(self, environment: GrowthEnvironment, done: float, share: float) -> dict[str, EpisodeRecord]:
        """Play one shard, a share of the round, and return its records; errors name members and step."""
        spans = self.blocks.spans(environment.num_members)

        def after_step(result: StepResult) -> None:
            self.record_steps(result, spans)
            if self.on_step is not None:
                self.on_step(done + share * environment.clock / environment.steps)

        try:
            record = play(environment, self.blocks, self.rounds_done, after_step)
        except Exception as error:
            first, last = environment.spec.members[[0, -1]].tolist()
            who = f"member {first}" if first == last else f"members {first} to {last}"
            error.add_note(f"{who}, round {self.rounds_done + 1}, step {environment.clock + 1}")
            raise
        for learner in self.learners.values():
            learner.finish_episode()
        return {name: record.select_members(span) for name, span in spans.items()}

    def _fingerprint(self) -> Tensor:
        """Return a digest of the weights, 0 where there is no other process to compare with.  # [32]"""
        if self.gather.size == 1:
            return torch.zeros(32, dtype=torch.uint8)
        digest = hashlib.sha256()
        for learner in self.learners.values():
            for value in learner.agent.state_dict().values():
                digest.update(value.cpu().numpy().tobytes())
        return torch.frombuffer(bytearray(digest.digest()), dtype=torch.uint8)

    def record_steps(self, result: StepResult, spans: Mapping[str, slice]) -> None:
        """Give every learner its block's share of a step."""
        control = result.reward[spans[CONTROL]] if self.has_control else None
        for name, learner in self.learners.items():
            mine = spans[name]
            learner.record_step(result.reward[mine], result.terminated[mine], result.active[mine], control)

    def state_dict(self) -> dict[str, Tensor]:
        """Return what a checkpoint between two rounds holds."""
        state = {name: torch.tensor(getattr(self, name)) for name in ("rounds_done", "member_epochs")}
        state["seconds"] = torch.tensor(self.seconds, dtype=torch.float64)
        for name, learner in self.learners.items():
            state |= add_prefix(name, learner.agent.state_dict())
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load what `state_dict` returned; raise ValueError where a tensor of an agent does not fit."""
        for name, learner in self.learners.items():
            learner.agent.load_state_dict(strip_prefix(name, state))
        self.rounds_done = int(state["rounds_done"])
        self.member_epochs = int(state.get("member_epochs", 0))  # versions up to 0.5.1 did not keep it
        self.seconds = float(state["seconds"])
