"""Playing one episode. Everything is kept on the device and read once, at the end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from esper.lifecycle.actions import Actions
from esper.lifecycle.slot_states import SlotStates
from esper.population.data import MemberData
from esper.simic.environment import Environment, GrowthEnvironment
from esper.simic.episode_record import EpisodeRecord, Floats
from esper.simic.steps import StepResult
from esper.tamiyo.blocks import Blocks
from esper.tamiyo.controller import Controller, Scene
from esper.utils.rows import (
    on_the_cpu,
    stacked,
    under_prefix,
    unstacked,
    with_prefix,
)


class Episode:
    """One episode under way: a controller and an environment, with all that was seen and done so far.

    `initial_slots`: the seeds that the networks begin with, none by default.
    """

    def __init__(
        self,
        environment: Environment,
        controller: Controller,
        episode: int = 0,
        initial_slots: SlotStates | None = None,
    ):
        self.environment, self.controller = environment, controller
        looks = (
            controller.looking(environment.num_members)
            if isinstance(controller, Blocks)
            else controller.looks
        )
        self.observation = environment.reset(episode, initial_slots, looks)
        members, slots, seed = environment.members, environment.num_slots, environment.spec.seed
        controller.begin(Scene(members, slots, seed, environment.device, episode, environment.batches))
        self._seen, self._done = [_seen(environment)], list[dict[str, Tensor]]()

    def step(self) -> StepResult:
        """Let the controller decide once, and live through what follows."""
        environment, masks = self.environment, self.environment.masks()
        actions = self.controller.decide(self.observation, masks, environment.clock)
        result = environment.step(actions)
        self.observation = result.observation
        self._seen.append(_seen(environment))
        self._done.append(_done(actions if isinstance(actions, Actions) else actions[0], result))
        return result

    def look_again(self) -> None:
        """The environment was changed after the last step: what is seen last is what it is now."""
        self._seen[-1] = _seen(self.environment)

    def record(self) -> EpisodeRecord:
        """The episode so far, of at least one step."""
        environment = self.environment
        story = {
            "seen": stacked(self._seen),
            "done": stacked(self._done),
            "slots": environment.slots.tensors(),
        }
        held = {f"{part}.{name}": value for part, named in story.items() for name, value in named.items()}
        read = on_the_cpu(held | {"members": environment.members})
        seen, done = (
            {name: value.numpy() for name, value in under_prefix(part, read).items()}
            for part in ("seen", "done")
        )
        steps = _steps_that_counted(seen["spent"])
        return EpisodeRecord(
            episode=environment.episode,
            gamma=environment.spec.gamma,
            slot_ids=environment.slot_config.slot_ids,
            host_parameters=environment.host_parameters,
            seed_parameters=environment.bodies.seed_parameters().numpy(),
            gate_parameters=environment.bodies.gate_parameters().numpy(),
            members=read["members"].numpy(),
            final_slots=SlotStates(**under_prefix("slots", read)),
            **{name: np.concatenate([value[:steps], value[-1:]]) for name, value in seen.items()},
            **{name: value[:steps] for name, value in done.items()},
        )

    def state_dict(self) -> dict[str, Tensor]:
        """Return the steps so far, of which there is at least one, and what the controller remembers.

        The environment has a state of its own.
        """
        return {
            **with_prefix("seen", stacked(self._seen)),
            **with_prefix("done", stacked(self._done)),
            **with_prefix("controller", self.controller.state_dict()),
        }

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        """Continue after the steps of a saved episode; the environment's state was loaded before."""
        self._seen, self._done = (unstacked(under_prefix(n, tensors)) for n in ("seen", "done"))
        self.controller.load_state_dict(under_prefix("controller", tensors))
        self.observation = self.environment.observe()


def play(
    environment: Environment,
    controller: Controller,
    episode: int,
    initial_slots: SlotStates | None = None,
    on_step: Callable[[StepResult], None] | None = None,
    finish: Callable[[], None] | None = None,
) -> EpisodeRecord:
    """Let a controller live through one episode; the record of it.

    `on_step` sees every result as it comes. `finish` may change the environment after the last step; what is
    seen last is what it left.
    """
    played = Episode(environment, controller, episode, initial_slots)
    while not environment.done:
        result = played.step()
        if on_step is not None:
            on_step(result)
    if finish is not None:
        finish()
        played.look_again()
    return played.record()


def _seen(environment: Environment) -> dict[str, Tensor]:
    rows = environment.rows
    return {
        "accuracy": rows.signals.accuracy,
        "loss": rows.signals.loss,
        "parameters": environment.parameters,
        "potential": environment.potential,
        "spent": environment.flops,
        "seen_stage": rows.slots.stage,
        "seen_blueprint": rows.slots.blueprint,
        "seen_style": rows.slots.style,
        "seen_age": rows.slots.age,
        "contribution": rows.evidence.contribution,
        "health": rows.evidence.gradient_health,
        "shadow_gain": rows.evidence.shadow_gain,
    }


def _done(actions: Actions, result: StepResult) -> dict[str, Tensor]:
    outcome, ticked = result.outcome, result.ticked
    return {
        "choices": actions.choices * result.active.unsqueeze(1),  # the finished wait
        "executed_op": outcome.executed_op,
        "succeeded": outcome.succeeded,
        "refused_by": outcome.refused_by,
        "reward": result.reward,
        "panicked": result.panicked,
        "training_loss": result.training.loss,
        "measured_loss": result.validation.loss,
        "stage": outcome.states.stage,
        "alpha": outcome.states.alpha,
        "blueprint": outcome.states.blueprint,
        "style": outcome.states.style,
        "ticked_stage": ticked.states.stage,
        "germinated": outcome.germinated,
        "pruned": outcome.pruned | ticked.pruned,
        "rolled_back": result.rolled_back,
    }


def _steps_that_counted(spent: NDArray[Any]) -> int:
    """How many steps there were but for those at the end before which all had finished; at least one.

    spent [T + 1, N]: nobody spends anything in an empty step.
    """
    moved = (np.diff(spent, axis=0) > 0).any(axis=1)
    return int(np.flatnonzero(moved).max(initial=0)) + 1


@dataclass(frozen=True)
class TestResult:
    """What the members of an environment reach on data that nothing else ever read."""

    __test__ = False  # pytest: not a test case

    accuracy: Floats  # [N] 0..1
    loss: Floats  # [N]


def evaluate_test(environment: GrowthEnvironment) -> TestResult:
    """The networks as they stand now, on the whole test split: the only place that opens it."""
    data = environment.population.member_data([task.test() for task in environment.population.tasks])
    size = environment.spec.population.validation_samples
    loss = torch.zeros(environment.num_members, dtype=torch.float64, device=environment.device)
    accuracy = torch.zeros_like(loss)
    for start in range(0, data.num_samples, size):
        samples = MemberData(
            data.inputs[:, start : start + size], data.targets[:, start : start + size], data.task_of
        )
        measured = environment.population.validate(environment.slots, samples, ablate=False)
        loss += measured.loss.double() * samples.num_samples
        accuracy += measured.accuracy.double() * samples.num_samples
    return TestResult(
        accuracy=(accuracy / data.num_samples).float().cpu().numpy(),
        loss=(loss / data.num_samples).float().cpu().numpy(),
    )
