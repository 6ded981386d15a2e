"""How much is there to win by the size of a network beside its learning rate, on the held-out tables?

    python -m studies.held_out_sizes --out FILE         half an hour of a core; extras data, searches, rates
    python -m studies.held_out_sizes --read FILE OTHER  the tables; OTHER: a file of `studies.held_out`

Networks of a ladder of sizes are left alone on the tables of `studies.held_out`, with its splits, minibatches
and budget of FLOPs: a larger network gets fewer minibatches, a smaller one more. The fixed size by budget and
its rate are the best on made tables. Searches draw rate and size. The oracle has the best pair of a grid for
each table, chosen by half of the networks for the other half.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from esper.config import RunConfig
from esper.simic.environment import EnvironmentSpec, GrowthEnvironment
from esper.tasks.task import Task
from studies import command_line
from studies.command_line import with_progress
from studies.growth.records import POINTS
from studies.held_out import (
    GRID,
    ORACLE,
    SIZE_ORACLE,
    TRIALS,
    Records,
    accuracy_of,
    drawn_scales,
    judging_tables,
    over_tables,
    regrets,
    searches,
    spec_for,
    train_static,
    tuning_tables,
    with_rates,
)
from studies.rates import FRESH

# Width and hidden units, from the least cost to the greatest; (8, 2) is the recipe's own. All have its depth.
LADDER = ((3, 1), (4, 1), (6, 2), (8, 2), (12, 3), (16, 4), (24, 6), (32, 8), (48, 12))
UNSPENT = 0.01  # of the minibatches that a budget pays for: the most that may be left to fill whole steps
FIXED = "fixed size by budget"


def sized_specs(config: RunConfig, tasks: Sequence[Task]) -> list[EnvironmentSpec]:
    """Return an environment for each size that can pay POINTS minibatches or more from the recipe's budget.

    None spends more than the recipe's network. What is left is less than a minibatch, and UNSPENT.
    """
    budget, found = float(one_network(spec_for(config, tasks)).budget[0]), []
    for width, hidden in LADDER:
        host = config.host.model_copy(update={"width": width, "hidden": hidden})
        spec = spec_for(config.model_copy(update={"host": host}), tasks)
        longest = spec.population.batches_per_epoch
        batches = int(budget / one_network(spec).bare_cost * longest + 1e-6)
        # A step is as long as the recipe's if that leaves little; every eighth of the budget ends one.
        steps = range(1, min(longest, batches // POINTS) + 1)
        fits = [step for step in steps if batches % step <= UNSPENT * batches]
        if fits:
            episode = spec.episode.model_copy(update={"steps": batches // fits[-1]})
            # Without room to repeat blocks, which nobody does here, large networks take half the time.
            own = {"batches_per_epoch": fits[-1], "folds": 0}
            population = spec.population.model_copy(update=own)
            found.append(replace(spec, episode=episode, population=population))
    return found


def one_network(spec: EnvironmentSpec) -> GrowthEnvironment:
    """Return an environment of the first network alone, to read what it costs."""
    return GrowthEnvironment(replace(spec, members=spec.members[:1]))


def train_sizes(specs: Sequence[EnvironmentSpec]) -> tuple[list[list[list[float]]], NDArray[np.float64]]:
    """Train every size at every rate of the grid, and the trials of searches at drawn rates and sizes.

    Returns test accuracy in points [sizes][rates][networks], and trials as `searches` takes them.
    """
    networks = len(specs[0].members)
    sizes = np.random.default_rng([FRESH, 1]).integers(len(specs), size=TRIALS * networks)
    grid, trials = [], np.zeros((TRIALS * networks, 2 + POINTS))
    for size, spec in enumerate(specs):
        rows = with_rates(spec, np.repeat(np.array(GRID)[:, None], networks, 1))
        drawn, mine = with_rates(spec, drawn_scales(networks), offset=networks), np.flatnonzero(sizes == size)
        members = torch.cat([rows.members, drawn.members[torch.from_numpy(mine)]])
        scales = rows.rate_scale + tuple(drawn.rate_scale[trial] for trial in mine)
        found = train_static(replace(rows, members=members, rate_scale=scales))
        split = len(rows.members)
        grid.append(found[:split, 0].round(3).reshape(len(GRID), networks).tolist())
        trials[mine] = found[split:]
    return grid, trials.reshape(TRIALS, networks, -1)


def judge(config: RunConfig, _: int) -> Iterator[dict[str, Any]]:
    """Choose the fixed size and its rate on made tables; then meet fresh made tables and the held-out."""
    tables = with_progress("tuning the size", tuning_tables())
    grids = [train_sizes(sized_specs(config, tasks))[0] for tasks in tables]
    least = min(len(grid) for grid in grids)  # sizes that every budget pays for
    means = np.mean([grid[:least] for grid in grids], axis=(0, 3))
    size, rate = np.unravel_index(means.argmax(), means.shape)
    yield {"tuned": {"size": LADDER[size], "scale": GRID[rate]}, "made means": means.round(3).tolist()}
    for name, tasks in judging_tables():
        specs = sized_specs(config, tasks)
        grid, trials = train_sizes(specs)
        arms = {arm.replace(" ×", " of rate and size ×"): found for arm, found in searches(trials).items()}
        arms[FIXED] = [grid[min(size, len(grid) - 1)][rate]]
        own = LADDER.index((config.host.width, config.host.hidden))
        spent = {
            "minibatches": [spec.episode.steps * spec.population.batches_per_epoch for spec in specs],
            "flops": [float(one_network(spec).budget[0]) for spec in specs],
        }
        yield name | spent | {"grid": grid[own], "sized": grid, "arms": arms}


# ---- the report --------------------------------------------------------------------------------------------


def merge(records: Records) -> list[dict[str, Any]]:
    """Return one record for each table with the arms of all files.

    Raises ValueError where the files have other networks of the recipe's size.
    """
    found: dict[Any, dict[str, Any]] = {}
    for record in records:
        if "arms" in record:
            name = record.get("table", record.get("made"))
            old = found.setdefault(name, {"grid": record["grid"], "arms": {}})
            if old["grid"] != record["grid"]:
                raise ValueError(
                    f"the files differ in the recipe's networks on {name}; read those of one recipe"
                )
            old |= {**record, "arms": old["arms"] | record["arms"]}
    return [record for record in found.values() if "sized" in record]


def by_table(records: Records) -> str:
    """Return the best pair of every table, and how far it and some arms are above the best rate."""
    shown = [SIZE_ORACLE, FIXED, "ASHA of rate and size ×4", "ASHA of rate and size ×8"]
    lines = [f"| table | sizes | best width | its rate | {' | '.join(shown)} |", "|---" * 8 + "|"]
    for record in records:
        size, rate = best_pair(record)
        arms = accuracy_of(record)
        cells = [str(len(record["sized"])), str(LADDER[size][0]), f"{0.01 * GRID[rate]:.2g}"]
        cells += [f"{arms[name] - arms[ORACLE]:+.1f}" for name in shown]
        lines.append(f"| {record.get('table', record.get('made'))} | {' | '.join(cells)} |")
    return "\n".join(lines)


def best_pair(record: Mapping[str, Any]) -> tuple[int, int]:
    """Return the indices of the size and the rate with the best mean over all networks."""
    means = np.mean(record["sized"], axis=2)
    size, rate = np.unravel_index(means.argmax(), means.shape)
    return int(size), int(rate)


def report(records: Records) -> str:
    """Return the tables of all files: fresh made tables, and the held-out ones; in points."""
    others = [record for record in records if "arms" not in record]
    parts = [f"{name}: {value}" for record in others for name, value in record.items()]
    for kind in ("made", "table"):
        some = [record for record in merge(records) if kind in record]
        if not some:
            continue
        pairs, sizes = [best_pair(record) for record in some], [len(record["sized"]) for record in some]
        small = sum(size == 0 for size, _ in pairs)
        large = sum(size == last - 1 for (size, _), last in zip(pairs, sizes, strict=True))
        rates = sum(rate in (0, len(GRID) - 1) for _, rate in pairs)
        found = [accuracy_of(record) for record in some]
        headroom = over_tables([arms[SIZE_ORACLE] - arms[ORACLE] for arms in found])[0]
        parts += [
            f"{len(some)} tables ({kind})",
            regrets(some),
            by_table(some),
            f"best of rate and size minus best rate: {headroom}",
            f"best pairs at an edge of the grid: smallest size {small}, largest {large}, rate {rates}",
        ]
    return "\n\n".join(parts)


def main(arguments: Sequence[str] | None = None) -> None:
    """Tune and judge, or print the tables of files."""
    command_line.run_trainings(arguments, __doc__, 0, judge, report)


if __name__ == "__main__":
    command_line.run(main)
