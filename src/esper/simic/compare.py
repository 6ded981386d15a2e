"""Controllers on equal footing: the same members, initial weights, data order and random numbers for each.

Every controller plays the same episode of the same environment, so that member i differs between two of them
by what the controllers did and by nothing else. What is reported is the test split, which is opened once per
controller, after its episode.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from esper.lifecycle.slot_states import SlotStates
from esper.lifecycle.stages import HEARD_STAGES, Stage, stage_table
from esper.simic.environment import GrowthEnvironment, StepResult
from esper.simic.rewards import potential
from esper.simic.rollout import EpisodeRecord, Floats, TestResult, evaluate_test, play
from esper.tamiyo.controllers import Controller, Static
from esper.telemetry.differences import paired_differences
from esper.telemetry.schema import Comparison, ControllerResult

EVALUATION_EPISODE = 1 << 20  # far from any episode that a controller was trained in


@dataclass(frozen=True)
class ControllerRun:
    """One controller's episode and what it reached on the test split."""

    name: str
    record: EpisodeRecord
    test: TestResult
    potential: Floats  # [N] Φ with the test accuracy

    def result(self) -> ControllerResult:
        return ControllerResult(
            name=self.name,
            members=self.record.members.tolist(),
            test_accuracy=self.test.accuracy.tolist(),
            parameters=self.record.parameters[-1].tolist(),
            member_epochs=[self.record.num_steps] * self.record.num_members,
            flops=self.record.flops.tolist(),
            potential=self.potential.tolist(),
        )


def run_controller(
    environment: GrowthEnvironment,
    name: str,
    controller: Controller,
    episode: int = EVALUATION_EPISODE,
    initial_slots: SlotStates | None = None,
    on_step: Callable[[StepResult], None] | None = None,
) -> ControllerRun:
    """One controller through one episode, and its networks on the test split."""
    record = play(environment, controller, episode, initial_slots, on_step)
    test = evaluate_test(environment)
    worth = potential(
        torch.from_numpy(test.accuracy),
        torch.from_numpy(record.parameter_ratio[-1]).float(),
        environment.spec.reward,
    )
    return ControllerRun(name, record, test, worth.numpy())


def compare(
    environment: GrowthEnvironment,
    controllers: Mapping[str, Controller],
    static_final_of: Sequence[str] = (),
    episode: int = EVALUATION_EPISODE,
    on_step: Callable[[StepResult], None] | None = None,
) -> Iterator[ControllerRun]:
    """Each controller in turn, then the network that each of `static_final_of` ended with, from the start."""
    unknown = sorted(set(static_final_of) - set(controllers))
    if unknown:
        raise ValueError(
            f"static_final_of names {', '.join(unknown)}; allowed are {', '.join(controllers)}, "
            "the controllers that are compared"
        )
    ended: dict[str, SlotStates] = {}
    for name, controller in controllers.items():
        run = run_controller(environment, name, controller, episode, on_step=on_step)
        ended[name] = run.record.final_slots
        yield run
    for name in static_final_of:
        yield run_controller(
            environment, f"static-final of {name}", Static(), episode, from_the_start(ended[name]), on_step
        )


def from_the_start(slots: SlotStates) -> SlotStates:
    """The seeds that a network ended with, as fossils at full strength: the same network with no growth."""
    kept = stage_table(HEARD_STAGES, slots.device)[slots.stage] & (slots.alpha > 0)
    blank = SlotStates.empty(slots.num_members, slots.num_slots, slots.device)
    full = torch.where(kept, 1.0, blank.alpha)
    return blank.replace(
        stage=blank.stage.masked_fill(kept, int(Stage.FOSSILIZED)),
        blueprint=torch.where(kept, slots.blueprint, blank.blueprint),
        style=torch.where(kept, slots.style, blank.style),
        tempo=torch.where(kept, slots.tempo, blank.tempo),
        alpha=full,
        alpha_start=full,
        alpha_target=full,
        enabled=slots.enabled,
    )


def as_comparison(environment: GrowthEnvironment, runs: Sequence[ControllerRun]) -> Comparison:
    """What the report and results.json hold; differences are against the first run."""
    task, host = environment.spec.task, environment.spec.task.host
    options = ", ".join(f"{name}={value}" for name, value in host.options.items())
    results = [run.result() for run in runs]
    return Comparison(
        task=task.name,
        host=f"{host.preset}({options})" if environment.spec.make_host is None else "given",
        controllers=results,
        differences=paired_differences(results),
    )
