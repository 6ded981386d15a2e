"""One decision step of a growing population, as a vectorised environment.

    observation = environment.reset(episode)
    while not environment.done:
        actions = controller.decide(observation, environment.masks(), environment.clock)
        observation = environment.step(actions).observation

The circle of a run is train → validate → governor → observe → decide → apply → tick → reward. A caller enters
it at "decide", so that one `step(actions)` is, in this order:

1. **apply**     every member's action is executed or refused; new seeds get weights, pruned ones lose theirs
2. **tick**      ramps move, scheduled prunes end, slots cool down, ages and stage clocks count: once, here
3. **train**     one epoch of `batches_per_epoch` minibatches under the states that the tick left
4. **validate**  loss and accuracy, and what each seed is worth (leave-one-out rows, shadow rows)
5. **governor**  members whose training broke go back to their last good rows, and pay for it in this step
6. **observe**   histories, evidence and clocks for the next decision
7. **reward**    from the potential before the action and after the governor

Clocks. `clock` counts the decisions made, 0 at reset; the epoch that follows decision t trains under
`Clock(episode, t, steps)`, so that data order and learning rate depend on the counters alone. An action meets
the evidence of the validation before it. A seed germinated by a decision has age 1 in the next observation,
and a ramp begun by a decision has moved once by then. `progress` is clock / steps; the last step of an
episode is terminal: its horizon is fixed and its clock is seen, so nothing is ever truncated.

`reset` measures once before any training, so that the first decision has a loss, an accuracy and a potential.
The decision path waits for the device only where `train_epoch` and `validate` each look at the slots once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from esper.foundation.rows import check_like, named, part, refill, tensors_of
from esper.lifecycle.actions import Actions, Head
from esper.lifecycle.config import LifecycleConfig
from esper.lifecycle.engine import ActionOutcome, TickOutcome, apply, tick
from esper.lifecycle.evidence import SlotEvidence
from esper.lifecycle.legality import holds_seed
from esper.lifecycle.slot_config import SlotConfig
from esper.lifecycle.slot_states import SlotStates
from esper.population.config import PopulationConfig
from esper.population.data import Clock, MemberData
from esper.population.hosts import Host, build_host
from esper.population.objectives import Objective, cross_entropy
from esper.population.population import Population, TrainMetrics, ValidationMetrics
from esper.simic.config import EpisodeConfig, GovernorConfig, RewardConfig
from esper.simic.costs import ForwardCosts, Work
from esper.simic.governor import Governor, MemberRows
from esper.simic.rewards import REWARDS, Potentials, potential
from esper.simic.signals import Signals, update_evidence
from esper.tamiyo.policy.action_masks import ActionMasks, compute_batch_masks
from esper.tamiyo.policy.observation import Observation
from esper.tasks.task import Split, Task

NO_OP = -1  # the last op before the first action
# [N] each, beside the rows.
_PER_MEMBER = ("potential", "start_potential", "flops", "last_op", "last_succeeded")


@dataclass(frozen=True)
class EnvironmentSpec:
    """Everything that decides what an environment does."""

    task: Task
    members: Tensor  # [N] int64 global ids
    gamma: float  # of the potential: give it `PPOConfig.gamma`
    seed: int = 0
    device: torch.device | str = "cpu"
    episode: EpisodeConfig = field(default_factory=EpisodeConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    governor: GovernorConfig = field(default_factory=GovernorConfig)
    lifecycle: LifecycleConfig = field(default_factory=LifecycleConfig)
    population: PopulationConfig = field(default_factory=PopulationConfig)
    make_host: Callable[[], Host] | None = None  # the task's own host if none is given
    variants: tuple[Task, ...] = ()  # tasks of the same shape, dealt to the members by their ids
    objective: str | Objective = "classification"  # what is trained for; its score counts as accuracy


@dataclass(frozen=True)
class StepResult:
    """What one decision step led to."""

    observation: Observation  # for the next decision
    reward: Tensor  # [N] float32, the governor's penalty included
    terminated: Tensor  # [N] bool
    outcome: ActionOutcome  # of the actions
    ticked: TickOutcome
    panicked: Tensor  # [N] bool: rolled back
    rolled_back: Tensor  # [N, S] bool: seeds that the governor ended
    training: TrainMetrics
    validation: ValidationMetrics


@dataclass(frozen=True)
class Begun:
    """The first half of a step, before its epoch is trained."""

    actions: Actions
    outcome: ActionOutcome
    ticked: TickOutcome
    evidence: SlotEvidence  # less what ended or was just born

    @property
    def states(self) -> SlotStates:
        """The slots under which the epoch is trained."""
        return self.ticked.states

    @property
    def succeeded(self) -> Tensor:
        """Who got what they asked for.  # [N] bool"""
        return self.outcome.succeeded


class GrowthEnvironment:
    """N members that live one episode at a time; `reset` begins the first, and nothing is seen before it."""

    population_type = Population  # a study of the learner puts simulated bodies in its place

    def __init__(self, spec: EnvironmentSpec):
        self.spec = spec
        self.device = torch.device(spec.device)
        self.members = spec.members.to(self.device)  # [N]
        self.population = self._make_population()
        self.topology = self.population.bodies.host.topology
        self.num_members, self.num_slots = self.population.num_members, self.population.num_slots
        self.slot_config = SlotConfig.grid(1, self.num_slots)
        self.steps = spec.episode.steps
        self.host_parameters = self.population.bodies.host_width
        self.tasks = spec.variants or (spec.task,)
        self._prepare()
        chance_is_known = self.population.objective.loss is cross_entropy  # else nothing is a collapse
        self._chance_loss = math.log(spec.task.num_classes) if chance_is_known else math.nan
        self.episode = -1  # none has begun

    def _make_population(self) -> Population:
        spec, task, host = self.spec, self.spec.task, self.spec.task.host
        return self.population_type(
            spec.make_host
            or (lambda: build_host(host.preset, task.input_shape, task.num_classes, **host.options)),
            spec.population,
            self.members,
            spec.seed,
            self.device,
            spec.objective,
        )

    def _prepare(self) -> None:
        """Deal the data to the members, and count what a forward pass costs."""
        self._train = self.member_data([t.train for t in self.tasks])
        self.validation = self.member_data([t.validation for t in self.tasks])
        sample = self.spec.task.train.inputs[:1]
        self.costs = ForwardCosts.of(self.population.bodies, sample, self.device)

    def worth_by_block(self, states: SlotStates, blocks: int) -> Tensor:
        """Points that each heard seed is worth on each part of the validation data.  # [blocks, N, S]

        The samples are dealt to the blocks like cards; there are fewer blocks where there are fewer samples.
        """
        data, count = self.validation, min(blocks, self.validation.num_samples)
        parts = [(data.inputs[:, k::count], data.targets[:, k::count]) for k in range(count)]
        found = [self.population.validate(states, MemberData(*part, data.task_of)) for part in parts]
        return torch.stack([measured.contribution for measured in found])

    def member_data(self, splits: Sequence[Split]) -> MemberData:
        """One split of each task, dealt to the members by their ids and cut to the length of the shortest."""
        shortest = min(len(split) for split in splits)
        return MemberData.of(
            torch.stack([split.inputs[:shortest] for split in splits]),
            torch.stack([split.targets[:shortest] for split in splits]),
            self.members.cpu() % len(splits),
        ).to(self.device)

    # ---- one episode -----------------------------------------------------------------------------------

    def reset(self, episode: int, initial_slots: SlotStates | None = None) -> Observation:
        """Fresh hosts by (seed, member, episode), measured before any training.

        `initial_slots` is given a freshly initialised seed wherever it holds one.
        """
        self.episode, self.clock = episode, 0
        self.population.begin_episode(episode)
        slots = SlotStates.empty(self.num_members, self.num_slots, self.device)
        if initial_slots is not None:
            slots = self._checked(initial_slots).to(self.device)
            self.population.germinate(holds_seed(slots), slots.blueprint)
        measured = self.population.validate(slots, self.validation, ablate=False)
        blank = Signals.blank(self.num_members, self.device)
        self.rows = MemberRows(
            slots=slots,
            evidence=SlotEvidence.unmeasured(self.num_members, self.num_slots, self.device),
            signals=blank.update(measured.loss, measured.accuracy),
        )
        self.parameters = self.population.parameter_counts(slots)  # [N] int64
        self._governor = Governor(self.spec.governor, self.population, self.rows, self._chance_loss)
        self.potential = self.start_potential = self._potential()
        self.flops = torch.zeros(self.num_members, dtype=torch.float64, device=self.device)
        self.last_op = torch.full_like(self.members, NO_OP)
        self.last_succeeded = torch.ones_like(self.members, dtype=torch.bool)
        return self.observe()

    def _checked(self, slots: SlotStates) -> SlotStates:
        if slots.stage.shape != (self.num_members, self.num_slots):
            raise ValueError(
                f"initial_slots are {tuple(slots.stage.shape)}; this environment has {self.num_members} "
                f"members with {self.num_slots} slots"
            )
        slots.check()
        return slots

    @property
    def done(self) -> bool:
        """Whether the episode is over, so that only `reset` may follow."""
        return self.clock >= self.steps

    @property
    def slots(self) -> SlotStates:
        """The slots of all members as the last step left them."""
        return self.rows.slots

    def put(self, rows: MemberRows) -> None:
        """Go on from other rows; the bodies that belong to them are the caller's to restore."""
        self.rows = rows
        self.parameters = self.population.parameter_counts(rows.slots)
        self.potential = self._potential()

    def masks(self) -> ActionMasks:
        """What is legal now: by the slots, by what is measured of their seeds, by the steps that are left."""
        return compute_batch_masks(
            self.slots,
            self.slot_config,
            self.spec.lifecycle,
            self.topology,
            evidence=self.rows.evidence,
            steps_left=self.steps - self.clock,
        )

    def observe(self) -> Observation:
        """What a controller is shown now."""
        rows = self.rows
        return Observation(
            progress=torch.full_like(rows.signals.loss, self.clock / self.steps),
            val_loss=rows.signals.loss,
            val_accuracy=rows.signals.accuracy,
            loss_history=rows.signals.loss_history,
            accuracy_history=rows.signals.accuracy_history,
            parameter_ratio=self.parameters / self.host_parameters,
            last_succeeded=self.last_succeeded,
            last_op=self.last_op,
            slots=rows.slots,
            evidence=rows.evidence,
        )

    def step(self, actions: Actions) -> StepResult:
        """Apply, tick, train, validate, governor, observe, reward: see the top of this file.

        actions: one row a member. Raises RuntimeError after the last step of an episode.
        """
        ticked = self.begin(actions)
        clock = Clock(self.episode, self.clock, self.steps)
        return self.end(self.population.train_epoch(ticked.states, self._train, clock))

    def begin(self, actions: Actions) -> TickOutcome:
        """The first half of a step: apply and tick. What comes back is what the next epoch trains under."""
        if self.done:
            raise RuntimeError(f"the episode ended after {self.steps} steps; call reset(episode) for another")
        outcome, ticked, evidence = self._grow(actions)
        self.begun = Begun(actions, outcome, ticked, evidence)
        return ticked

    def end(self, training: TrainMetrics) -> StepResult:
        """The second half, after an epoch of training: validate, governor, observe, reward."""
        outcome, ticked = self.begun.outcome, self.begun.ticked
        validation = self._validate(ticked.states)
        rows = MemberRows(
            slots=ticked.states,
            evidence=update_evidence(self.begun.evidence, ticked.states, training, validation),
            signals=self.rows.signals.update(validation.loss, validation.accuracy),
        )
        self.rows, panicked, rolled_back = self._governor.review(rows, training.loss)
        self.parameters = self.population.parameter_counts(self.slots)
        self.clock += 1
        self.last_op, self.last_succeeded = self.begun.actions[Head.OP], outcome.succeeded
        return StepResult(
            observation=self.observe(),
            reward=self._reward(panicked),
            terminated=torch.full_like(panicked, self.done),
            outcome=outcome,
            ticked=ticked,
            panicked=panicked,
            rolled_back=rolled_back,
            training=training,
            validation=validation,
        )

    # ---- saving ----------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Tensor]:
        """Where every member stands in the middle of an episode, as plain tensors."""
        return {
            **named("population", self.population.tensors()),
            **named("rows", tensors_of(self.rows)),
            **named("governor", self._governor.state_dict()),
            **{name: getattr(self, name).clone() for name in _PER_MEMBER},
            "members": self.members.clone(),
            "episode": torch.tensor(self.episode),
            "clock": torch.tensor(self.clock),
        }

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        """The inverse of `state_dict`, checked: the episode goes on to the same bits."""
        if self.episode < 0:
            self.reset(0)  # something to compare shapes with
        check_like(self.state_dict(), tensors, "the state of an environment")
        if not torch.equal(tensors["members"].cpu(), self.members.cpu()):
            raise ValueError(
                f"the state belongs to members {tensors['members'].tolist()}; this environment has "
                f"{self.members.tolist()}"
            )
        rows = refill(self.rows, part("rows", tensors))
        rows.slots.check()
        self.population.restore(part("population", tensors))
        self.rows = rows
        self.parameters = self.population.parameter_counts(rows.slots)
        self._governor.load_state_dict(part("governor", tensors))
        for name in _PER_MEMBER:
            setattr(self, name, tensors[name].to(self.device))
        self.episode, self.clock = int(tensors["episode"]), int(tensors["clock"])

    # ---- the parts of a step ---------------------------------------------------------------------------

    def _grow(self, actions: Actions) -> tuple[ActionOutcome, TickOutcome, SlotEvidence]:
        """Rules first, bodies after them: what begins gets weights, what ends loses them."""
        rules = self.spec.lifecycle
        left = self.steps - self.clock
        outcome = apply(self.slots, actions, self.rows.evidence, rules, self.topology, left)
        ticked = tick(outcome.states, rules)
        ended = outcome.pruned | ticked.pruned
        self.population.prune(ended)
        self.population.germinate(outcome.germinated, outcome.states.blueprint)
        return outcome, ticked, self.rows.evidence.forget(ended | outcome.germinated)

    def _validate(self, slots: SlotStates) -> ValidationMetrics:
        """One validation, and the price of it and of the epoch before it."""
        measure = (self.clock + 1) % self.spec.episode.measure_every == 0 or self.clock + 1 == self.steps
        validation = self.population.validate(slots, self.validation, ablate=measure)
        self.flops = self.flops + self.costs.epoch(slots, self._work(measure))
        return validation

    def _work(self, measure: bool) -> Work:
        """What every member does in one epoch, in samples."""
        config = self.spec.population
        return Work(
            training=config.batch_size * config.batches_per_epoch,
            validation=min(self.validation.num_samples, config.validation_samples),
            ablate=measure,
            pairs=config.measure_pairs,
        )

    def _reward(self, panicked: Tensor) -> Tensor:
        """What this step earned, the penalty of a rollback included.  # [N]"""
        before, self.potential = self.potential, self._potential()
        at = Potentials(self.start_potential, before, self.potential, self.done, self.spec.gamma)
        return REWARDS[self.spec.reward.mode](at) - self.spec.governor.penalty * panicked

    def _potential(self) -> Tensor:
        return potential(self.rows.signals.accuracy, self.parameters / self.host_parameters, self.spec.reward)
