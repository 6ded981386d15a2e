"""All arms on one held-out task, each at every budget, in a few programs.

    fixed0 …  the sizes of the ladder, each at the learning rate that other members chose on validation data
    grown     the trained controllers and the scripted ones, from the least size on, as one program
    final     the shape that the trained controllers ended with most often, from the start
    masked    a slimmable network, and pruning from a large one
    selected  groups of networks of the best fixed size, of which the worse half give way

Searches over sizes are replayed from what the fixed sizes left (`searches.py`) when tables are made.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor

from esper.lifecycle.actions import Head, Op
from esper.population.hosts import Host, build_host
from esper.simic.environment import EnvironmentSpec, GrowthEnvironment
from esper.simic.rollout import EpisodeRecord, evaluate_test, play
from esper.tamiyo.controller import Blocks, Controller
from esper.tamiyo.schedule import BY_BUDGET, PacedSchedule, Schedule
from esper.tamiyo.scripted import Heuristic, RandomLegal, Static
from esper.tasks import Task, load_task
from esper.utils.errors import UserError
from studies.growth import selection
from studies.growth.environments import (
    BUDGETS,
    CHOOSING_MEMBER,
    CONFIG,
    RATES,
    STEPS,
    budget_of,
    judged,
    spec_of,
    tidy,
    unit_of,
)
from studies.growth.ladders import SIZES, with_size
from studies.growth.masked import Trial, pruned, slimmable
from studies.growth.records import POINTS, Sample, on_the_way, path_of, read, rounded, write
from studies.growth.shapes import fresh_host, shapes_of

LARGE = 3  # of a ladder: what is slimmed and pruned
PASSED = range(3)  # of a ladder: sizes that growth passes through
CHOOSING = 16  # members at each budget that choose a learning rate
SCHEDULES: dict[str, Callable[[], Controller]] = {  # they look at nothing
    "clone at 10 %": lambda: Schedule.parse("clone@0.1"),
    "widen at 10 %": lambda: Schedule.parse("widen_full@0.1"),
    "widen, then clone": lambda: Schedule.parse("widen_full@0.05+clone@0.2"),
    "widen twice, clone twice": lambda: Schedule.parse("widen_full@0.03x2+clone@0.15x2"),
}
SCRIPTED: dict[str, Callable[[], Controller]] = {
    "start": Static,
    **SCHEDULES,
    "teacher": lambda: PacedSchedule(BY_BUDGET),  # of the learned ones, at their pace
    "heuristic": Heuristic,
}


@dataclass
class Setup:
    """One task with its members and controllers, and the samples that programs have found so far."""

    name: str
    each: int  # members at every budget
    device: str
    controllers: Mapping[str, Controller]
    samples: list[Sample] = field(default_factory=list)
    done: set[str] = field(default_factory=set)  # programs

    def __post_init__(self) -> None:
        self.task = load_task(self.name)
        self.flops, self.host_forward = unit_of(self.task)
        self.members = judged(self.each)

    def add(self, program: str, samples: Iterable[Sample]) -> None:
        """Keep what a program found."""
        self.samples += samples
        self.done.add(program)

    def take(self, program: str, folder: Path) -> None:
        """What a program found before; raises UserError where it has left no file."""
        path = path_of(folder, self.name, program)
        if not path.exists():
            raise UserError(f"{path} does not exist; run --programs {program} first")
        self.add(program, read(path))

    def found(self, arm: str, budget: float) -> Sample:
        """An arm that was played before."""
        return next(s for s in self.samples if s.arm == arm and s.budget == budget)


# ---- networks that never change ----------------------------------------------------------------------------


def train_fixed(
    setup: Setup,
    size: int = 0,
    make_host: Callable[[], Host] | None = None,
    budgets: Sequence[float] = (),
) -> Iterator[Sample]:
    """Networks of a size of the ladder, or of any other shape, at all learning rates at once.

    At each budget (of those given, or of all) those of the rate are kept that was best for other members, on
    validation data.
    """
    budgets = budgets or BUDGETS
    arm = f"fixed {size}" if make_host is None else "final"
    task = with_size(setup.task, size)
    chosen = CHOOSING_MEMBER + torch.arange(CHOOSING * len(BUDGETS))
    ids = torch.cat([setup.members, chosen])
    ids = ids[torch.isin(budget_of(ids), torch.tensor(budgets))]
    episode = CONFIG.episode.model_copy(update={"flops": setup.flops})
    scales = tuple(rate for rate in RATES for _ in ids)
    more = {"episode": episode, "rate_scale": scales, "make_host": make_host}
    spec = spec_of(task, ids.repeat(len(RATES)), setup.device, **more)
    cost = _forward_cost(spec) / setup.host_forward
    measured = max(1, round(STEPS * CONFIG.population.batches_per_epoch / POINTS / cost))
    population = CONFIG.population.model_copy(update={"batches_per_epoch": measured})
    spec = spec_of(task, ids.repeat(len(RATES)), setup.device, population=population, **more)
    environment = GrowthEnvironment(spec)
    record = play(environment, Static(), 0)
    test = evaluate_test(environment).accuracy
    yield from _best_rates(setup, arm, ids, record, test, cost, budgets)


def _forward_cost(spec: EnvironmentSpec) -> float:
    """FLOPs of a forward pass of a sample."""
    small = replace(spec, members=spec.members[:1], rate_scale=(), device="cpu", budgets=(1.0,))
    return GrowthEnvironment(small).population.costs.host


def _best_rates(
    setup: Setup,
    arm: str,
    ids: Tensor,
    record: EpisodeRecord,
    test: np.ndarray,
    cost: float,
    budgets: Sequence[float],
) -> Iterator[Sample]:
    """A sample for each budget, of the rate with the best mean validation accuracy of other members."""
    each, judges = budget_of(ids).numpy(), (ids >= CHOOSING_MEMBER).numpy()
    final = record.accuracy[-1].reshape(len(RATES), -1)
    for budget in budgets:
        choosing = judges & (each == budget)
        rate = int(final[:, choosing].mean(1).argmax())
        mine = rate * len(ids) + np.flatnonzero(~judges & (each == budget))
        found = _measured(record, test, np.full(len(test), cost), mine)
        yield Sample(setup.name, arm, budget, RATES[rate], **found)


def _measured(record: EpisodeRecord, test: np.ndarray, cost: np.ndarray, mine: np.ndarray) -> dict[str, Any]:
    """The columns of a sample of some members of an episode.  # test, cost: of all [N]; mine [n] rows"""
    spent = record.spent[:, mine] / record.spent[-1, mine]
    return {
        "validation": rounded(record.accuracy[-1, mine]),
        "test": rounded(test[mine]),
        "parameters": record.parameters[-1, mine].tolist(),
        "cost": rounded(cost[mine], 3),
        "curves": on_the_way(spent, record.accuracy[:, mine]),
    }


# ---- networks that grow ------------------------------------------------------------------------------------


def grown(setup: Setup) -> Iterator[Sample]:
    """Every controller as a block of one program, all at one learning rate for each budget.

    It is the median of those that were chosen for the sizes that growth passes through first.
    """
    entrants = {name: make() for name, make in SCRIPTED.items()} | dict(setup.controllers)
    entrants["random"] = RandomLegal(0.1)
    blocks = Blocks(entrants)
    budgets = budget_of(setup.members)
    rates = {b: median(setup.found(f"fixed {size}", b).rate for size in PASSED) for b in BUDGETS}
    scales = tuple(rates[float(budget)] for budget in budgets) * len(entrants)
    environment = GrowthEnvironment(
        spec_of(setup.task, blocks.members(setup.members), setup.device, rate_scale=scales)
    )
    record = play(environment, blocks, 0)
    test = evaluate_test(environment).accuracy
    relative = environment.population.relative_cost(environment.slots).cpu().numpy()
    shapes = np.asarray(shapes_of(environment.population, environment.slots) or ["?"] * len(test))
    for name, span in blocks.spans(environment.num_members).items():
        for budget in BUDGETS:
            mine = np.arange(environment.num_members)[span][(budgets == budget).numpy()]
            found = _measured(record, test, relative, mine)
            counts = dict(Counter(shapes[mine].tolist()).most_common(12))
            happened = events_of(record, mine)
            yield Sample(setup.name, name, budget, rates[budget], **found, events=happened, shapes=counts)


def events_of(record: EpisodeRecord, mine: np.ndarray) -> dict[str, float]:
    """What happened to a member on the mean, and the share of requests that were refused."""
    asked = record.choices[:, mine, Head.OP]
    requests = int((asked != Op.WAIT).sum())
    refused = int((~record.succeeded[:, mine] & (asked != Op.WAIT)).sum())
    return {
        "germinated": round(float(record.germinated[:, mine].sum() / len(mine)), 3),
        "pruned": round(float(record.pruned[:, mine].sum() / len(mine)), 3),
        "rolled back": round(float(record.panicked[:, mine].sum() / len(mine)), 4),
        "refused": round(refused / max(requests, 1), 4),
    }


def shaped_host(task: Task, shape: str) -> Host:
    """Build a fresh host of a task, grown to a shape as `shapes_of` names it."""
    host = build_host(task.host.preset, task.input_shape, task.num_classes, **task.host.options)
    return fresh_host(host, shape).validate(task.train.inputs[:2])


def final(setup: Setup) -> Iterator[Sample]:
    """What the trained controllers ended with most often at each budget, from the start."""
    for budget in BUDGETS:
        counts: Counter[str] = Counter()
        for name in setup.controllers:
            counts.update(setup.found(name, budget).shapes)
        shape = counts.most_common(1)[0][0]
        make_host = partial(shaped_host, setup.task, shape)
        yield from train_fixed(setup, make_host=make_host, budgets=(budget,))
        tidy()


def masked(setup: Setup) -> Iterator[Sample]:
    """A slimmable network, and one that is pruned to the cost at which trained controllers ended."""
    size = with_size(setup.task, LARGE).host
    for budget in BUDGETS:
        ended = [setup.found(name, budget).cost for name in setup.controllers]
        ids = setup.members[budget_of(setup.members) == budget]
        flops = budget * setup.flops
        trial = Trial(setup.task, size, flops, ids, RATES, setup.device, setup.host_forward, budget)
        yield replace(slimmable(trial), task=setup.name)
        yield replace(pruned(trial, target_cost=float(np.mean(ended))), task=setup.name)
        tidy()


def selected(setup: Setup) -> Iterator[Sample]:
    """At each budget, groups of the fixed size that is best on validation data."""
    for budget in BUDGETS:
        sizes = [setup.found(f"fixed {size}", budget) for size in range(SIZES)]
        best = max(sizes, key=lambda sample: float(np.mean(sample.validation)))
        task = with_size(setup.task, sizes.index(best))
        ids = selection.group_ids(setup.members[budget_of(setup.members) == budget])
        episode = CONFIG.episode.model_copy(update={"flops": setup.flops})
        measured = max(1, round(budget * STEPS * CONFIG.population.batches_per_epoch / POINTS / best.cost[0]))
        population = CONFIG.population.model_copy(update={"batches_per_epoch": measured})
        scales = (best.rate,) * len(ids)
        more = {"episode": episode, "rate_scale": scales, "population": population}
        environment = GrowthEnvironment(spec_of(task, ids, setup.device, **more))
        record = selection.play_with_selection(environment).record()
        test, cost = evaluate_test(environment).accuracy, np.full(len(ids), best.cost[0])
        groups = np.arange(len(ids)).reshape(selection.GROUP, -1)
        mine = groups[record.accuracy[-1][groups].argmax(0), np.arange(groups.shape[1])]
        found = _measured(record, test, cost, mine)
        yield Sample(setup.name, "selection ×4", budget, best.rate, **found, shapes={best.arm: len(mine)})
        tidy()


PROGRAMS: dict[str, Callable[[Setup], Iterable[Sample]]] = {
    **{f"fixed{size}": partial(train_fixed, size=size) for size in range(SIZES)},
    "grown": grown,
    "final": final,
    "masked": masked,
    "selected": selected,
}
FOLLOWERS = {
    "grown": tuple(f"fixed{size}" for size in PASSED),
    "final": ("grown",),
    "masked": ("grown",),
    "selected": tuple(f"fixed{size}" for size in range(SIZES)),
}  # and what they need


def evaluate(setup: Setup, programs: Sequence[str], out: Path) -> None:
    """Run programs on a task, each into a file of its own; what they need may have been found before."""
    for name in programs:
        for needed in FOLLOWERS.get(name, ()):
            if needed not in setup.done:
                setup.take(needed, out)
        begun = time.perf_counter()
        samples = []
        for sample in PROGRAMS[name](setup):
            samples.append(sample)
            print(line_of(sample, time.perf_counter() - begun), flush=True)
        setup.add(name, samples)
        write(samples, path_of(out, setup.name, name))
        tidy()


def line_of(sample: Sample, seconds: float) -> str:
    """A sample in one line of the console."""
    return (
        f"{sample.task:16s} ×{sample.budget:<3g} {sample.arm:26s} test {np.mean(sample.test):.4f}  "
        f"validation {np.mean(sample.validation):.4f}  cost {np.mean(sample.cost):5.2f}  "
        f"rate {sample.rate:g}  {seconds:5.1f} s"
    )
