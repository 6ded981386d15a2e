"""One decision step of a growing population, as a vectorized environment.

    observation = environment.reset(episode)
    while not environment.done:
        actions = controller.decide(observation, environment.masks(), environment.clock)
        observation = environment.step(actions).observation

The loop of a run is train → validate → governor → observe → decide → apply → tick → reward. A caller enters
it at "decide", so that one `step(actions)` is, in this order:

1. **apply**     every member's action is executed or refused; new seeds get weights, pruned ones lose theirs;
                 with `episode.rates` the learning rate changes as asked
2. **tick**      ramps move, scheduled prunes end, slots cool down, ages and stage clocks count: once, here
3. **train**     one epoch of `batches_per_epoch` minibatches under the slot states after the tick
4. **validate**  loss and accuracy, and the contribution of each seed (leave-one-out rows, shadow rows)
5. **governor**  members whose training broke go back to their last good state, and pay for it in this step
6. **observe**   histories, evidence and clocks for the next decision
7. **reward**    from the potential before the action and after the governor

`clock` counts the decisions made, 0 at reset. Compute is the budget: a member spends the training FLOPs of
its own rows and its shadows and, if its controller uses metrics or its weights are those of the best epoch
(`RuleSpec.best_epoch`), those of validation; `progress` is the share spent, and the learning rate follows it.
A member whose budget is spent is finished: that step was its last and is terminal, and nothing of it changes
any more. A larger network therefore gets fewer steps; none gets more than `steps`. With
`episode.clock: steps` everyone gets that many instead. An action is judged by the evidence of the validation
before it. A seed germinated by a decision has age 1 in the next observation, and a ramp begun by a decision
has moved once by then. The budget is part of the observation, so that nothing is ever truncated.

`reset` validates once before any training, so that the first decision has a loss, a score and a potential.
A step waits for the device only where training and validation each read the slots once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from esper.lifecycle.actions import Actions
from esper.lifecycle.config import LifecycleConfig
from esper.lifecycle.engine import ActionOutcome, TickOutcome, apply, merge_outcomes, tick
from esper.lifecycle.legality import holds_seed
from esper.lifecycle.rates import Rates, change_rates, legal_rates
from esper.lifecycle.slot_states import SlotConfig, SlotEvidence, SlotStates
from esper.population.config import PopulationConfig
from esper.population.data import Clock
from esper.population.hosts import Host
from esper.population.metrics import TrainMetrics, ValidationMetrics
from esper.simic.bodies import Bodies, TaskPopulation
from esper.simic.config import EpisodeConfig, GovernorConfig, RewardConfig
from esper.simic.costs import TRAINING_PASSES, Work
from esper.simic.governor import Governor
from esper.simic.state import MemberState, ValidationHistory, potential, update_evidence
from esper.tamiyo.policy.action_masks import ActionMasks, compute_batch_masks
from esper.tamiyo.policy.features import Observation, TrainingObservation
from esper.tasks.task import Task
from esper.utils.graphs import Graphed, GraphPool
from esper.utils.rows import add_prefix, check_like, refill, strip_prefix, tensors_of, where_rows
from esper.utils.streams import Stream, random_uniform

NO_OP = -1  # the last op before the first action
ROUNDING = 1e-9  # of a sum of FLOPs, as a share of the budget
_PER_MEMBER = ("flops", "last_op", "last_succeeded")  # [N] each


@dataclass(frozen=True, kw_only=True)
class RuleSpec:
    """The rules of an environment, whatever its members are."""

    gamma: float  # of the potential: give it `PPOConfig.gamma`
    seed: int = 0
    episode: EpisodeConfig = field(default_factory=EpisodeConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    governor: GovernorConfig = field(default_factory=GovernorConfig)
    lifecycle: LifecycleConfig = field(default_factory=LifecycleConfig)
    budgets: tuple[float, ...] = (1.0,)  # multiples of the episode's, dealt to the members by their ids
    best_epoch: bool = False  # networks end with the weights of their best epoch on validation data


@dataclass(frozen=True, kw_only=True)
class EnvironmentSpec(RuleSpec):
    """Everything that decides what an environment of built-in networks does."""

    task: Task
    members: Tensor  # [N] int64 global ids
    device: torch.device | str = "cpu"
    population: PopulationConfig = field(default_factory=PopulationConfig)
    make_host: Callable[[], Host] | None = None  # the task's own host if none is given
    variants: tuple[Task, ...] = ()  # tasks of the same shape, dealt to the members by their ids
    rate_scale: tuple[float, ...] = ()  # of each member's learning rates; by default 1


@dataclass(frozen=True)
class DerivedState:
    """What follows from the state of the members and from what they have spent, before a decision."""

    parameters: Tensor  # [N] int64
    parameter_ratio: Tensor  # [N] over the host's own
    step_cost: Tensor  # [N] over a bare host's
    spent: Tensor  # [N] float64, the share of its budget
    steps_left: Tensor  # [N] float64: decisions that its budget still pays for as it is, this one included
    potential: Tensor  # [N] Φ, see `state`
    masks: ActionMasks


@dataclass(frozen=True)
class StepResult:
    """What one decision step led to."""

    observation: Observation  # for the next decision
    reward: Tensor  # [N] float32, the governor's penalty included; 0 of members that were finished before
    terminated: Tensor  # [N] bool: this step was the last
    active: Tensor  # [N] bool: this step was trained; the others were finished before it
    outcome: ActionOutcome  # of the actions, all of them where there were several
    ticked: TickOutcome
    panicked: Tensor  # [N] bool: rolled back
    rolled_back: Tensor  # [N, S] bool: seeds that the governor ended
    training: TrainMetrics
    validation: ValidationMetrics


class Environment:
    """N members that train for one episode at a time; call `reset` first.

    Methods named `_compute_...` are captured as CUDA graphs: they read their arguments and what stays the
    same from step to step, and change the tensors of the bodies in place.
    """

    bodies: Bodies
    spec: RuleSpec
    rate_scale: Tensor | float = 1.0  # [N] of the members' learning rates, as they were given
    training_samples = 1  # of each member's data

    def __init__(self, spec: RuleSpec, bodies: Bodies, chance_loss: float):
        """Set up budgets and graphs; chance_loss: of a network that has learned nothing, for the governor."""
        self.spec, self.bodies, self._chance_loss = spec, bodies, chance_loss
        self.device, self.members = bodies.device, bodies.members  # [N]
        self.num_members, self.num_slots = bodies.num_members, bodies.num_slots
        self.host_parameters = bodies.host_parameters
        self.slot_config = SlotConfig.grid(1, self.num_slots)
        samples = bodies.config.batch_size * bodies.config.batches_per_epoch  # of a member in a step
        self.bare_cost = TRAINING_PASSES * samples * bodies.host_flops  # FLOPs of a step of a bare host
        shares = torch.tensor(spec.budgets, dtype=torch.float64, device=self.device)
        unit = spec.episode.flops or spec.episode.steps * self.bare_cost
        self.budget = unit * shares[self.members % len(shares)]  # [N] FLOPs
        # A member no larger than the bare host gets this many steps; a larger one gets fewer.
        self.steps = math.ceil(max(spec.budgets) * unit / self.bare_cost - ROUNDING)
        self._by_compute = spec.episode.clock == "compute"
        # [N] who pays for what is measured; written in place, because captured functions read it.
        self.uses_metrics = torch.ones_like(self.members, dtype=torch.bool)
        pool = GraphPool() if bodies.replays else None
        self._apply = Graphed(self._compute_applied, pool)
        self._derive = Graphed(self._compute_derived, pool)
        self._cost = Graphed(self._compute_cost, pool)
        self._finish = Graphed(self._compute_finished, pool)
        self.episode = -1  # none has begun

    # ---- one episode -----------------------------------------------------------------------------------

    def reset(
        self, episode: int, initial_slots: SlotStates | None = None, uses_metrics: bool | Tensor = True
    ) -> Observation:
        """Start every member from the weights of (seed, member, episode) and validate it before any training.

        initial_slots: slots to begin with; a freshly initialized seed is created wherever they hold one.
        uses_metrics [N] bool, or one for all: whose controller reads what is measured. The others are not
        charged for it, and no gate that asks for a measurement stops them.
        """
        first, self.episode, self.clock = self.episode < 0, episode, 0
        self.bodies.begin_episode(episode)
        self.uses_metrics.copy_(torch.as_tensor(uses_metrics))
        slots = SlotStates.empty(self.num_members, self.num_slots, self.device)
        slots = slots.replace(room=torch.full_like(slots.room, self.bodies.config.folds))
        if initial_slots is not None:
            initial_slots.check()
            slots = initial_slots.to(self.device)
            self.bodies.germinate(holds_seed(slots), slots.blueprint)
        measured = self.bodies.run_validation(slots, ablate=False)
        history = ValidationHistory.empty(self.num_members, self.device)
        self.state = MemberState(
            slots=slots,
            evidence=SlotEvidence.unmeasured(self.num_members, self.num_slots, self.device),
            history=history.append(measured.loss, measured.accuracy),
            rates=self._initial_rates() if self.spec.episode.rates else None,
            training_loss=history.loss_history[:, :2] if self.spec.episode.rates else None,
        )
        if first:
            self._governor = Governor(self.spec.governor, self.bodies, self.state, self._chance_loss)
        else:
            self._governor.begin(self.state)
        self.flops = torch.zeros(self.num_members, dtype=torch.float64, device=self.device)
        self.derived = self._derive_state()
        self.last_op = torch.full_like(self.members, NO_OP)
        self.last_succeeded = torch.ones_like(self.members, dtype=torch.bool)
        return self.observe()

    @property
    def done(self) -> bool:
        """Whether the episode is over for everyone: of budgets that is known after one idle step."""
        return self.clock >= self.steps or self.bodies.idle

    @property
    def slots(self) -> SlotStates:
        """Return the slots of all members after the last step."""
        return self.state.slots

    def masks(self) -> ActionMasks:
        """Return what is legal now, by the slots, the evidence, and the steps that are left."""
        return self.derived.masks

    def observe(self) -> Observation:
        """Return what a controller is shown now."""
        state, derived = self.state, self.derived
        return Observation(
            progress=derived.spent.float(),
            step_cost=derived.step_cost,
            steps_left=derived.steps_left.float(),
            val_loss=state.history.loss,
            val_accuracy=state.history.accuracy,
            loss_history=state.history.loss_history,
            accuracy_history=state.history.accuracy_history,
            parameter_ratio=derived.parameter_ratio,
            last_succeeded=self.last_succeeded,
            last_op=self.last_op,
            slots=state.slots,
            evidence=state.evidence,
            training=self._observe_training(),
        )

    def _observe_training(self) -> TrainingObservation | None:
        """Return what is seen of the training where controllers set the learning rate."""
        rates, losses, bodies = self.state.rates, self.state.training_loss, self.bodies
        if rates is None or losses is None:
            return None
        batches = self.budget / self.bare_cost * bodies.config.batches_per_epoch
        everyone = partial(torch.full_like, rates.scale)
        return TrainingObservation(
            scale=rates.scale,
            falling=(self.derived.spent >= rates.decay_at).float(),
            loss=losses[:, 1],
            previous_loss=losses[:, 0],
            chance_loss=everyone(self._chance_loss),
            passes=everyone(self.clock * bodies.samples[0] / self.training_samples),
            samples=everyone(self.training_samples),
            updates=batches.float(),
        )

    # ---- one step --------------------------------------------------------------------------------------

    def step(self, actions: Actions | Sequence[Actions]) -> StepResult:
        """Apply, tick, train, validate, governor, observe, reward: see the top of this file.

        actions: one row for each member; several are applied one after the other before the tick.
        Raises RuntimeError after the last step of an episode.
        """
        if self.done:
            raise RuntimeError(f"the episode ended after {self.clock} steps; call reset(episode) for another")
        asked, active = [actions] if isinstance(actions, Actions) else actions, ~self.bodies.finished
        outcome, ticked, evidence, rates = self._apply(
            self.slots,
            self.state.evidence,
            tuple((action.choices, action.rate) for action in asked),
            active,
            self.derived.steps_left,
            self.derived.spent,
            self.state.rates,
        )
        training = self.bodies.run_training(ticked.states, self._training_clock(ticked.states))
        validation = self.bodies.run_validation(ticked.states, unfinished=True)
        self.clock += 1
        clock = torch.full((), self.clock, device=self.device)
        # Only what is read: arguments of a captured function are copied at every call.
        self.state, self.flops, self.derived, reward, terminated, panicked, rolled_back = self._finish(
            self.state,
            active,
            ticked.states,
            evidence,
            rates,
            training,
            validation,
            self.flops,
            clock,
            self.derived.potential,
        )
        self.last_op, self.last_succeeded = outcome.asked_op, outcome.succeeded
        return StepResult(
            observation=self.observe(),
            reward=reward,
            terminated=terminated,
            active=active,
            outcome=outcome,
            ticked=ticked,
            panicked=panicked,
            rolled_back=rolled_back,
            training=training,
            validation=validation,
        )

    def _compute_applied(
        self,
        slots: SlotStates,
        evidence: SlotEvidence,
        choices: tuple[tuple[Tensor, Tensor | None], ...],
        active: Tensor,
        steps_left: Tensor,
        spent: Tensor,
        rates: Rates | None,
    ) -> tuple[ActionOutcome, TickOutcome, SlotEvidence, Rates | None]:
        """Apply actions one after the other, then tick; for the finished no time passes.

        choices: [N, heads] and the rate [N] of each action; active [N] bool; spent, rates: as in
        `change_rates`; the rest as in `lifecycle.engine.apply`. Returns the outcome of all actions, that of
        the tick, the evidence without that of seeds that ended or just began, and the rates to train with.
        """
        outcomes, bodies, rules = [], self.bodies, self.spec.lifecycle
        for wanted, rate in choices:
            if rates is not None and rate is not None:
                rates = change_rates(rates, rate * active, spent)  # the finished keep theirs
            fits = bodies.growable()  # after what the actions before this one planted
            asked = Actions(torch.where(active.unsqueeze(1), wanted, 0))  # the finished wait
            outcome = apply(slots, asked, evidence, rules, fits, steps_left, self.uses_metrics)
            bodies.prune(outcome.pruned)
            bodies.germinate(outcome.germinated, outcome.states.blueprint)
            slots, evidence = outcome.states, evidence.forget(outcome.pruned | outcome.germinated)
            outcomes.append(outcome)
        ticked = tick(slots, rules)
        nothing = torch.zeros_like(ticked.pruned)
        ticked = where_rows(active, ticked, TickOutcome(slots, nothing, nothing))
        bodies.prune(ticked.pruned)
        bodies.fold(ticked.folded, slots.style)
        evidence = evidence.forget(ticked.pruned | ticked.folded)
        if rates is not None:
            self._write_rates(rates)
        return merge_outcomes(outcomes), ticked, evidence, rates

    def _compute_finished(
        self,
        before: MemberState,
        active: Tensor,
        slots: SlotStates,
        evidence: SlotEvidence,
        rates: Rates | None,
        training: TrainMetrics,
        validation: ValidationMetrics,
        flops: Tensor,
        clock: Tensor,
        last_potential: Tensor,
    ) -> tuple[MemberState, Tensor, DerivedState, Tensor, Tensor, Tensor, Tensor]:
        """Choose the states to go on with, and add up what was spent and earned.

        before: at the decision; the state of a finished member stays that. active [N] bool: who trained;
        slots, evidence, rates: as they were trained under; flops [N] float64, last_potential [N]: at the
        decision; clock []: decisions made, this one included.
        Returns the state, the FLOPs so far [N], what derives from these, and reward, terminated, panicked [N]
        and rolled_back [N, S] of `StepResult`.
        """
        spec, losses = self.spec, before.training_loss
        after = MemberState(
            slots=slots,
            evidence=update_evidence(evidence, slots, training, validation),
            history=before.history.append(validation.loss, validation.accuracy),
            rates=rates,
            training_loss=None if losses is None else torch.stack((losses[:, 1], training.loss), dim=1),
        )
        flops = flops + self._compute_cost(slots)
        # The last step may cost more than is left; it is charged up to the budget, so that arms spend alike.
        flops = flops.minimum(self.budget) if self._by_compute else flops
        state = where_rows(active, after, before)
        state, panicked, rolled_back = self._governor.review(state, training.loss, active)
        # Sums of FLOPs are rounded: a budget spent up to 1e-9 of it is spent.
        out_of_budget = self._share_spent(flops, clock) >= 1.0 - ROUNDING
        terminated = active & (out_of_budget | (clock >= self.steps))
        # In place: the captured forward passes read this tensor.
        self.bodies.finished.logical_or_(terminated)
        derived = self._compute_derived(state, flops, clock)
        # r = γΦ(s') − Φ(s)
        reward = spec.gamma * derived.potential - last_potential
        reward = (reward - spec.governor.penalty * panicked) * active
        return state, flops, derived, reward, terminated, panicked, rolled_back

    # ---- what follows from a state ---------------------------------------------------------------------

    def set_state(self, state: MemberState) -> None:
        """Go on from another state; the bodies that belong to it are the caller's to restore."""
        self.state = state
        self.derived = self._derive_state()

    def _derive_state(self) -> DerivedState:
        clock = torch.full((), self.clock, device=self.device)
        return self._derive(self.state, self.flops, clock)

    def _compute_derived(self, state: MemberState, flops: Tensor, clock: Tensor) -> DerivedState:
        """Derive sizes, costs, potential and masks.  # flops [N] spent so far, clock []"""
        bodies, slots = self.bodies, state.slots
        parameters = bodies.parameter_counts(slots)
        ratio = parameters / bodies.host_parameters
        # A sum, because the clock is a tensor that is never read back.
        steps_left = torch.zeros_like(flops) + (self.steps - clock)
        if self._by_compute:
            # The finished cost nothing and have nothing left, hence the least cost of 1 FLOP.
            cost = self._compute_cost(slots).clamp(min=1.0)
            steps_left = ((self.budget - flops) / cost - ROUNDING).ceil()
        spent, rates = self._share_spent(flops, clock), state.rates
        return DerivedState(
            parameters=parameters,
            parameter_ratio=ratio,
            step_cost=bodies.relative_cost(slots).float(),
            spent=spent,
            steps_left=steps_left,
            potential=potential(state.history.accuracy, ratio, self.spec.reward),
            masks=compute_batch_masks(
                slots,
                config=self.spec.lifecycle,
                topology=bodies.topology,
                evidence=state.evidence,
                steps_left=steps_left,
                uses_metrics=self.uses_metrics,
                fits=bodies.growable(),
                rate=None if rates is None else legal_rates(rates, spent),
            ),
        )

    def _share_spent(self, flops: Tensor, clock: Tensor) -> Tensor:
        """Return the share of its budget that each member has spent.  # [N] float64"""
        if self._by_compute:
            return (flops / self.budget).clamp(max=1.0)
        return torch.zeros_like(flops) + clock.double() / self.steps

    def _compute_cost(self, slots: SlotStates) -> Tensor:
        """Return FLOPs of an epoch, with its validation for who pays for it; 0 for the finished.  # [N]"""
        return self.bodies.epoch_flops(slots, self._work(), self.uses_metrics) * ~self.bodies.finished

    def _training_clock(self, slots: SlotStates) -> Clock:
        """Return the position of the next epoch, for the order of the data and the learning rate."""
        if not self._by_compute:
            return Clock(self.episode, self.clock, self.steps)
        # The learning rate follows the share spent within the epoch, so its cost is known beforehand.
        share = self._cost(slots) / self.budget
        return Clock(self.episode, self.clock, self.steps, self.flops / self.budget, share)

    def _work(self) -> Work:
        """Return what every member does in one epoch, in samples."""
        training, validation = self.bodies.samples
        return Work(training, validation, best_epoch=self.spec.best_epoch)

    def charge_validation(self, slots: SlotStates, who: Tensor, samples: int, ablate: bool = True) -> None:
        """Add the FLOPs of one validation of networks with these slots to what members spent.  # who [N] bool

        samples: that were validated. ablate: with a measurement of every seed.
        """
        work = replace(self._work(), training=0, validation=samples, ablate=ablate)
        self.flops = self.flops + torch.where(who, self.bodies.epoch_flops(slots, work), 0.0)

    def _initial_rates(self) -> Rates:
        """Return the rates that the members begin an episode with: the recipe's, drawn anew where asked."""
        span, config = self.spec.episode.rate_span, self.bodies.config
        draws = random_uniform(self.spec.seed, self.members, Stream.RATE, self.episode, 1).squeeze(1)
        decay_at = 1.0 - config.decay if config.schedule == "flat" else math.inf
        scale = ((draws - 0.5) * math.log(span)).exp() * self.rate_scale
        return Rates(scale, torch.full_like(draws, decay_at))

    def _write_rates(self, rates: Rates) -> None:
        """Let the next epoch train at these rates; captured, so that it writes in place."""
        raise NotImplementedError("the learning rates of these members are not a controller's to set")

    # ---- saving ----------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state of every member in the middle of an episode as plain tensors."""
        return {
            **add_prefix("population", self.bodies.tensors()),
            **add_prefix("state", tensors_of(self.state)),
            **add_prefix("governor", self._governor.state_dict()),
            **{name: getattr(self, name).clone() for name in ("uses_metrics", *_PER_MEMBER)},
            "potential": self.derived.potential.clone(),
            "members": self.members.clone(),
            "episode": torch.tensor(self.episode),
            "clock": torch.tensor(self.clock),
        }

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on from a saved state to the same bits; raise ValueError for that of another environment."""
        if self.episode < 0:
            self.reset(0)  # something to compare shapes with
        self._check_state(tensors)
        if not torch.equal(tensors["members"].cpu(), self.members.cpu()):
            raise ValueError(
                f"the state belongs to members {tensors['members'].tolist()}; this environment has "
                f"{self.members.tolist()}"
            )
        state = refill(self.state, strip_prefix("state", tensors))
        state.slots.check()
        self.bodies.restore(strip_prefix("population", tensors))
        self._governor.load_state_dict(strip_prefix("governor", tensors))
        for name in _PER_MEMBER:
            setattr(self, name, tensors[name].to(self.device))
        self.uses_metrics.copy_(tensors["uses_metrics"])
        self.episode, self.clock = int(tensors["episode"]), int(tensors["clock"])
        self.bodies.idle = bool(self.bodies.finished.all())
        self.set_state(state)

    def _check_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Raise ValueError for the state of another environment, before anything is overwritten."""
        check_like(self.state_dict(), tensors, "the state of an environment")


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
            self.rate_scale = torch.tensor(spec.rate_scale, device=self.population.device)
            self.population.rate_scale.copy_(self.rate_scale)
        self.training_samples = self.population.train_data.num_samples
        super().__init__(spec, self.population, math.log(spec.task.num_classes))

    def _write_rates(self, rates: Rates) -> None:
        self.population.rate_scale.copy_(rates.scale)
        self.population.decay_at.copy_(rates.decay_at)
