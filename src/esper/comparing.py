"""Compare arms at equal compute: controllers that grow networks, and networks that never change.

Every arm has the same members: the same first weights, data order and random numbers, so that member i
differs between two arms only by what was done with it. Results are those of the test split, which is read
once per network, after its training.

A network that never changes is trained for as many FLOPs as growth spent: the host as it is (`static`), or a
host of another size (`fixed:hidden=16+depth=2`).

All arms choose their weights by one rule and pay for the validation that they use. By default the weights are
those of the last epoch; then a network that never changes pays for no validation. Where the environment's
`best_epoch` is set, every arm ends with the weights of its best epoch on validation data and pays for a
validation in each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count

import numpy as np
import torch

from esper.builders import check_host, make_environment
from esper.config import RunConfig
from esper.controllers import Arm, Fixed, arms_that_may_grow, check_schedule
from esper.runs.schema import Comparison, ControllerResult, CurvePoint, paired_differences
from esper.runs.trajectories import Trajectories
from esper.simic.costs import TRAINING_PASSES
from esper.simic.ending import FinalSelection
from esper.simic.environment import GrowthEnvironment, StepResult
from esper.simic.rollout import Episode, EpisodeRecord, Floats, TestResult, evaluate_test
from esper.simic.state import potential
from esper.simic.telemetry import build_trajectories, describe_host
from esper.tamiyo.controller import Controller
from esper.tamiyo.scripted import Static
from esper.tasks import Task
from esper.utils.devices import own_device

EVALUATION_EPISODE = 1 << 20  # far from any episode that a controller was trained in
OnStep = Callable[[StepResult], None]
OnProgress = Callable[[float], None]  # is given how many arms are done: 1.5 is half-way through the second


@dataclass(frozen=True)
class ControllerRun:
    """One arm's episode and what it reached on the test split."""

    name: str
    record: EpisodeRecord
    test: TestResult
    potential: Floats  # [N] Φ with the test accuracy
    epochs: Floats  # [N] trained, in epochs of a decision step

    def result(self) -> ControllerResult:
        """Return the figures that results.json holds, member by member."""
        record = self.record
        curve = [record.spent.mean(axis=1), record.accuracy.mean(axis=1), record.parameters.mean(axis=1)]
        return ControllerResult(
            name=self.name,
            members=record.members.tolist(),
            test_accuracy=self.test.accuracy.tolist(),
            parameters=record.parameters[-1].tolist(),
            member_epochs=self.epochs.tolist(),
            flops=record.flops.tolist(),
            potential=self.potential.tolist(),
            curve=[CurvePoint(*map(float, point)) for point in zip(*curve, strict=True)],
        )


def run_controller(
    environment: GrowthEnvironment, name: str, controller: Controller, on_step: OnStep | None = None
) -> ControllerRun:
    """Run a controller through one episode, and its networks on the test split.

    With `best_epoch` in the spec, networks end with their best weights, and every seed is kept or removed.
    """
    episode = Episode(environment, controller, EVALUATION_EPISODE)
    selection = FinalSelection(environment) if environment.spec.best_epoch else None
    while not environment.done:
        result = episode.step()
        if selection is not None:
            selection.update(result)
        if on_step is not None:
            on_step(result)
    if selection is not None:
        selection.finish()
        episode.refresh_last()
    record = episode.record()
    test = evaluate_test(environment)
    # Φ = accuracy − rent of the parameters, with the test accuracy in place of the validation accuracy
    ratio = torch.from_numpy(record.parameter_ratio[-1]).float()
    worth = potential(torch.from_numpy(test.accuracy), ratio, environment.spec.reward)
    return ControllerRun(name, record, test, worth.numpy(), record.active.sum(axis=0).astype(np.float32))


# ---- networks that never change --------------------------------------------------------------------------


def fit_schedule(minibatches: float, steps: int, batches: int, validation: float = 0.0) -> tuple[int, int]:
    """Return the steps and the minibatches in a step that cost what is nearest to `minibatches`.

    steps, batches: those of an episode. The result has between `steps` and twice as many, or one for each
    minibatch if these are few. validation: what the validation of a step costs, in minibatches.
    """
    # Many candidates, because steps × minibatches must come close to a number that may be prime.
    wanted = max(1, round(minibatches))
    first = min(steps, wanted)
    found = [(n, max(1, round(wanted / n - validation))) for n in range(first, 2 * first + 1)]
    return min(found, key=lambda schedule: abs(schedule[0] * (schedule[1] + validation) - wanted))


def run_fixed(
    environment: GrowthEnvironment, name: str, budget: float, on_progress: OnProgress
) -> ControllerRun:
    """Train networks that never change, for `budget` FLOPs a member on the mean over members.

    Every epoch is charged a validation where the best one counts; validations that only draw a curve are
    free. on_progress: is given the share that is done.
    """
    spec, (batch, validation) = environment.spec, step_costs(environment)
    # price of a step = minibatches × price of one, and of a validation where it chooses the weights
    validation *= spec.best_epoch
    steps, batches = fit_schedule(
        budget / batch, spec.episode.steps, spec.population.batches_per_epoch, validation / batch
    )
    # The budget is converted to steps already, so the clock counts those.
    episode = spec.episode.model_copy(update={"steps": steps, "clock": "steps", "flops": None})
    recipe = {"batches_per_epoch": batches, "seed_weights": 1}  # nothing grows: one draw of a seed is enough
    population = spec.population.model_copy(update=recipe)
    fresh = GrowthEnvironment(replace(spec, episode=episode, population=population))
    run = run_controller(fresh, name, Static(), _count_steps(on_progress, steps))
    step = np.full(environment.num_members, batches * batch + validation)  # [N] FLOPs
    spent = np.arange(steps + 1)[:, None] * step  # [T + 1, N]
    epochs = np.full(len(step), steps * batches / spec.population.batches_per_epoch, dtype=np.float32)
    return replace(run, record=replace(run.record, spent=spent), epochs=epochs)


def step_costs(environment: GrowthEnvironment) -> tuple[float, float]:
    """Return the FLOPs of a minibatch and of a validation of a bare host."""
    task, config, host = environment.spec.task, environment.spec.population, environment.bodies.host_flops
    samples = min(len(task.validation), config.validation_samples)
    return TRAINING_PASSES * config.batch_size * host, samples * host


def _count_steps(on_progress: OnProgress, steps: int) -> OnStep:
    """Make an `on_step` that reports the share of `steps` that have passed."""
    ticks = count(1)
    return lambda result: on_progress(min(1.0, next(ticks) / steps))


# ---- all arms --------------------------------------------------------------------------------------------


def prepare(
    config: RunConfig, arms: Mapping[str, Arm], force: bool = False, best_epoch: bool = False
) -> tuple[GrowthEnvironment, dict[str, Arm], list[str]]:
    """Build the environment of a comparison, and refuse what cannot run before anything has.

    force: controllers act outside of their conditions, too; else networks that never grow replace them there.
    Returns the environment, the arms that run, and one sentence for each controller that does not act.
    """
    environment = make_environment(config, own_device(config.device), best_epoch=best_epoch)
    spec = environment.spec
    for arm in arms.values():
        if isinstance(arm, Fixed) and arm.host:
            check_host(_with_options(spec.task, arm), len(spec.members), environment.device)
    acting = (dict(arms), list[str]()) if force else arms_that_may_grow(arms, spec)
    for arm in acting[0].values():
        check_schedule(arm, environment)
    return environment, *acting


def compare(
    environment: GrowthEnvironment, arms: Mapping[str, Arm], on_progress: OnProgress = lambda done: None
) -> list[ControllerRun]:
    """Run every arm, controllers first, because the others get what they spend; return them as given.

    Networks that never change get what the controller spent that spent most, on the mean over members, or,
    without one, what an episode of the host costs.
    """
    runs: dict[str, ControllerRun] = {}

    def advance(share: float) -> None:
        on_progress(len(runs) + share)

    # Controllers first: their FLOPs are the budget of the arms that never change.
    for name, arm in arms.items():
        if not isinstance(arm, Fixed):
            runs[name] = run_controller(environment, name, arm, _count_steps(advance, environment.steps))
    spec, (batch, validation) = environment.spec, step_costs(environment)
    epoch = spec.population.batches_per_epoch * batch + spec.best_epoch * validation  # FLOPs
    spent = [float(run.record.flops.mean()) for run in runs.values()]
    budget = max(spent, default=environment.steps * epoch)
    fixed = {name: arm for name, arm in arms.items() if isinstance(arm, Fixed)}
    for name, arm in fixed.items():
        twin = next((n for n, other in fixed.items() if n in runs and other == arm), None)
        if twin is not None:  # a controller that does not act here is the same as not growing
            runs[name] = replace(runs[twin], name=name)
            continue
        fresh = environment
        if arm.host:
            task, *variants = (_with_options(each, arm) for each in (spec.task, *spec.variants))
            fresh = GrowthEnvironment(replace(spec, task=task, variants=tuple(variants)))
        runs[name] = run_fixed(fresh, name, budget, advance)
    return [runs[name] for name in arms]


def _with_options(task: Task, arm: Fixed) -> Task:
    """Return the task with a host of the size that a fixed arm asks for."""
    return replace(task, host=replace(task.host, options={**task.host.options, **arm.host}))


def as_comparison(
    environment: GrowthEnvironment, runs: Sequence[ControllerRun], remarks: Sequence[str] = ()
) -> Comparison:
    """Return what the report and results.json hold; differences are against the first run."""
    task, results = environment.spec.task, [run.result() for run in runs]
    return Comparison(
        task=task.name,
        host=str(task.host) if environment.spec.make_host is None else "given",
        controllers=results,
        differences=paired_differences(results),
        remarks=list(remarks),
    )


def trajectories_of(environment: GrowthEnvironment, runs: Sequence[ControllerRun]) -> list[Trajectories]:
    """Return the slots of all members under each arm, numbered from 1."""
    parts = describe_host(environment.population)
    return [build_trajectories(run.record, parts, i, run.name) for i, run in enumerate(runs, start=1)]
