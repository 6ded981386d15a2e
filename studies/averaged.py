"""Populations that average the weights of their networks beside training, for studies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from esper.lifecycle.slot_states import SlotStates
from esper.population.data import Clock, MemberData
from esper.population.metrics import TrainMetrics
from esper.population.optimizer import RowWeights
from esper.population.plan.packing import PlanSpec
from esper.population.plan.rows import training_rows
from esper.population.population import _put
from esper.simic.bodies import TaskPopulation
from esper.utils.rows import add_prefix


class RowAverage:
    """A mean of the weights that each row has had, in which those after update k count as about k^power.

    It needs no end to be known: late weights count most at any time. A row that something else than an update
    wrote, as growth does, begins again.
    """

    def __init__(self, rows: RowWeights, power: float):
        self.rows, self.power = rows, power
        # The latest weights and updates that were taken in; what differs from them was written since.
        self.mean, self.latest, self.count = rows.weights.clone(), rows.weights.clone(), rows.steps.clone()

    def restart_edited(self) -> None:
        """Begin again where the weights are not those of the latest update."""
        edited = (self.rows.weights != self.latest).any(dim=1, keepdim=True)
        self.mean.copy_(torch.where(edited, self.rows.weights, self.mean))
        self.latest.copy_(self.rows.weights)
        self.count.copy_(self.rows.steps)

    def update(self) -> None:
        """Take in the weights of the rows that have had an update since the last call."""
        steps = self.rows.steps
        # Σ k^p ≈ n^(p + 1) / (p + 1): about this share of the mean is the latest of n weights.
        share = torch.where(steps != self.count, (self.power + 1.0) / (steps + self.power), 0.0)
        self.mean.lerp_(self.rows.weights, share.unsqueeze(1))
        self.latest.copy_(self.rows.weights)
        self.count.copy_(steps)

    def tensors(self, rows: slice) -> dict[str, Tensor]:
        """Return all that belongs to some rows by name. Views."""
        return {name: getattr(self, name)[rows] for name in ("mean", "latest", "count")}


class AveragedPopulation(TaskPopulation):
    """A population on a CPU that keeps averages of its weights; nothing else reads them."""

    def __init__(self, *given: Any, powers: Sequence[float]):
        self.averages: dict[float, tuple[RowAverage, RowAverage]] = {}  # of hosts and parts, by power
        super().__init__(*given)
        if self.replays:
            raise ValueError("averages are not captured as CUDA graphs; use a CPU")
        self.averages = {p: (RowAverage(self.hosts, p), RowAverage(self.parts, p)) for p in powers}

    def train_epoch(self, states: SlotStates, data: MemberData, clock: Clock) -> TrainMetrics:
        metrics = TrainMetrics.unmeasured(self.num_members, self.num_slots, self.device)
        rates = self._captured_rates(clock.done(self.config.batches_per_epoch, self.members))
        samples, view = self._samples(data.num_samples, clock), self.read_slots(states)
        each = [average for pair in self.averages.values() for average in pair]
        for average in each:
            average.restart_edited()
        for some in self._chunks(view):
            epoch = self._graphs.training(PlanSpec(training_rows(some), some, self._blank), data)
            epoch.load(samples, rates)
            epoch.begin()
            for _ in range(len(samples)):
                epoch.step()
                found = epoch.finish()  # writes the weights back
                for average in each:
                    average.update()
            _put(metrics, epoch.plan, some, found)
        return metrics

    @contextmanager
    def averaged(self, power: float) -> Iterator[None]:
        """Let the networks have their averaged weights meanwhile."""
        for average in self.averages[power]:
            average.restart_edited()
            average.rows.weights.copy_(average.mean)
        yield
        for average in self.averages[power]:
            average.rows.weights.copy_(average.latest)

    def tensors(self) -> dict[str, Tensor]:
        """Return all rows by name, the averages among them: rollbacks and resumed runs have them too."""
        named, each = super().tensors(), self.num_members * self.num_slots
        for power, (hosts, parts) in self.averages.items():
            named |= add_prefix(f"average.{power:g}.hosts", hosts.tensors(slice(None)))
            for k in range(self.positions):
                rows = slice(k * each, (k + 1) * each)
                named |= add_prefix(f"average.{power:g}.parts.{k}", parts.tensors(rows))
        return named
