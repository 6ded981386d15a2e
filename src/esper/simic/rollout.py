"""Play one episode and record it. Everything stays on the device and is read once, at the end."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from esper.lifecycle.actions import Actions
from esper.lifecycle.legality import Gate
from esper.lifecycle.slot_states import SlotStates
from esper.population.data import MemberData
from esper.simic.environment import Environment, GrowthEnvironment, StepResult
from esper.tamiyo.controller import Blocks, Controller, EpisodeInfo
from esper.utils.rows import add_prefix, map_tensors, refill, stack_steps, strip_prefix, to_cpu, unstack_steps

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
_ONCE = ("seed_parameters", "gate_parameters", "members")  # arrays of a record that have no axis of steps
# What a step of a finished member leads to, beside the slots that it ended with; 0, which is WAIT, elsewhere.
_AT_REST = {"succeeded": 1, "refused_by": int(Gate.NONE), "training_loss": np.nan, "measured_loss": np.nan}


@dataclass(frozen=True, repr=False)  # its arrays would fill a screen
class EpisodeRecord:
    """One episode of N members with S slots over T steps, on the host.

    Arrays of T + 1 rows hold what was seen before each decision and, last, at the end; arrays of T rows hold
    what each decision led to. `stage`, `alpha` and `blueprint` are those right after the action was applied.
    """

    gamma: float
    slot_ids: tuple[str, ...]
    host_parameters: int
    seed_parameters: Ints  # [S, blueprints]
    gate_parameters: Ints  # [S] of a seed's gate, if its style has one
    members: Ints  # [N] global ids
    # seen, T + 1
    accuracy: Floats  # [T + 1, N] validation, 0..1
    loss: Floats  # [T + 1, N]
    parameters: Ints  # [T + 1, N]
    potential: Floats  # [T + 1, N] Φ
    spent: Doubles  # [T + 1, N] training FLOPs since the episode began
    seen_stage: Ints  # [T + 1, N, S]
    seen_blueprint: Ints  # [T + 1, N, S]
    seen_style: Ints  # [T + 1, N, S]
    seen_age: Ints  # [T + 1, N, S]
    contribution: Floats  # [T + 1, N, S] points, NaN = unmeasured
    health: Floats  # [T + 1, N, S]
    shadow_gain: Floats  # [T + 1, N, S]
    # done, T
    active: Bools  # [T, N] who trained; the others were finished before
    choices: Ints  # [T, N, heads] as asked for
    executed_op: Ints  # [T, N] WAIT where the action failed
    succeeded: Bools  # [T, N]
    refused_by: Ints  # [T, N] a Gate, −1 where none refused
    reward: Floats  # [T, N]
    panicked: Bools  # [T, N]
    training_loss: Floats  # [T, N]
    measured_loss: Floats  # [T, N] of the validation, before the governor took anything back
    stage: Ints  # [T, N, S]
    alpha: Floats  # [T, N, S]
    blueprint: Ints  # [T, N, S]
    style: Ints  # [T, N, S]
    ticked_stage: Ints  # [T, N, S] after the tick
    germinated: Bools  # [T, N, S]
    pruned: Bools  # [T, N, S] seeds that ended by an action or at the end of a ramp
    rolled_back: Bools  # [T, N, S] seeds that the governor ended
    # the end
    final_slots: SlotStates  # on the host
    # seen: the learning rate, times the recipe's; `scale` and `decay_at` of Rates. None where nobody sets it
    rates: Floats | None = None  # [T + 1, N, 3]

    def select_members(self, span: slice) -> EpisodeRecord:
        """Return the same episode of some of its members."""
        arrays: dict[str, Any] = {name: value[:, span] for name, value in self._by_step().items()}
        return replace(self, members=self.members[span], final_slots=self.final_slots[span], **arrays)

    def tensors(self) -> dict[str, Tensor]:
        """Return all that differs between records of one episode, by name: for `concatenate`."""
        arrays = {**self._by_step(), "members": self.members}
        slots = add_prefix("final_slots", self.final_slots.tensors())
        return {name: torch.from_numpy(value) for name, value in arrays.items()} | slots

    def concatenate(self, parts: Sequence[Mapping[str, Tensor]]) -> EpisodeRecord:
        """Join records of members that were played apart, from what `tensors` returned for each.

        Where a part ended before the longest one, its members are at rest until the end.
        """
        names, records = self._by_step(), []
        for part in parts:
            slots = refill(self.final_slots, strip_prefix("final_slots", part))
            arrays: dict[str, Any] = {name: part[name].numpy() for name in (*names, "members")}
            records.append(replace(self, final_slots=slots, **arrays))
        steps = max(record.num_steps for record in records)
        longest = [vars(record._pad(steps)) for record in records]
        arrays = {name: np.concatenate([each[name] for each in longest], axis=1) for name in names}
        slots = map_tensors(lambda *each: torch.cat(each), *(record.final_slots for record in records))
        members = np.concatenate([record.members for record in records])
        return replace(self, members=members, final_slots=slots, **arrays)

    def _by_step(self) -> dict[str, NDArray[Any]]:
        """Return the arrays that have an axis of steps, and behind it one of members."""
        return {n: v for n, v in vars(self).items() if isinstance(v, np.ndarray) and n not in _ONCE}

    def _pad(self, steps: int) -> EpisodeRecord:
        """Return the same record with members that stay as they ended until there were that many steps."""
        resting = {name: vars(self)[f"seen_{name}"][-1] for name in ("stage", "blueprint", "style")}
        resting |= {"ticked_stage": resting["stage"], "alpha": self.final_slots.alpha.numpy()}
        arrays: dict[str, Any] = {}
        for name, value in self._by_step().items():
            with_outcome = resting.get(name, np.full_like(value[-1], _AT_REST.get(name, 0)))
            still = with_outcome if len(value) == self.num_steps else value[-1]  # else it is what was seen
            arrays[name] = np.concatenate([value, np.repeat(still[None], steps - self.num_steps, axis=0)])
        return replace(self, **arrays)

    @property
    def num_steps(self) -> int:
        return len(self.reward)

    @property
    def num_members(self) -> int:
        return len(self.members)

    @property
    def returns(self) -> Doubles:
        """Return Σ γ^t r_t of each member, which the learner maximizes.  # [N]"""
        discount = np.power(self.gamma, np.arange(self.num_steps, dtype=np.float64))
        return np.asarray(discount @ self.reward, dtype=np.float64)

    @property
    def flops(self) -> Doubles:
        """Return training FLOPs of the whole episode.  # [N]"""
        return np.asarray(self.spent[-1], dtype=np.float64)

    @property
    def parameter_ratio(self) -> Doubles:
        """Return parameters over the host's own.  # [T + 1, N]"""
        return np.asarray(self.parameters / self.host_parameters, dtype=np.float64)


class Episode:
    """One episode under way: a controller and an environment, with all that was seen and done so far."""

    def __init__(self, environment: Environment, controller: Controller, episode: int = 0):
        self.environment, self.controller = environment, controller
        uses_metrics = (
            controller.metric_users(environment.num_members)
            if isinstance(controller, Blocks)
            else controller.uses_metrics
        )
        self.observation = environment.reset(episode, uses_metrics=uses_metrics)
        members, slots, seed = environment.members, environment.num_slots, environment.spec.seed
        device, batches = environment.device, environment.bodies.batches
        controller.begin(EpisodeInfo(members, slots, seed, device, episode, batches))
        self._seen, self._done = [_seen(environment)], list[dict[str, Tensor]]()

    def step(self) -> StepResult:
        """Let the controller decide once, and run the step."""
        environment, masks = self.environment, self.environment.masks()
        actions = self.controller.decide(self.observation, masks, environment.clock)
        result = environment.step(actions)
        self.observation = result.observation
        self._seen.append(_seen(environment))
        self._done.append(_done(actions if isinstance(actions, Actions) else actions[0], result))
        return result

    def refresh_last(self) -> None:
        """Replace the last observation by the present one, after a change of the environment."""
        self._seen[-1] = _seen(self.environment)

    def record(self) -> EpisodeRecord:
        """Return the record of the episode so far, of at least one step."""
        environment = self.environment
        held = add_prefix("seen", stack_steps(self._seen)) | add_prefix("done", stack_steps(self._done))
        held |= add_prefix("slots", environment.slots.tensors())
        read = to_cpu(held | {"members": environment.members})
        seen, done = (
            {name: value.numpy() for name, value in strip_prefix(part, read).items()}
            for part in ("seen", "done")
        )
        # Members end at different steps, and the environment learns of the last one a step later.
        steps = int(done["active"].any(axis=1).sum())
        return EpisodeRecord(
            gamma=environment.spec.gamma,
            slot_ids=environment.slot_config.slot_ids,
            host_parameters=environment.host_parameters,
            seed_parameters=environment.bodies.seed_parameters().numpy(),
            gate_parameters=environment.bodies.gate_parameters().numpy(),
            members=read["members"].numpy(),
            final_slots=SlotStates(**strip_prefix("slots", read)),
            **{name: np.concatenate([value[:steps], value[-1:]]) for name, value in seen.items()},
            **{name: value[:steps] for name, value in done.items()},
        )

    def state_dict(self) -> dict[str, Tensor]:
        """Return the steps so far, at least one, and the controller's state; the environment has its own."""
        return {
            **add_prefix("seen", stack_steps(self._seen)),
            **add_prefix("done", stack_steps(self._done)),
            **add_prefix("controller", self.controller.state_dict()),
        }

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        """Continue after the steps of a saved episode; the environment's state was loaded before."""
        seen, done = (strip_prefix(name, tensors) for name in ("seen", "done"))
        done.setdefault("active", torch.ones_like(done["succeeded"]))  # versions up to 0.5.1 did not keep it
        self._seen, self._done = unstack_steps(seen), unstack_steps(done)
        self.controller.load_state_dict(strip_prefix("controller", tensors))
        self.observation = self.environment.observe()


def play(
    environment: Environment,
    controller: Controller,
    episode: int,
    on_step: Callable[[StepResult], None] | None = None,
) -> EpisodeRecord:
    """Play one episode and return its record; `on_step` sees every result as it comes."""
    played = Episode(environment, controller, episode)
    while not environment.done:
        result = played.step()
        if on_step is not None:
            on_step(result)
    return played.record()


def _seen(environment: Environment) -> dict[str, Tensor]:
    rows, rates = environment.state, environment.state.rates
    seen = {
        "accuracy": rows.history.accuracy,
        "loss": rows.history.loss,
        "parameters": environment.derived.parameters,
        "potential": environment.derived.potential,
        "spent": environment.flops,
        **{f"seen_{name}": getattr(rows.slots, name) for name in ("stage", "blueprint", "style", "age")},
        "contribution": rows.evidence.contribution,
        "health": rows.evidence.gradient_health,
        "shadow_gain": rows.evidence.shadow_gain,
    }
    if rates is not None:
        left, at = 1.0 - environment.derived.spent, 1.0 - rates.decay_at
        now = rates.scale * torch.where(left < at, left / at, 1.0).float()  # it falls linearly to 0
        seen["rates"] = torch.stack((now, rates.scale, rates.decay_at), dim=-1)
    return seen


def _done(actions: Actions, result: StepResult) -> dict[str, Tensor]:
    outcome, ticked = result.outcome, result.ticked
    return {
        "active": result.active,
        "choices": actions.choices * result.active.unsqueeze(1),  # the finished wait
        **{name: getattr(outcome, name) for name in ("executed_op", "succeeded", "refused_by", "germinated")},
        "reward": result.reward,
        "panicked": result.panicked,
        "training_loss": result.training.loss,
        "measured_loss": result.validation.loss,
        **{name: getattr(outcome.states, name) for name in ("stage", "alpha", "blueprint", "style")},
        "ticked_stage": ticked.states.stage,
        "pruned": outcome.pruned | ticked.pruned,
        "rolled_back": result.rolled_back,
    }


@dataclass(frozen=True)
class TestResult:
    """What the members of an environment reach on data that nothing else ever read."""

    __test__ = False  # pytest: not a test case

    accuracy: Floats  # [N] 0..1
    loss: Floats  # [N]


def evaluate_test(environment: GrowthEnvironment) -> TestResult:
    """Evaluate the present networks on the whole test split: the only place that opens it."""
    data = environment.population.member_data([task.test() for task in environment.population.tasks])
    size = environment.spec.population.validation_samples
    loss = torch.zeros(environment.num_members, dtype=torch.float64, device=environment.device)
    accuracy = torch.zeros_like(loss)
    for start in range(0, data.num_samples, size):
        part = slice(start, start + size)
        samples = MemberData(data.inputs[:, part], data.targets[:, part], data.task_of)
        measured = environment.population.validate(environment.slots, samples, ablate=False)
        loss += measured.loss.double() * samples.num_samples
        accuracy += measured.accuracy.double() * samples.num_samples
    return TestResult(
        accuracy=(accuracy / data.num_samples).float().cpu().numpy(),
        loss=(loss / data.num_samples).float().cpu().numpy(),
    )
