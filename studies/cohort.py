"""Several agents that learn in one tensor program: each decides for a block of the same members.

The members of block 0 never grow. They are the ungrown twins of all the others' members: what they earn in a
step would have been earned without any growth, so it is left out of what every agent learns from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from esper.foundation.statistics import mean_interval
from esper.lifecycle.actions import Blueprint, Op
from esper.simic.agent.metrics import UpdateMetrics
from esper.simic.baseline import explained_by_baseline
from esper.simic.environment import EnvironmentSpec, GrowthEnvironment, StepResult
from esper.simic.learned import Consequence
from esper.simic.rollout import EpisodeRecord, play
from esper.tamiyo.blocks import Blocks, part
from esper.tamiyo.controllers import Static
from studies.variants import Pupil

TWINS = "twins"


class Cohort:
    """Pupils who live through the same episodes, each with its own copy of the members of `spec`."""

    def __init__(
        self,
        spec: EnvironmentSpec,
        pupils: Mapping[str, Pupil],
        world: type[GrowthEnvironment] = GrowthEnvironment,
    ):
        self.pupils = dict(pupils)
        self.blocks = Blocks({TWINS: Static(), **pupils})
        self.environment = world(replace(spec, members=self.blocks.members(spec.members)))
        self.spans = self.blocks.spans(self.environment.num_members)

    def play_round(self, episode: int) -> dict[str, dict[str, Any]]:
        """One episode of all blocks, then one update of every agent; what became of each, for a log."""
        record = play(self.environment, self.blocks, episode, on_step=self.teach)
        updates = {name: pupil.agent.update(pupil.buffer) for name, pupil in self.pupils.items()}
        return {name: self._row(name, record, update) for name, update in updates.items()}

    def teach(self, result: StepResult) -> None:
        """Every pupil's share of a step; what its members' twins earned is left out, unless it is to stay."""
        consequence = Consequence.of(result)
        expected = consequence.reward[self.spans[TWINS]]
        for name, pupil in self.pupils.items():
            own = part(consequence, self.spans[name])
            beyond = own.reward - expected if pupil.variant.beyond_twin else own.reward
            pupil.learn_from(replace(own, reward=beyond))

    def _row(self, name: str, record: EpisodeRecord, update: UpdateMetrics) -> dict[str, Any]:
        mine, twins = self.spans[name], self.spans[TWINS]
        above, half = mean_interval((record.returns[mine] - record.returns[twins]).tolist())
        members = record.returns[mine].size
        ops = record.executed_op[:, mine]
        expected = record.reward[:, twins] if self.pupils[name].variant.beyond_twin else None
        final = record.final_slots.blueprint[mine].numpy()  # [n, S]
        return {
            "return": float(record.returns[mine].mean()),
            "above_twin": above,
            "above_twin_ci": half,
            "accuracy": float(record.accuracy[-1, mine].mean()),
            "twin_accuracy": float(record.accuracy[-1, twins].mean()),
            "ratio": float(record.parameter_ratio[-1, mine].mean()),
            "kl": update.kl,
            "epochs_done": update.epochs_done,
            "explained_variance": update.explained_variance,
            "explained_by_baseline": explained_by_baseline(
                self.pupils[name].buffer, record.reward[:, mine], expected, record.gamma
            ),
            "entropy": update.entropy,
            "head_entropy": {head: v for head, v in update.head_entropy.items() if v == v},
            "ops": {op.name: float((ops == op).mean()) for op in Op},
            "germinated": float(record.germinated[:, mine].sum() / members),
            "pruned": float(record.pruned[:, mine].sum() / members),
            "rollbacks": float(record.panicked[:, mine].sum() / members),
            "seeds": float((final >= 0).sum() / members),
            "blueprints": {
                b.name: float((final == b).sum() / members) for b in Blueprint if (final == b).any()
            },
        }
