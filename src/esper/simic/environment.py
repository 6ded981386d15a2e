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

Clocks. `clock` counts the decisions made, 0 at reset. Compute is the budget: a member spends the training
FLOPs of its own rows and its shadows and, if its controller looks at what is measured or its weights are
those of the best epoch (`EnvironmentSpec.best_epoch`), those of validation;
`progress` is the share spent, and the learning rate follows it. A member whose budget is spent is finished:
that step was its last and is terminal, nothing of it changes any more. A larger network therefore gets
fewer steps; none gets more than `steps`. With `episode.clock: steps` everyone gets that many instead. An
action meets the evidence of the validation before it. A seed germinated by a decision has age 1 in the next
observation, and a ramp begun by a decision has moved once by then. The budget is seen, so nothing is ever
truncated.

`reset` measures once before any training, so that the first decision has a loss, an accuracy and a potential.
The decision path waits for the device only where `train_epoch` and `validate` each look at the slots once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from esper.lifecycle.actions import Actions
from esper.lifecycle.engine import ActionOutcome, TickOutcome
from esper.lifecycle.legality import holds_seed
from esper.lifecycle.slot_states import SlotConfig, SlotEvidence, SlotStates
from esper.population.data import Clock
from esper.population.metrics import TrainMetrics, ValidationMetrics
from esper.simic.bodies import Bodies, TaskPopulation
from esper.simic.costs import TRAINING_PASSES, Work
from esper.simic.governor import Governor, MemberRows
from esper.simic.ruling import (
    ROUNDING,
    Account,
    LivedEpoch,
    RulingInputs,
    Settled,
    Standing,
    price,
    rule,
    settle,
    stand,
)
from esper.simic.signals import Signals
from esper.simic.steps import Begun, EnvironmentSpec, RuleSpec, StepResult
from esper.tamiyo.policy.action_masks import ActionMasks
from esper.tamiyo.policy.features import Observation
from esper.utils.graphs import Graphed, GraphPool
from esper.utils.rows import check_like, refill, tensors_of, under_prefix, with_prefix

NO_OP = -1  # the last op before the first action
_PER_MEMBER = ("start_potential", "flops", "last_op", "last_succeeded", "looks")  # [N] each, beside the rows


class Environment:
    """N members that live one episode at a time; `reset` begins the first, and nothing is seen before it."""

    bodies: Bodies
    spec: RuleSpec

    def __init__(self, spec: RuleSpec, bodies: Bodies, chance_loss: float):
        """chance_loss: that of a network which has learned nothing, for the governor."""
        self.spec, self.bodies = spec, bodies
        self.device, self.members = bodies.device, bodies.members  # [N]
        self.topology, self.host_parameters = bodies.topology, bodies.host_parameters
        self.num_members, self.num_slots = bodies.num_members, bodies.num_slots
        self.slot_config = SlotConfig.grid(1, self.num_slots)
        samples = bodies.config.batch_size * bodies.config.batches_per_epoch  # of a member in a step
        self.bare_cost = TRAINING_PASSES * samples * bodies.host_flops  # FLOPs of a step of a bare host
        shares = torch.tensor(spec.budgets, dtype=torch.float64, device=self.device)
        unit = spec.episode.flops or spec.episode.steps * self.bare_cost
        self.budget = unit * shares[self.members % len(shares)]  # [N] FLOPs
        most = max(spec.budgets) * unit / self.bare_cost
        self.steps = math.ceil(most - ROUNDING)  # of those no larger than the host
        self._pool = pool = GraphPool() if bodies.replays else None
        self._world = world = RulingInputs(bodies, spec, self.budget, self.steps)
        self._ruled = Graphed(partial(rule, world=world), pool)
        self._stood = Graphed(partial(stand, world=world), pool)
        self._priced = Graphed(partial(price, world=world), pool)
        self._chance_loss = chance_loss
        self.episode = -1  # none has begun

    # ---- one episode -----------------------------------------------------------------------------------

    def reset(
        self, episode: int, initial_slots: SlotStates | None = None, looks: bool | Tensor = True
    ) -> Observation:
        """Fresh hosts by (seed, member, episode), measured before any training.

        `initial_slots` is given a freshly initialized seed wherever it holds one. `looks` [N] bool, or one
        for all: whose controller reads what is measured. The others are not charged for it, and no gate
        that asks for a measurement stands in their way.
        """
        first, self.episode, self.clock = self.episode < 0, episode, 0
        self.bodies.begin_episode(episode)
        self.looks = torch.as_tensor(looks, device=self.device).expand(self.num_members).contiguous()
        slots = SlotStates.empty(self.num_members, self.num_slots, self.device)
        slots = slots.replace(room=torch.full_like(slots.room, self.bodies.config.folds))
        if initial_slots is not None:
            slots = self._checked(initial_slots).to(self.device)
            self.bodies.germinate(holds_seed(slots), slots.blueprint)
        measured = self.bodies.run_validation(slots, ablate=False)
        blank = Signals.blank(self.num_members, self.device)
        self.rows = MemberRows(
            slots=slots,
            evidence=SlotEvidence.unmeasured(self.num_members, self.num_slots, self.device),
            signals=blank.update(measured.loss, measured.accuracy),
        )
        if first:
            watched = self.spec.governor, self.bodies, self.rows, self._chance_loss
            self._governor = governor = Governor(*watched, in_place=self._pool is not None)
            self._settled = Graphed(partial(settle, governor=governor, world=self._world), self._pool)
        else:
            self._governor.begin(self.rows)
        self.flops = torch.zeros(self.num_members, dtype=torch.float64, device=self.device)
        self.standing = self._stand()
        self.start_potential = self.potential
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
        """Whether the episode is over for everyone, so that only `reset` may follow."""
        return self.clock >= self.steps or self.bodies.idle

    @property
    def parameters(self) -> Tensor:
        """How many parameters each member has.  # [N] int64"""
        return self.standing.parameters

    @property
    def potential(self) -> Tensor:
        """What each member is worth now, see `rewards`.  # [N]"""
        return self.standing.potential

    @property
    def batches(self) -> int:
        """Minibatches between two decisions."""
        return self.bodies.batches

    @property
    def samples_trained(self) -> int:
        """Samples that a member is trained on in an epoch; in a living model, those of the latest one."""
        return self._work(False).training

    @property
    def slots(self) -> SlotStates:
        """The slots of all members as the last step left them."""
        return self.rows.slots

    def put(self, rows: MemberRows) -> None:
        """Go on from other rows; the bodies that belong to them are the caller's to restore."""
        self.rows = rows
        self.standing = self._stand()

    def _stand(self) -> Standing:
        """What the rows of now imply."""
        return self._stood(self.rows, self.flops, self._decisions(), self.looks, self._work(True))

    def _decisions(self) -> Tensor:
        """The clock, on the device.  # [] int64"""
        return torch.full((), self.clock, device=self.device)

    def masks(self) -> ActionMasks:
        """What is legal now: by the slots and what fits them, what is measured, the steps that are left."""
        return self.standing.masks

    def observe(self) -> Observation:
        """What a controller is shown now."""
        rows, standing = self.rows, self.standing
        return Observation(
            progress=standing.spent.float(),
            step_cost=standing.step_cost,
            steps_left=standing.steps_left.float(),
            val_loss=rows.signals.loss,
            val_accuracy=rows.signals.accuracy,
            loss_history=rows.signals.loss_history,
            accuracy_history=rows.signals.accuracy_history,
            parameter_ratio=standing.parameter_ratio,
            last_succeeded=self.last_succeeded,
            last_op=self.last_op,
            slots=rows.slots,
            evidence=rows.evidence,
        )

    def step(self, actions: Actions | Sequence[Actions]) -> StepResult:
        """Apply, tick, train, validate, governor, observe, reward: see the top of this file.

        actions: one row a member; several are applied one after the other before the tick, for schedules.
        Raises RuntimeError after the last step of an episode.
        """
        slots = self.begin(actions).states
        return self.end(self.bodies.run_training(slots, self._clock(slots)))

    def begin(self, actions: Actions | Sequence[Actions]) -> TickOutcome:
        """The first half of a step: apply and tick. What comes back is what the next epoch trains under."""
        if self.done:
            raise RuntimeError(f"the episode ended after {self.clock} steps; call reset(episode) for another")
        active = ~self.bodies.finished
        asked = [actions] if isinstance(actions, Actions) else actions
        self.begun = Begun(active, *self._grow(asked, active))
        return self.begun.ticked

    def end(self, training: TrainMetrics) -> StepResult:
        """The second half, after an epoch of training: validate, governor, observe, reward."""
        outcome, ticked, active = self.begun.outcome, self.begun.ticked, self.begun.active
        measure = self._measures
        validation = self.bodies.run_validation(ticked.states, measure, unfinished=True)
        self.clock += 1
        settled = self._settle(training, validation, measure)
        self.last_op, self.last_succeeded = outcome.asked_op, outcome.succeeded
        return StepResult(
            observation=self.observe(),
            reward=settled.reward,
            terminated=settled.ends,
            active=active,
            outcome=outcome,
            ticked=ticked,
            panicked=settled.panicked,
            rolled_back=settled.rolled_back,
            training=training,
            validation=validation,
        )

    # ---- saving ----------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Tensor]:
        """Where every member stands in the middle of an episode, as plain tensors."""
        return {
            **with_prefix("population", self.bodies.tensors()),
            **with_prefix("rows", tensors_of(self.rows)),
            **with_prefix("governor", self._governor.state_dict()),
            **{name: getattr(self, name).clone() for name in ("potential", *_PER_MEMBER)},
            "members": self.members.clone(),
            "episode": torch.tensor(self.episode),
            "clock": torch.tensor(self.clock),
        }

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        """The inverse of `state_dict`, checked: the episode goes on to the same bits."""
        if self.episode < 0:
            self.reset(0)  # something to compare shapes with
        self._check_state(tensors)
        if not torch.equal(tensors["members"].cpu(), self.members.cpu()):
            raise ValueError(
                f"the state belongs to members {tensors['members'].tolist()}; this environment has "
                f"{self.members.tolist()}"
            )
        rows = refill(self.rows, under_prefix("rows", tensors))
        rows.slots.check()
        self.bodies.restore(under_prefix("population", tensors))
        self.rows = rows
        self._governor.load_state_dict(under_prefix("governor", tensors))
        for name in _PER_MEMBER:
            setattr(self, name, tensors[name].to(self.device))
        self.episode, self.clock = int(tensors["episode"]), int(tensors["clock"])
        self.bodies.idle = bool(self.bodies.finished.all())
        self.standing = self._stand()

    def _check_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Raise ValueError for a state of another environment, before anything is overwritten."""
        check_like(self.state_dict(), tensors, "the state of an environment")

    # ---- the parts of a step ---------------------------------------------------------------------------

    def _grow(
        self, actions: Sequence[Actions], active: Tensor
    ) -> tuple[ActionOutcome, TickOutcome, SlotEvidence]:
        """Rules first, bodies after them: what begins gets weights, what ends loses them."""
        choices, left = tuple(action.choices for action in actions), self.standing.steps_left
        ruled = self._ruled(self.slots, self.rows.evidence, choices, active, left, self.looks)
        return ruled.outcome, ruled.ticked, ruled.evidence

    def _settle(self, training: TrainMetrics, validation: ValidationMetrics, measure: bool) -> Settled:
        """What an epoch led to; from here on it is what the members are."""
        begun = self.begun
        epoch = LivedEpoch(self.rows, begun.evidence, begun.states, begun.active, training, validation)
        paid = Account(self.flops, self._decisions(), self.looks, self.start_potential, self.potential)
        settled = self._settled(epoch, paid, self._work(measure), self._governor.keeps_next())
        self.rows, self.flops, self.standing = settled.rows, settled.flops, settled.standing
        return settled

    @property
    def _measures(self) -> bool:
        """Whether this step measures what each seed is worth."""
        return (self.clock + 1) % self.spec.episode.measure_every == 0 or self.clock + 1 == self.steps

    def _clock(self, slots: SlotStates) -> Clock:
        """Where the next epoch stands, for the order of the data and the learning rate."""
        if self.spec.episode.clock == "steps":
            return Clock(self.episode, self.clock, self.steps)
        share = self._priced(slots, self.looks, self._work(self._measures)) / self.budget
        return Clock(self.episode, self.clock, self.steps, self.flops / self.budget, share)

    @property
    def validation_samples(self) -> int:
        """How many samples a validation has; for a model of one's own, how many the latest had."""
        return self._work(True).validation

    def _work(self, measure: bool) -> Work:
        """What every member does in one epoch, in samples."""
        training, validation = self.bodies.samples
        return Work(training, validation, measure, self.spec.best_epoch)

    def charge_validation(self, slots: SlotStates, who: Tensor, ablate: bool = True) -> None:
        """Add the FLOPs of one validation of networks with these slots to what members spent.  # who [N] bool

        ablate: with a measurement of every seed.
        """
        work = replace(self._work(ablate), training=0)
        self.flops = self.flops + torch.where(who, self.bodies.epoch_flops(slots, work), 0.0)


class GrowthEnvironment(Environment):
    """An environment of built-in networks on a task."""

    spec: EnvironmentSpec

    def __init__(self, spec: EnvironmentSpec):
        self.population = TaskPopulation(
            spec.variants or (spec.task,),
            spec.members,
            spec.population,
            spec.lifecycle.block_blueprints,
            spec.seed,
            spec.device,
            spec.make_host,
        )
        if spec.rate_scale:
            self.population.rate_scale.copy_(torch.tensor(spec.rate_scale))
        super().__init__(spec, self.population, math.log(spec.task.num_classes))
