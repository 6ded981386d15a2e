"""The networks of an environment and the data that they read.

`Bodies` is what an environment asks of them. `TaskPopulation` answers with a population of built-in networks
on a task; `esper.growing` answers with one model of the user.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from esper.lifecycle.actions import Blueprint
from esper.lifecycle.slot_states import SlotStates
from esper.population.config import PopulationConfig
from esper.population.data import Clock, MemberData
from esper.population.hosts import Host, block_of, build_host
from esper.population.metrics import TrainMetrics, ValidationMetrics
from esper.population.population import Population
from esper.simic.costs import ForwardCosts, Work
from esper.tasks.task import Split, Task
from esper.utils.errors import UserError


@dataclass(frozen=True)
class BlockScores:
    """Points of score on every block of the validation data."""

    whole: Tensor  # [blocks, N] of the networks with the seeds that they hear
    worth: Tensor  # [blocks, N, S] what is lost without one of those seeds
    samples: int  # that were scored


class Bodies(Protocol):
    """The networks of N members with S slots each, their optimizer state and their data.

    Which seeds exist is given by the `SlotStates` that come in. Tensors are on `device`.
    """

    finished: Tensor  # [N] bool: members whose budget is spent; nothing of them changes any more
    births: Tensor  # [N] int64: germinations so far, from which the next seed's weights are drawn
    idle: bool  # every member is finished

    @property
    def config(self) -> PopulationConfig: ...
    @property
    def members(self) -> Tensor: ...  # [N] int64 global ids
    @property
    def num_members(self) -> int: ...
    @property
    def num_slots(self) -> int: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def topology(self) -> str: ...
    @property
    def replays(self) -> bool: ...  # whether steps are captured as CUDA graphs
    @property
    def batches(self) -> int: ...  # minibatches between two decisions
    @property
    def samples(self) -> tuple[int, int]: ...  # of one epoch of training, and of one validation
    @property
    def host_parameters(self) -> int: ...  # of a host without seeds
    @property
    def host_flops(self) -> float: ...  # of one sample's forward pass through a host without seeds

    # ---- growth ----------------------------------------------------------------------------------------

    def begin_episode(self, episode: int) -> None:
        """Start every member from its initial weights."""

    def germinate(self, where: Tensor, blueprint: Tensor) -> None:
        """Create seeds in the slots where True.  # [N, S] bool, [N, S] int64"""

    def prune(self, where: Tensor) -> None:
        """Remove the seeds where True.  # [N, S] bool"""

    def fold(self, where: Tensor, style: Tensor) -> None:
        """Make the fossils where True part of their hosts.  # [N, S] bool, [N, S] int64"""

    def growable(self) -> Tensor:
        """Return the blueprints that a seed may have now in each slot.  # [N, S, blueprints] bool"""

    # ---- training and validation -----------------------------------------------------------------------

    def run_training(self, states: SlotStates, clock: Clock) -> TrainMetrics:
        """Train for one epoch under these slot states."""

    def run_validation(
        self, states: SlotStates, ablate: bool = True, unfinished: bool = False
    ) -> ValidationMetrics:
        """Measure loss and score and, with `ablate`, what each seed contributes.

        unfinished: leave out the members that are finished; what they would have shown is NaN.
        """

    def score_blocks(self, states: SlotStates, blocks: int) -> BlockScores:
        """Measure the score on each of `blocks` equal parts of the validation data."""

    # ---- cost and state --------------------------------------------------------------------------------

    def parameter_counts(self, states: SlotStates) -> Tensor:
        """Return the parameters of each member, its seeds included.  # [N] int64"""

    def seed_parameters(self) -> Tensor:
        """Return the parameters of a seed by slot and blueprint.  # [S, blueprints] int64"""

    def gate_parameters(self) -> Tensor:
        """Return the parameters of a gate by slot.  # [S] int64"""

    def epoch_flops(self, states: SlotStates, work: Work, uses_metrics: Tensor | None = None) -> Tensor:
        """Return the FLOPs of one epoch and its validation, see `ForwardCosts.epoch`.  # [N] float64"""

    def relative_cost(self, states: SlotStates) -> Tensor:
        """Return the cost of a training sample over that of a bare host.  # [N] float64"""

    def tensors(self) -> dict[str, Tensor]:
        """Return everything that belongs to the members by name. Views, not copies."""

    def snapshot(self) -> dict[str, Tensor]:
        """Return copies of `tensors`."""

    def keep(self, saved: dict[str, Tensor], where: Tensor) -> dict[str, Tensor]:
        """Return a snapshot renewed for the members where True.  # [N] bool"""

    def restore(self, saved: Mapping[str, Tensor], where: Tensor | None = None) -> None:
        """Take all members, or those where True, back to a snapshot.  # [N] bool"""


class TaskPopulation(Population):
    """A population with the data of its task, or of several tasks of the same shape."""

    def __init__(
        self,
        tasks: Sequence[Task],
        members: Tensor,
        config: PopulationConfig,
        block_blueprints: Sequence[str],
        seed: int = 0,
        device: torch.device | str = "cpu",
        make_host: Callable[[], Host] | None = None,
    ):
        """Build the networks and copy the data to the device.

        tasks: dealt to the members by their ids; the first one names the host, unless `make_host` is given.
        block_blueprints: what may grow in slots behind a residual block, by name.
        Raises UserError for tasks whose inputs or classes differ.
        """
        task = tasks[0]
        for other in tasks:
            if (other.input_shape, other.num_classes) != (task.input_shape, task.num_classes):
                raise UserError(
                    "tasks that share a population need inputs of one shape and as many classes: "
                    f"{task.name} has {list(task.input_shape)} and {task.num_classes}, {other.name} has "
                    f"{list(other.input_shape)} and {other.num_classes}"
                )
        self.tasks, host = tasks, task.host
        own_host = partial(build_host, host.preset, task.input_shape, task.num_classes, **host.options)
        super().__init__(make_host or own_host, config, members, seed, device)
        self.train_data = self.member_data([task.train for task in tasks])
        self.validation_data = self.member_data([task.validation for task in tasks])
        self.costs = ForwardCosts.of(self.network, task.train.inputs[:1], self.device)
        named = torch.tensor([blueprint.name.lower() in block_blueprints for blueprint in Blueprint])
        no_block = torch.tensor([[block_of(segment) is None] for segment in self.network.host.segments])
        self._allowed = (no_block | named).to(self.device)  # [S, blueprints]

    @property
    def batches(self) -> int:
        return self.config.batches_per_epoch

    @property
    def samples(self) -> tuple[int, int]:
        validated = min(self.validation_data.num_samples, self.config.validation_samples)
        return self.config.batch_size * self.config.batches_per_epoch, validated

    @property
    def host_flops(self) -> float:
        return self.costs.host

    def member_data(self, splits: Sequence[Split]) -> MemberData:
        """Deal one split of each task to the members by their ids, cut to the length of the shortest."""
        # One tensor holds the data of all tasks, which a member indexes by its task.
        shortest = min(len(split) for split in splits)
        return MemberData(
            torch.stack([split.inputs[:shortest] for split in splits]),
            torch.stack([split.targets[:shortest] for split in splits]),
            self.members.cpu() % len(splits),
        ).to(self.device)

    def growable(self) -> Tensor:
        return super().growable() & self._allowed

    def run_training(self, states: SlotStates, clock: Clock) -> TrainMetrics:
        return self.train_epoch(states, self.train_data, clock)

    def run_validation(
        self, states: SlotStates, ablate: bool = True, unfinished: bool = False
    ) -> ValidationMetrics:
        return self.validate(states, self.validation_data, ablate, unfinished)

    def score_blocks(self, states: SlotStates, blocks: int) -> BlockScores:
        """Score every k-th sample in block k; there are at most as many blocks as samples."""
        data = self.validation_data
        count = min(blocks, data.num_samples)
        parts = [(data.inputs[:, k::count], data.targets[:, k::count]) for k in range(count)]
        found = [self.validate(states, MemberData(*part, data.task_of)) for part in parts]
        return BlockScores(
            whole=100.0 * torch.stack([measured.accuracy for measured in found]),
            worth=torch.stack([measured.contribution for measured in found]),
            samples=sum(min(inputs.shape[1], self.config.validation_samples) for inputs, _ in parts),
        )

    def epoch_flops(self, states: SlotStates, work: Work, uses_metrics: Tensor | None = None) -> Tensor:
        return self.costs.epoch(states, self, work, uses_metrics)

    def relative_cost(self, states: SlotStates) -> Tensor:
        return self.costs.relative(states, self)
