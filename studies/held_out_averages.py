"""Is it the averaging of weights that puts schedule-free AdamW ahead on the held-out tables, or its momentum?

    python -m studies.held_out_averages --out FILE         45 minutes of a core; extras data, searches, rates
    python -m studies.held_out_averages --read OTHER FILE  the tables; OTHER: a file of `studies.held_out`

Networks of `studies.held_out` are trained by four recipes: with its momentum or a lower one, with its decay
of the rate or without. Each is tested with its last weights and with averaged ones: left alone, under the
rule, and under controllers that were trained in its recipe. Momentum, rates, the power of the average and all
parameters of opponents are chosen by the mean test accuracy on the made tables that the opponents of that
study were tuned on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray

from esper.config import RunConfig
from esper.simic import environment
from esper.simic.environment import EnvironmentSpec, GrowthEnvironment
from esper.simic.learner import LearnedController
from esper.simic.rollout import evaluate_test, play
from esper.tamiyo.controller import Blocks, Controller
from esper.tamiyo.rates import ReactiveRate
from esper.tamiyo.scripted import Static
from studies import command_line
from studies.averaged import AveragedPopulation
from studies.command_line import with_progress
from studies.held_out import (
    HELD_OUT,
    JUDGED,
    ORACLE,
    RULE,
    STATIC,
    TUNED,
    USUAL,
    Arms,
    Records,
    accuracy_of,
    over_tables,
    spec_for,
    splits_of,
    tuning_tables,
    varied_tables,
    with_rates,
)
from studies.plain_loops import plain_accuracy, prodigy, range_test, schedule_free
from studies.rates import CONTROLLER, FRESH, Trained, train

MOMENTA = (0.0, 0.5, 0.8, 0.9)
SCALES = tuple(2.0**k for k in range(-1, 6))  # of the usual rate
POWERS = (2.0, 4.0, 8.0)  # of the average
LAST = "last weights"
# Parameters that are tried: those of the plain loop, and the momentum, or what an optimizer has for it.
PLAIN: dict[str, list[tuple[tuple[float, ...], float]]] = {
    "schedule-free AdamW": [((0.01 * 2.0**k,), beta) for beta in (0.7, 0.8, 0.9) for k in range(2, 6)],
    "Prodigy": [((1e-4, factor), beta) for beta in (0.5, 0.9) for factor in (4.0, 8.0, 16.0)],
}
DIVISORS = (3.0, 10.0, 30.0)  # of the range test, at the momentum of AdamW
MAKERS: dict[str, Callable[..., Any]] = {
    "schedule-free AdamW": schedule_free,
    "Prodigy": prodigy,
    "range test": range_test,
}
SCHEDULE_FREE, RETUNED = "schedule-free AdamW", "schedule-free AdamW, its momentum tuned"


@dataclass(frozen=True)
class Recipe:
    """Settings that differ from those of the preset `demo`, and what was chosen for them on made tables."""

    name: str  # before the names of its arms
    momentum: float
    decay: float
    scale: float = 1.0  # the best rate, over the usual one
    power: float = POWERS[0]  # of the average

    def apply(self, config: RunConfig) -> RunConfig:
        """Return the settings of a run in this recipe."""
        changed = {"momentum": self.momentum, "decay": self.decay}
        return config.model_copy(update={"population": config.population.model_copy(update=changed)})


def with_momentum(spec: EnvironmentSpec, momentum: float) -> EnvironmentSpec:
    """Return the same networks with another momentum."""
    return replace(spec, population=spec.population.model_copy(update={"momentum": momentum}))


def test_weights(
    spec: EnvironmentSpec, arms: Mapping[str, Controller], powers: Sequence[float]
) -> dict[str, dict[str | float, list[float]]]:
    """Play an episode of every arm as one program; return the test accuracy of its networks in points.

    By arm, then by what is tested: LAST weights, or the average of each power. Controllers see what the last
    weights measure.
    """
    blocks = Blocks(arms)
    members, scales = blocks.members(spec.members), spec.rate_scale * len(arms)
    # The recipe has no setting for averages.
    with patch.object(environment, "TaskPopulation", partial(AveragedPopulation, powers=powers)):
        made = GrowthEnvironment(replace(spec, members=members, rate_scale=scales))
    play(made, blocks, 0)
    population = made.population
    assert isinstance(population, AveragedPopulation)
    found: dict[str | float, NDArray[np.float64]] = {LAST: points(made)}
    for power in powers:
        with population.averaged(power):
            found[power] = points(made)
    spans = blocks.spans(made.num_members)
    return {
        name: {kind: np.round(accuracy[span], 3).tolist() for kind, accuracy in found.items()}
        for name, span in spans.items()
    }


def points(made: GrowthEnvironment) -> NDArray[np.float64]:
    """Return the test accuracy of the present networks in points.  # [N]"""
    return 100.0 * evaluate_test(made).accuracy.astype(np.float64)


# ---- tuning on made tables ---------------------------------------------------------------------------------


def grid_of(config: RunConfig, recipe: Recipe, tables: Sequence[Any]) -> dict[str | float, list[float]]:
    """Return the mean accuracy over tables at each of SCALES, by what is tested."""
    found: dict[str | float, list[list[float]]] = {}
    for tasks in tables:
        spec = spec_for(recipe.apply(config), tasks)
        rows = with_rates(spec, np.repeat(np.array(SCALES)[:, None], len(spec.members), 1))
        for kind, values in test_weights(rows, {STATIC: Static()}, POWERS)[STATIC].items():
            found.setdefault(kind, []).append(np.reshape(values, (len(SCALES), -1)).mean(1).tolist())
    return {kind: np.mean(each, axis=0).round(3).tolist() for kind, each in found.items()}


def tune(config: RunConfig) -> tuple[list[Recipe], dict[str, Any]]:
    """Choose recipes and the parameters of opponents; return them, and all means of what was tried."""
    tables, usual = tuning_tables(), config.population
    tried = [Recipe("", momentum, decay) for momentum in MOMENTA for decay in (usual.decay, 0.0)]
    grids = {recipe: grid_of(config, recipe, tables) for recipe in with_progress("tuning momentum", tried)}
    falling = [recipe for recipe in tried if recipe.decay > 0]
    low = max(falling, key=lambda recipe: max(grids[recipe][LAST])).momentum
    recipes = []
    for name, momentum in (("", usual.momentum), ("low momentum", low)):
        for words, decay in (("", usual.decay), ("no decay", 0.0)):
            grid = grids[Recipe("", momentum, decay)]
            power = max(POWERS, key=lambda power: max(grid[power]))
            # Without a decay the last weights are not meant to be used.
            scale = SCALES[int(np.argmax(grid[LAST if decay else power]))]
            prefix = ", ".join(filter(None, (name, words)))
            recipes.append(Recipe(f"{prefix}: " if prefix else "", momentum, decay, scale, power))
    means: dict[str, Any] = {
        f"AdamW, momentum {recipe.momentum:g}, decay {recipe.decay:g}": {str(k): v for k, v in grid.items()}
        for recipe, grid in grids.items()
    }
    plain = PLAIN | {"range test": [((0.2, divisor), low) for divisor in DIVISORS]}
    for name, each in plain.items():
        means[name] = []
        for given, momentum in with_progress(f"tuning {name}", each):
            specs = [with_momentum(spec_for(config, tasks), momentum) for tasks in tables]
            score = np.mean([plain_accuracy(spec, MAKERS[name], *given) for spec in specs])
            means[name].append([list(given), momentum, round(float(score), 3)])
    return recipes, means


def best_of(tried: Sequence[tuple[list[float], float, float]]) -> tuple[list[float], float]:
    """Return the parameters and the momentum with the greatest mean."""
    given, momentum, _ = max(tried, key=lambda one: one[2])
    return given, momentum


# ---- judging -----------------------------------------------------------------------------------------------


def recipe_arms(config: RunConfig, recipe: Recipe, tasks: Sequence[Any], trained: Sequence[Trained]) -> Arms:
    """Return the accuracy of all arms of a recipe on one table."""
    spec = spec_for(recipe.apply(config), tasks)
    starts = {USUAL: 1.0, TUNED: recipe.scale}
    rows = with_rates(spec, np.repeat(np.array(list(starts.values()))[:, None], len(spec.members), 1))
    arms: dict[str, Controller] = {STATIC: Static(), RULE: ReactiveRate()}
    for k, one in enumerate(trained):
        arms[f"{CONTROLLER}@{k}"] = LearnedController(one.agent, deterministic=True)
    found: Arms = {}
    for arm, tested in test_weights(rows, arms, [recipe.power]).items():
        for kind, values in tested.items():
            suffix = "" if kind == LAST else ", averaged"
            for start, own in zip(starts, np.reshape(values, (len(starts), -1)), strict=True):
                name = f"{recipe.name}{arm.split('@')[0]} from {start}{suffix}"
                found.setdefault(name, []).append(own.tolist())
    return found


def plain_arms(config: RunConfig, tasks: Sequence[Any], means: Mapping[str, Any]) -> Arms:
    """Return the accuracy of range test and other packages' optimizers with their momentum tuned."""
    usual = config.population.momentum
    chosen = {name: (name, *best_of(means[name])) for name in ("Prodigy", "range test")}
    chosen = {f"{name}, its momentum tuned": one for name, one in chosen.items()}
    chosen[RETUNED] = (SCHEDULE_FREE, *best_of(means[SCHEDULE_FREE]))
    same = [one for one in means[SCHEDULE_FREE] if one[1] == usual]  # as in `studies.held_out`
    chosen[SCHEDULE_FREE] = (
        SCHEDULE_FREE,
        *best_of(same),
    )
    spec = spec_for(config, tasks)
    return {
        arm: [plain_accuracy(with_momentum(spec, momentum), MAKERS[name], *given)]
        for arm, (name, given, momentum) in chosen.items()
    }


def judge(config: RunConfig, trainings: int) -> Iterator[dict[str, Any]]:
    """Tune on made tables, train, meet fresh made tables, and at last the held-out ones."""
    recipes, means = tune(config)
    yield {"tuned": [vars(recipe) for recipe in recipes], "made means": means}
    trained: dict[Recipe, list[Trained]] = {recipe: [] for recipe in recipes}
    # Not at the usual momentum without a decay, which adds nothing to the question.
    runs = [(recipes[k], training) for k in (0, 2, 3) for training in range(trainings)]
    for recipe, training in with_progress("training controllers", runs):
        trained[recipe].append(train(recipe.apply(config), training))
    cells: list[tuple[str, Any]] = [("made", world) for world in range(JUDGED)]
    for key, name in with_progress("tables", [*cells, *(("table", name) for name in HELD_OUT)]):
        tasks = varied_tables(FRESH + name) if key == "made" else splits_of(name)
        arms: Arms = {}
        for recipe in recipes:
            arms |= recipe_arms(config, recipe, tasks, trained[recipe])
        yield {key: name, "arms": arms | plain_arms(config, tasks, means)}


# ---- the report --------------------------------------------------------------------------------------------


def merge(records: Records) -> list[dict[str, Any]]:
    """Return the held-out tables of this study, with the grid of the other file if there is one.

    Raises ValueError where the files have other networks left alone at the usual rate.
    """
    others = {record["table"]: record for record in records if "table" in record and "grid" in record}
    found = []
    for record in records:
        if "table" in record and "grid" not in record:
            name, arm = record["table"], f"{STATIC} from {USUAL}"
            other = others.get(name, record)
            if other["arms"][arm] != record["arms"][arm]:
                raise ValueError(f"the files differ in the networks on {name}; read those of one recipe")
            found.append({**other, **record})
    return found


def means_of(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the mean accuracy of every arm on a table, and of the oracle where there is a grid."""
    if "grid" in record:
        return accuracy_of(record)
    return {name: float(np.mean(several)) for name, several in record["arms"].items()}


def differences(found: Sequence[Mapping[str, float]], main: str) -> str:
    """Return all arms: mean, regret where there is an oracle, and what each has more than three others."""
    others = (SCHEDULE_FREE, RETUNED, main)
    regret = ["regret"] if ORACLE in found[0] else []
    head = ["arm", "mean", *regret, *(f"minus {name}" for name in others)]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for arm in sorted(found[0], key=lambda arm: -sum(table[arm] for table in found)):
        cells = [f"{np.mean([table[arm] for table in found]):.2f}"]
        cells += [over_tables([table[ORACLE] - table[arm] for table in found])[0] for _ in regret]
        for other in others:
            same = other == arm
            cells.append("" if same else over_tables([table[arm] - table[other] for table in found])[0])
        lines.append(f"| {arm} | {' | '.join(cells)} |")
    return "\n".join(lines)


def contrasts(found: Sequence[Mapping[str, float]], main: str) -> str:
    """Return what averages, momentum and decay are worth, and the main arm against opponents, with p."""
    low, still = "low momentum: ", "no decay: "
    both, tuned, usual = "low momentum, no decay: ", f"{STATIC} from {TUNED}", f"{CONTROLLER} from {USUAL}"
    rule = f"{RULE} from {USUAL}"
    pairs = [(f"{arm}, averaged", arm) for arm in (f"{STATIC} from {USUAL}", tuned, usual, rule)]
    pairs += [(f"{still}{tuned}, averaged", tuned), (f"{low}{tuned}", tuned)]
    pairs += [(f"{both}{tuned}, averaged", f"{low}{tuned}"), (f"{low}{usual}", usual)]
    pairs += [(f"{both}{usual}, averaged", f"{low}{usual}"), (f"{both}{usual}, averaged", usual)]
    pairs += [(f"{low}{CONTROLLER} from {TUNED}", f"{low}{tuned}")]
    own = (main, f"{low}{CONTROLLER} from {TUNED}")
    opponents = (SCHEDULE_FREE, RETUNED, "Prodigy, its momentum tuned", "range test, its momentum tuned")
    pairs += [(arm, other) for arm in own for other in (*opponents, f"{both}{tuned}, averaged")]
    lines = ["| arm | minus | points (p) |", "|---" * 3 + "|"]
    for arm, other in pairs:
        gain, p = over_tables([table[arm] - table[other] for table in found])
        lines.append(f"| {arm} | {other} | {gain} ({p:.3f}) |")
    return "\n".join(lines)


def by_table(records: Records, main: str) -> str:
    """Return some arms on every table minus schedule-free AdamW with its momentum tuned."""
    shown = (SCHEDULE_FREE, f"low momentum: {STATIC} from {TUNED}", main)
    lines = [f"| table | {' | '.join(shown)} |", "|---" * (1 + len(shown)) + "|"]
    for record in records:
        means = means_of(record)
        cells = [f"{means[name] - means[RETUNED]:+.1f}" for name in shown]
        lines.append(f"| {record['table']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def report(records: Records) -> str:
    """Return what was chosen, and the tables of made and held-out tables, in points.

    The controller that all arms are compared with is the best from the usual rate on fresh made tables.
    """
    first = next(record for record in records if "made means" in record)
    parts = [str(recipe) for recipe in first["tuned"]]
    parts += [f"{name}: {means}" for name, means in first["made means"].items()]
    made = [means_of(record) for record in records if "made" in record and "grid" not in record]
    own = [name for name in made[0] if f"{CONTROLLER} from {USUAL}" in name]
    main = max(own, key=lambda name: sum(means[name] for means in made))
    parts += [f"{len(made)} shapes of fresh made tables", differences(made, main), contrasts(made, main)]
    if tables := merge(records):
        found = [means_of(record) for record in tables]
        parts += [f"{len(found)} held-out tables", differences(found, main), contrasts(found, main)]
        parts.append(by_table(tables, main))
    return "\n\n".join(parts)


def main(arguments: Sequence[str] | None = None) -> None:
    """Tune, train and judge, or print the tables of files."""
    command_line.run_trainings(arguments, __doc__, 5, judge, report)


if __name__ == "__main__":
    command_line.run(main)
