"""Compare arms at equal compute: controllers that grow networks, and networks that never change.

Every arm has the same members: the same first weights, data order and random numbers, so that member i
differs between two arms only by what was done with it. Results are those of the test split, which is read
once per network, after its training.

A network that never changes is trained for as many FLOPs as growth spent: the host as it is (`static`), the
best of several hosts on validation data (`best-of`, `best-of:8`), a host of another size
(`fixed:hidden=16+depth=2`), or the network that a controller ended with (`final:NAME`).

All arms choose their weights by one rule and pay for the validation that they use. By default the weights are
those of the last epoch; then a network that never changes pays for no validation, except for the one that
chooses the best of several. Where the environment's `best_epoch` is set, every arm ends with the weights of
its best epoch on validation data and pays for a validation in each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, count
from typing import Self

import numpy as np
import torch

from esper.builders import check_host, make_environment, shaped_host
from esper.config import RunConfig
from esper.controllers import Arm, Fixed, arms_that_may_grow
from esper.lifecycle.legality import in_forward_pass
from esper.lifecycle.slot_states import SlotStates
from esper.population.extract import shapes_of
from esper.runs.lanes import Lanes
from esper.runs.schema import Comparison, ControllerResult, CurvePoint, paired_differences
from esper.simic.costs import Prices
from esper.simic.ending import FinalSelection, at_full_strength
from esper.simic.environment import GrowthEnvironment, StepResult
from esper.simic.rollout import EpisodeRecord, Floats, TestResult, evaluate_test, play
from esper.simic.state import potential
from esper.simic.telemetry import build_lanes, describe_host
from esper.tamiyo.controller import Controller
from esper.tamiyo.scripted import Static
from esper.tasks import Task
from esper.utils.devices import cpu_threads, own_device
from esper.utils.errors import UserError
from esper.utils.gather import Gather, SingleProcess, gather_pieces, held_shards
from esper.utils.rows import add_prefix, strip_prefix

EVALUATION_EPISODE = 1 << 20  # far from any episode that a controller was trained in
OnStep = Callable[[StepResult], None]
OnProgress = Callable[[float], None]  # is given how many arms are done: 1.5 is half-way through the second


class Shards:
    """The members of a comparison, in the environments that this process holds and in those of others.

    Results come from all of them, in the order of the members. One environment is one shard.
    """

    def __init__(
        self, held: Sequence[GrowthEnvironment], ranges: Sequence[range], members: int, gather: Gather
    ) -> None:
        """ranges: the positions, among all `members`, of those in each environment."""
        self.held, self.ranges, self.members, self.gather = held, ranges, members, gather

    @classmethod
    def of(cls, environment: GrowthEnvironment | Self) -> Self:
        """Wrap a single environment; return shards as they are."""
        if not isinstance(environment, GrowthEnvironment):
            return environment
        members = environment.num_members
        return cls([environment], [range(members)], members, SingleProcess())

    @classmethod
    def build(cls, config: RunConfig, gather: Gather) -> Self:
        """Build those that this process holds; raises UserError where there are too few members or shards."""
        ranges = held_shards(config.members, config.shards or 1, gather)
        device = own_device(config.device)
        held = [make_environment(config, device, torch.arange(r.start, r.stop)) for r in ranges]
        return cls(held, ranges, config.members, gather)

    @property
    def first(self) -> GrowthEnvironment:
        """The first of them, for all that they have in common."""
        return self.held[0]

    def rebuild(self, **changes: object) -> Self:
        """Build fresh environments of the same members with other settings."""
        held = [type(e)(replace(e.spec, **changes)) for e in self.held]  # type: ignore[arg-type]
        return type(self)(held, self.ranges, self.members, self.gather)

    def gather_results(
        self, played: Sequence[tuple[EpisodeRecord, TestResult]]
    ) -> tuple[EpisodeRecord, TestResult]:
        """Return what all members did and reached, from the results of each environment of this process."""
        record, test = played[0]
        if record.num_members == self.members:
            return record, test
        pieces = [
            add_prefix("record", record.tensors())
            | add_prefix("test", {n: torch.from_numpy(v) for n, v in vars(test).items()})
            for record, test in played
        ]
        everyone = gather_pieces(self.gather, pieces)
        reached = [strip_prefix("test", piece) for piece in everyone]
        whole = {name: torch.cat([each[name] for each in reached]).numpy() for name in vars(test)}
        return record.concatenate([strip_prefix("record", piece) for piece in everyone]), TestResult(**whole)


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
        """Return the figures that results.json holds, member by member."""
        record = self.record
        curve = [record.spent.mean(axis=1), record.accuracy.mean(axis=1), record.parameters.mean(axis=1)]
        return ControllerResult(
            name=self.name,
            members=record.members.tolist(),
            test_accuracy=self.test.accuracy.tolist(),
            parameters=record.parameters[-1].tolist(),
            member_epochs=[self.epochs] * record.num_members,
            flops=record.flops.tolist(),
            potential=self.potential.tolist(),
            curve=[CurvePoint(*map(float, point)) for point in zip(*curve, strict=True)],
        )


def run_controller(
    environment: GrowthEnvironment | Shards,
    name: str,
    controller: Controller,
    initial_slots: SlotStates | None = None,
    on_step: OnStep | None = None,
    episode: int = EVALUATION_EPISODE,
) -> ControllerRun:
    """Run a controller through one episode, and its networks on the test split.

    With `best_epoch` in the environment's spec every network ends with the weights of its best epoch, and
    every seed is kept or removed.
    """
    shards, played = Shards.of(environment), []
    for each, members in zip(shards.held, shards.ranges, strict=True):
        slots = None if initial_slots is None else initial_slots[slice(members.start, members.stop)]
        if each.spec.best_epoch:
            record = FinalSelection(each).play(controller, episode, slots, on_step)
        else:
            record = play(each, controller, episode, slots, on_step)
        played.append((record, evaluate_test(each)))
    record, test = shards.gather_results(played)
    # Φ = accuracy − rent of the parameters, with the test accuracy in place of the validation accuracy
    worth = potential(
        torch.from_numpy(test.accuracy),
        torch.from_numpy(record.parameter_ratio[-1]).float(),
        shards.first.spec.reward,
    )
    # Shapes are read from the population itself, which holds all members only where nothing is sharded.
    whole = shards.first.num_members == shards.members
    shapes = shapes_of(shards.first.population, shards.first.slots) if whole else None
    return ControllerRun(name, record, test, worth.numpy(), record.num_steps, shapes)


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
    environment: GrowthEnvironment | Shards,
    name: str,
    budget: float,
    slots: SlotStates | None = None,
    restarts: int = 1,
    on_progress: OnProgress | None = None,
) -> ControllerRun:
    """Train networks that never change, for `budget` FLOPs a member on the mean over members.

    slots: the seeds that they have from the start, as `from_the_start` makes them; none by default. With
    several restarts each has an equal share of the budget and other first weights, and a member's best one on
    validation data counts; with 0 restarts there are as many as can train for an episode each. That choice
    is charged a validation, and so is every epoch where the best one counts; validations that only draw a
    curve are free.
    """
    shards = Shards.of(environment)
    spec, prices = shards.first.spec, prices_of(shards, slots)
    batches = spec.population.batches_per_epoch
    # price of a step = minibatches × price of one, and of a validation where it chooses the weights
    step = batches * prices.batch + spec.best_epoch * prices.validation  # [N] FLOPs
    once = (not spec.best_epoch) * prices.validation  # [N] what it costs to choose among restarts
    if not restarts:
        restarts = max(1, round(budget / float((spec.episode.steps * step + once).mean())))
    choosing = once if restarts > 1 else 0.0 * once
    # minibatches of a restart = (its share of the budget − the choice among restarts) / price of one
    batch = float(prices.batch.mean())
    minibatches = (budget / restarts - float(choosing.mean())) / batch
    validation = spec.best_epoch * float(prices.validation.mean()) / batch
    steps, batches = fit_schedule(minibatches, spec.episode.steps, batches, validation)
    # The budget is converted to steps already, so the clock counts those.
    episode = {"steps": steps, "clock": "steps", "flops": None}
    recipe = {"batches_per_epoch": batches}
    if slots is None:
        recipe["seed_weights"] = 1  # nothing grows: one draw of every seed is enough
    fresh = shards.rebuild(
        episode=spec.episode.model_copy(update=episode), population=spec.population.model_copy(update=recipe)
    )
    on_step = _count_steps(on_progress, 0, restarts * steps * len(shards.held))
    runs = [
        run_controller(fresh, name, Static(), slots, on_step, EVALUATION_EPISODE + k) for k in range(restarts)
    ]
    # The record holds the prices of one restart; the arm paid for all of them, and once for the choice.
    best = best_of(runs)
    step = batches * prices.batch + spec.best_epoch * prices.validation
    share = np.arange(steps + 1)[:, None] * step  # [T + 1, N]
    share[-1] += choosing
    epochs = restarts * steps * batches / spec.population.batches_per_epoch
    return replace(best, record=replace(best.record, spent=restarts * share), epochs=epochs)


def prices_of(environment: GrowthEnvironment | Shards, slots: SlotStates | None = None) -> Prices:
    """Return what a minibatch and a validation of networks with these seeds cost; by default bare hosts."""
    shards = Shards.of(environment)
    one = shards.first
    task, config = one.spec.task, one.spec.population
    held = slots or SlotStates.empty(shards.members, one.num_slots)
    samples = min(len(task.validation), config.validation_samples)
    return one.population.costs.prices(held.to(one.device), config.batch_size, samples)


def _count_steps(on_progress: OnProgress | None, done: int, steps: int) -> OnStep | None:
    """Make an `on_step` that reports `done` arms and the share of `steps` that have passed of the next."""
    if on_progress is None:
        return None
    ticks = count(1)
    return lambda result: on_progress(done + min(1.0, next(ticks) / steps))


def best_of(runs: Sequence[ControllerRun]) -> ControllerRun:
    """Take every member from the run that ended with its highest validation accuracy, the first of equals."""
    # A diverged run has NaN, which argmax would prefer to any number.
    final = np.stack([run.record.accuracy[-1] for run in runs])  # [K, N]
    which = np.nan_to_num(final, nan=-1.0).argmax(axis=0)  # [N]
    rows = np.arange(len(which))
    return ControllerRun(
        name=runs[0].name,
        record=EpisodeRecord.pick([run.record for run in runs], which),
        test=TestResult(
            accuracy=np.stack([run.test.accuracy for run in runs])[which, rows],
            loss=np.stack([run.test.loss for run in runs])[which, rows],
        ),
        potential=np.stack([run.potential for run in runs])[which, rows],
        epochs=sum(run.epochs for run in runs),
    )


def from_the_start(slots: SlotStates) -> SlotStates:
    """Return the seeds that a network ended with, as fossils at alpha 1: the same network with no growth."""
    return at_full_strength(slots, in_forward_pass(slots))


# ---- all arms --------------------------------------------------------------------------------------------


def compare(
    environment: GrowthEnvironment | Shards, arms: Mapping[str, Arm], on_progress: OnProgress | None = None
) -> list[ControllerRun]:
    """Run every arm, controllers first, because the others get what they spend; return them as given.

    The final networks of a controller get what it spent, on the mean over members; other networks that never
    change get what the controller spent that spent most, or, without one, what an episode of the host costs.
    Raises ValueError where the networks of an arm that does not run are asked for.
    """
    shards = Shards.of(environment)
    one = shards.first
    fixed = {name: arm for name, arm in arms.items() if isinstance(arm, Fixed)}
    unknown = sorted({arm.of for arm in fixed.values()} - {"", *(set(arms) - set(fixed))})
    if unknown:
        allowed = ", ".join(set(arms) - set(fixed)) or "none"
        raise ValueError(
            f"final networks of {', '.join(unknown)} are asked for; the controllers that run are {allowed}"
        )
    runs: dict[str, ControllerRun] = {}

    def finish(name: str, run: ControllerRun) -> None:
        runs[name] = run
        if on_progress is not None:
            on_progress(len(runs))

    # Controllers first: their FLOPs are the budget of the arms that never change.
    for name, arm in arms.items():
        if not isinstance(arm, Fixed):
            on_step = _count_steps(on_progress, len(runs), one.steps * len(shards.held))
            finish(name, run_controller(shards, name, arm, on_step=on_step))
    spent = {name: float(run.record.flops.mean()) for name, run in runs.items()}
    price, batches = prices_of(shards), one.spec.population.batches_per_epoch
    epoch = batches * price.batch + one.spec.best_epoch * price.validation  # [N] FLOPs
    usual = max(spent.values(), default=one.steps * float(epoch.mean()))
    for name, arm in fixed.items():
        twin = next((n for n, other in fixed.items() if n in runs and other == arm), None)
        if twin is not None:  # a controller that does not act here is the same as not growing
            finish(name, replace(runs[twin], name=name))
            continue
        done, fresh, slots = len(runs), *_initial(shards, arm, runs.get(arm.of))
        advance = None if on_progress is None else lambda share, done=done: on_progress(done + share)
        budget = spent[arm.of] if arm.of else usual
        finish(name, run_fixed(fresh, name, budget, slots, arm.restarts, advance))
    return [runs[name] for name in arms]


def _initial(shards: Shards, arm: Fixed, of: ControllerRun | None) -> tuple[Shards, SlotStates | None]:
    """Return the environments of a fixed arm and the seeds that its networks begin with.

    The final networks of a controller that repeated or widened blocks are fresh ones of the shape that most
    of them have. Raises UserError where shapes are unknown: other seeds stand between the blocks, or the
    members are spread over several processes.
    """
    spec, task = shards.first.spec, shards.first.spec.task
    if arm.host:
        return shards.rebuild(task=_with_options(task, arm)), None
    if of is None:
        return shards, None
    # Folded blocks are part of the weights and of no slot state, so a fresh host has to be built that large.
    if of.shapes is not None:
        ((shape, _),) = Counter(of.shapes).most_common(1)
        return shards.rebuild(make_host=partial(shaped_host, task, shape)), None
    if (of.record.final_slots.room < spec.population.folds).any():
        raise UserError(
            f"the network that {of.name} ended with is asked for, and its shape is not known: other seeds "
            "stand between its blocks, or its members are spread over processes; compare with a host of "
            "that size instead, as in fixed:depth=2"
        )
    return shards, from_the_start(of.record.final_slots)


def _with_options(task: Task, arm: Fixed) -> Task:
    """Return the task with a host of the size that a fixed arm asks for."""
    return replace(task, host=replace(task.host, options={**task.host.options, **arm.host}))


def as_comparison(
    environment: GrowthEnvironment, results: Sequence[ControllerResult], remarks: Sequence[str] = ()
) -> Comparison:
    """Return what the report and results.json hold; differences are against the first result."""
    task = environment.spec.task
    return Comparison(
        task=task.name,
        host=str(task.host) if environment.spec.make_host is None else "given",
        controllers=list(results),
        differences=paired_differences(results),
        remarks=list(remarks),
    )


class Experiment:
    """Every arm with the same `config.members` members under each of `seeds` seeds.

    Seed k is config.seed + k: other initial weights, another order of the data, other random numbers. Bad
    input is refused when the experiment is made, before anything has run.
    """

    def __init__(
        self,
        config: RunConfig,
        arms: Mapping[str, Arm],
        seeds: int = 1,
        gather: Gather | None = None,
        force: bool = False,
    ) -> None:
        """gather: the processes that share the members, each of which runs the experiment.

        force: controllers act outside of the conditions that they were trained in, too; without it they are
        replaced by networks that never grow, and `remarks` says why.
        """
        if seeds < 1:
            raise UserError(f"seeds is {seeds}; it must be at least 1")
        self.config, self.seeds = config, seeds
        self.gather = gather or SingleProcess()
        self._first = Shards.build(config, self.gather)
        spec = self._first.first.spec
        for arm in arms.values():
            if isinstance(arm, Fixed) and arm.host:
                check_host(_with_options(spec.task, arm), len(spec.members), self._first.first.device)
        # Checked once, before anything runs: a comparison of hours must not end with a sentence.
        self.arms, self.remarks = (dict(arms), []) if force else arms_that_may_grow(arms, spec)
        self.lanes: list[Lanes] = []  # after `run`: all members of the first seed under each arm

    def run(self, on_progress: OnProgress | None = None) -> Comparison:
        """Run every arm on every seed and return what each reached; the lanes of the first seed are kept.

        on_progress: is given how many of the seeds × arms are done.
        """
        results: dict[str, list[ControllerResult]] = {}
        for k in range(self.seeds):
            shards = self._first
            if k:
                shards = Shards.build(
                    self.config.model_copy(update={"seed": self.config.seed + k}), self.gather
                )
            done = k * len(self.arms)
            advance = None if on_progress is None else lambda arms, done=done: on_progress(done + arms)
            with cpu_threads(self.config.threads):
                runs = compare(shards, self.arms, advance)
            if not k:
                parts = describe_host(self._first.first.population)
                self.lanes = [
                    build_lanes(run.record, parts, i, run.name) for i, run in enumerate(runs, start=1)
                ]
            for run in runs:
                # Members of different seeds are different networks, so each gets an id of its own.
                members = [k * self.config.members + int(member) for member in run.record.members]
                results.setdefault(run.name, []).append(replace(run.result(), members=members))
        joined = [_join_seeds(each) for each in results.values()]
        return as_comparison(self._first.first, joined, self.remarks)


def _join_seeds(parts: Sequence[ControllerResult]) -> ControllerResult:
    """Join one arm's results over all seeds; the curve is that of the first."""
    columns = ("members", "test_accuracy", "parameters", "member_epochs", "flops", "potential")
    return ControllerResult(
        name=parts[0].name,
        curve=parts[0].curve,
        **{name: list(chain.from_iterable(getattr(part, name) for part in parts)) for name in columns},
    )
