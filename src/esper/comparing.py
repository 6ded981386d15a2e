"""Arms on equal footing: controllers that grow networks, and networks that never change, at equal compute.

Every arm has the same members: the same first weights, data order and random numbers, so that member i
differs between two arms by what was done with it and by nothing else. What is reported is the test split,
which is opened once per network, after its training.

A network that never changes is trained for as many FLOPs as growth spent: the host as it is (`static`), the
best of several hosts on validation data (`best-of`, `best-of:8`), a host of another size
(`fixed:hidden=16+depth=2`), or the network that a controller ended with (`final:NAME`).

All arms take their weights by one rule and pay for the validation that they use. By default the weights are
those of the last epoch; then a network that never changes pays for no validation, but for the one that
chooses the best of several. Where the environment's `best_epoch` is set, every arm ends with the weights of
its best epoch on validation data and pays for a validation in each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

import numpy as np
import torch

from esper.builders import check_host, shaped_host
from esper.config import RunConfig
from esper.controllers import Arm, Fixed, arms_that_may_grow
from esper.lifecycle.legality import is_heard
from esper.lifecycle.slot_states import SlotStates
from esper.population.shapes import shapes_of
from esper.runs.differences import paired_differences
from esper.runs.lanes import Lanes
from esper.runs.schema import Comparison, ControllerResult, CurvePoint
from esper.shards import Shards
from esper.simic.costs import Prices
from esper.simic.deciding import at_full_strength
from esper.simic.ending import Ending
from esper.simic.environment import GrowthEnvironment
from esper.simic.episode_record import EpisodeRecord, Floats
from esper.simic.lanes import host_parts, lanes_of
from esper.simic.rewards import potential
from esper.simic.rollout import TestResult, evaluate_test, play
from esper.simic.steps import StepResult
from esper.tamiyo.controller import Controller
from esper.tamiyo.scripted import Static
from esper.tasks import Task
from esper.utils.devices import cpu_threads
from esper.utils.errors import UserError
from esper.utils.gather import Alone, Gather

EVALUATION_EPISODE = 1 << 20  # far from any episode that a controller was trained in
OnStep = Callable[[StepResult], None]


@dataclass(frozen=True)
class ControllerRun:
    """One arm's episode and what it reached on the test split."""

    name: str
    record: EpisodeRecord
    test: TestResult
    potential: Floats  # [N] Φ with the test accuracy
    epochs: float  # trained, in epochs of a decision step
    shapes: list[str] | None = None  # of networks that are nothing but blocks

    def result(self) -> ControllerResult:
        """The figures that results.json holds, member by member."""
        return ControllerResult(
            name=self.name,
            members=self.record.members.tolist(),
            test_accuracy=self.test.accuracy.tolist(),
            parameters=self.record.parameters[-1].tolist(),
            member_epochs=[self.epochs] * self.record.num_members,
            flops=self.record.flops.tolist(),
            potential=self.potential.tolist(),
            curve=[
                CurvePoint(float(flops), float(accuracy), float(parameters))
                for flops, accuracy, parameters in zip(
                    self.record.spent.mean(axis=1),
                    self.record.accuracy.mean(axis=1),
                    self.record.parameters.mean(axis=1),
                    strict=True,
                )
            ],
        )


def run_controller(
    environment: GrowthEnvironment | Shards,
    name: str,
    controller: Controller,
    initial_slots: SlotStates | None = None,
    on_step: OnStep | None = None,
    episode: int = EVALUATION_EPISODE,
) -> ControllerRun:
    """One controller through one episode, and its networks on the test split.

    With `best_epoch` in the environment's spec the best epoch comes back, and every seed is kept or taken
    out.
    """
    shards, played = Shards.of(environment), []
    for each, slots in zip(shards.held, shards.slots(initial_slots), strict=True):
        if each.spec.best_epoch:
            record = Ending(each).play(controller, episode, slots, on_step)
        else:
            record = play(each, controller, episode, slots, on_step)
        played.append((record, evaluate_test(each)))
    record, test = shards.joined(played)
    worth = potential(
        torch.from_numpy(test.accuracy),
        torch.from_numpy(record.parameter_ratio[-1]).float(),
        shards.first.spec.reward,
    )
    whole = shards.first.num_members == shards.members
    shapes = shapes_of(shards.first.population, shards.first.slots) if whole else None
    return ControllerRun(name, record, test, worth.numpy(), record.num_steps, shapes)


# ---- networks that never change --------------------------------------------------------------------------


@dataclass(frozen=True)
class TrainingLength:
    """How long a network is trained."""

    steps: int
    batches: int  # minibatches in a step


def schedule_for(minibatches: float, like: TrainingLength, validation: float = 0.0) -> TrainingLength:
    """The steps and the minibatches in a step that cost what is nearest to `minibatches`.

    Steps lie between those of `like` and twice as many, or there is one for each minibatch if these are few.
    validation: what the validation of a step costs, in minibatches.
    """
    wanted = max(1, round(minibatches))
    first = min(like.steps, wanted)
    found = [
        TrainingLength(steps, max(1, round(wanted / steps - validation)))
        for steps in range(first, 2 * first + 1)
    ]
    return min(found, key=lambda schedule: abs(schedule.steps * (schedule.batches + validation) - wanted))


def run_fixed(
    environment: GrowthEnvironment | Shards,
    name: str,
    budget: float,
    slots: SlotStates | None = None,
    restarts: int = 1,
    on_step: OnStep | None = None,
) -> ControllerRun:
    """Networks that never change, trained for `budget` FLOPs a member on the mean over members.

    slots: the seeds that they have from the start, as `from_the_start` makes them; none by default. With
    several restarts each has an equal share of the budget and other first weights, and a member's best one on
    validation data counts; with 0 restarts there are as many as can train for an episode each. That choice
    is charged a validation, and so is every epoch where the best one counts; curves show others, which are
    free.
    """
    shards = Shards.of(environment)
    spec, prices = shards.first.spec, prices_of(shards, slots)
    like = TrainingLength(spec.episode.steps, spec.population.batches_per_epoch)
    step = like.batches * prices.batch + spec.best_epoch * prices.validation  # [N] FLOPs
    once = (not spec.best_epoch) * prices.validation  # [N] what it costs to choose among restarts
    if not restarts:
        restarts = max(1, round(budget / float((like.steps * step + once).mean())))
    choosing = once if restarts > 1 else 0.0 * once
    batch = float(prices.batch.mean())
    minibatches = (budget / restarts - float(choosing.mean())) / batch
    validation = spec.best_epoch * float(prices.validation.mean()) / batch
    schedule = schedule_for(minibatches, like, validation)
    episode = {"steps": schedule.steps, "measure_every": schedule.steps, "clock": "steps", "flops": None}
    recipe = {"batches_per_epoch": schedule.batches}
    if slots is None:
        recipe["seed_weights"] = 1  # nothing grows: one draw of every seed is enough
    world = shards.remade(
        episode=spec.episode.model_copy(update=episode), population=spec.population.model_copy(update=recipe)
    )
    held = len(shards.held)
    paced = _Pace(on_step, spec.episode.steps * held, restarts * schedule.steps * held)
    runs = [
        run_controller(world, name, Static(), slots, paced, EVALUATION_EPISODE + k) for k in range(restarts)
    ]
    best = best_of(runs)
    step = schedule.batches * prices.batch + spec.best_epoch * prices.validation
    share = np.arange(schedule.steps + 1)[:, None] * step  # [T + 1, N]
    share[-1] += choosing
    epochs = restarts * schedule.steps * schedule.batches / spec.population.batches_per_epoch
    return replace(best, record=replace(best.record, spent=restarts * share), epochs=epochs)


def prices_of(environment: GrowthEnvironment | Shards, slots: SlotStates | None = None) -> Prices:
    """What a minibatch and a validation of networks with these seeds cost; of bare hosts by default."""
    shards = Shards.of(environment)
    one = shards.first
    task, config = one.spec.task, one.spec.population
    held = slots or SlotStates.empty(shards.members, one.num_slots)
    samples = min(len(task.validation), config.validation_samples)
    return one.population.costs.prices(held.to(one.device), config.batch_size, samples)


class _Pace:
    """Calls `on_step` `ticks` times in all while at most `steps` steps pass: every arm moves a bar alike."""

    def __init__(self, on_step: OnStep | None, ticks: int, steps: int) -> None:
        self._on_step, self._ticks, self._steps = on_step, ticks, steps
        self._done = self._told = 0

    def __call__(self, result: StepResult) -> None:
        self._result, self._done = result, self._done + 1
        self._tell(self._done * self._ticks // self._steps)

    def finish(self) -> None:
        """The ticks that are left: networks that grow may take fewer steps."""
        self._tell(self._ticks)

    def _tell(self, ticks: int) -> None:
        while self._told < ticks:
            self._told += 1
            if self._on_step is not None:
                self._on_step(self._result)


def best_of(runs: Sequence[ControllerRun]) -> ControllerRun:
    """Every member by the run that ended with its highest validation accuracy, the first of equals."""
    final = np.stack([run.record.accuracy[-1] for run in runs])  # [K, N]
    which = np.nan_to_num(final, nan=-1.0).argmax(axis=0)  # [N]
    rows = np.arange(len(which))
    return ControllerRun(
        name=runs[0].name,
        record=EpisodeRecord.joined([run.record for run in runs], which),
        test=TestResult(
            accuracy=np.stack([run.test.accuracy for run in runs])[which, rows],
            loss=np.stack([run.test.loss for run in runs])[which, rows],
        ),
        potential=np.stack([run.potential for run in runs])[which, rows],
        epochs=sum(run.epochs for run in runs),
    )


def from_the_start(slots: SlotStates) -> SlotStates:
    """The seeds that a network ended with, as fossils at full strength: the same network with no growth."""
    return at_full_strength(slots, is_heard(slots))


# ---- all arms --------------------------------------------------------------------------------------------


def compare(
    environment: GrowthEnvironment | Shards,
    arms: Mapping[str, Arm],
    on_step: OnStep | None = None,
) -> list[ControllerRun]:
    """Every arm, in the order given. Controllers run first: what they spend is what the others may.

    The final networks of a controller get what it spent, on the mean over members; other networks that never
    change get what the controller spent that spent most, or, without one, what an episode of the host costs.
    Raises ValueError where the networks of an arm that does not run are asked for.
    """
    one = Shards.of(environment).first
    fixed = {name: arm for name, arm in arms.items() if isinstance(arm, Fixed)}
    unknown = sorted({arm.of for arm in fixed.values()} - {"", *(set(arms) - set(fixed))})
    if unknown:
        allowed = ", ".join(set(arms) - set(fixed)) or "none"
        raise ValueError(
            f"final networks of {', '.join(unknown)} are asked for; the controllers that run are {allowed}"
        )
    ticks = one.spec.episode.steps * len(Shards.of(environment).held)
    runs = {}
    for name, arm in arms.items():
        if not isinstance(arm, Fixed):
            pace = _Pace(on_step, ticks, one.steps * len(Shards.of(environment).held))
            runs[name] = run_controller(environment, name, arm, on_step=pace)
            pace.finish()
    spent = {name: float(run.record.flops.mean()) for name, run in runs.items()}
    price, batches = prices_of(environment), one.spec.population.batches_per_epoch
    epoch = batches * price.batch + one.spec.best_epoch * price.validation  # [N] FLOPs
    usual = max(spent.values(), default=one.steps * float(epoch.mean()))
    for name, arm in fixed.items():
        twin = next((n for n, other in fixed.items() if n in runs and other == arm), None)
        if twin is not None:  # a controller that does not act here is the same as not growing
            runs[name] = replace(runs[twin], name=name)
            continue
        budget = spent[arm.of] if arm.of else usual
        world, slots = _beginning(Shards.of(environment), arm, runs.get(arm.of))
        runs[name] = run_fixed(world, name, budget, slots, arm.restarts, on_step)
    return [runs[name] for name in arms]


def _beginning(shards: Shards, arm: Fixed, of: ControllerRun | None) -> tuple[Shards, SlotStates | None]:
    """Where the networks of a fixed arm live, and the seeds that they begin with.

    The final networks of a controller that repeated or widened blocks are fresh ones of the shape that most
    of them have. Raises UserError where shapes are unknown: other seeds stand between the blocks, or the
    members are spread over several processes.
    """
    spec, task = shards.first.spec, shards.first.spec.task
    if arm.host:
        return shards.remade(task=_with_options(task, arm)), None
    if of is None:
        return shards, None
    if of.shapes is not None:
        ((shape, _),) = Counter(of.shapes).most_common(1)
        return shards.remade(make_host=partial(shaped_host, task, shape)), None
    if (of.record.final_slots.room < spec.population.folds).any():
        raise UserError(
            f"the network that {of.name} ended with is asked for, and its shape is not known: other seeds "
            "stand between its blocks, or its members are spread over processes; compare with a host of "
            "that size instead, as in fixed:depth=2"
        )
    return shards, from_the_start(of.record.final_slots)


def _with_options(task: Task, arm: Fixed) -> Task:
    """The task with a host of the size that a fixed arm asks for."""
    return replace(task, host=replace(task.host, options={**task.host.options, **arm.host}))


def as_comparison(
    environment: GrowthEnvironment, runs: Sequence[ControllerRun], remarks: Sequence[str] = ()
) -> Comparison:
    """What the report and results.json hold; differences are against the first run."""
    task, results = environment.spec.task, [run.result() for run in runs]
    return Comparison(
        task=task.name,
        host=str(task.host) if environment.spec.make_host is None else "given",
        controllers=results,
        differences=paired_differences(results),
        remarks=list(remarks),
    )


class Contest:
    """Every arm with the same `config.members` members under each of `seeds` seeds.

    Seed k is config.seed + k: other initial weights, another order of the data, other random numbers. What
    can be refused is refused when the contest is made, before anything has run.
    """

    def __init__(
        self,
        config: RunConfig,
        arms: Mapping[str, Arm],
        seeds: int = 1,
        gather: Gather | None = None,
        force: bool = False,
    ) -> None:
        """gather: the processes that share the members, each of which runs the contest.

        force: controllers act outside of the conditions that they were trained in, too; without it networks
        that never grow stand for them, and `remarks` says why.
        """
        if seeds < 1:
            raise UserError(f"seeds is {seeds}; it must be at least 1")
        self.config, self.seeds = config, seeds
        self.gather = gather or Alone()
        self._first = Shards.made(config, self.gather)
        spec = self._first.first.spec
        for arm in arms.values():
            if isinstance(arm, Fixed) and arm.host:
                check_host(_with_options(spec.task, arm), len(spec.members), self._first.first.device)
        self.arms, self.remarks = (dict(arms), []) if force else arms_that_may_grow(arms, spec)
        self.lanes: list[Lanes] = []  # after `run`: all members of the first seed under each arm

    @property
    def steps(self) -> int:
        """How often `on_step` is called in the whole contest."""
        return self.seeds * len(self.arms) * self.config.episode.steps * len(self._first.held)

    def run(self, on_step: OnStep | None = None) -> Comparison:
        """Run every arm on every seed and return what each reached; the lanes of the first seed are kept."""
        results: dict[str, list[ControllerResult]] = {}
        first: list[ControllerRun] = []
        for k in range(self.seeds):
            with cpu_threads(self.config.threads):
                runs = compare(self._shards(k), self.arms, on_step)
            first = first or runs
            for run in runs:
                members = [k * self.config.members + int(member) for member in run.record.members]
                results.setdefault(run.name, []).append(replace(run.result(), members=members))
        joined = [_joined(parts) for parts in results.values()]
        parts = host_parts(self._first.first.population)
        self.lanes = [lanes_of(run.record, parts, i, run.name) for i, run in enumerate(first, start=1)]
        comparison = as_comparison(self._first.first, first, self.remarks)
        return replace(comparison, controllers=joined, differences=paired_differences(joined))

    def _shards(self, k: int) -> Shards:
        if not k:
            return self._first
        return Shards.made(self.config.model_copy(update={"seed": self.config.seed + k}), self.gather)


def _joined(parts: Sequence[ControllerResult]) -> ControllerResult:
    """One arm's results over all seeds; the curve is that of the first."""
    columns = ("members", "test_accuracy", "parameters", "member_epochs", "flops", "potential")
    return ControllerResult(
        name=parts[0].name,
        curve=parts[0].curve,
        **{name: list(chain.from_iterable(getattr(part, name) for part in parts)) for name in columns},
    )
