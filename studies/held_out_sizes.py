"""How much is there to win by the size of a network beside its learning rate, on the held-out tables?

    python -m studies.held_out_sizes --out FILE         half an hour of a core; extras data, searches, rates
    python -m studies.held_out_sizes --read OTHER FILE  the tables; OTHER: a file of `studies.held_out`

Networks of a ladder of sizes are left alone on the tables of `studies.held_out`, with its splits, minibatches
and budget of FLOPs: a larger network gets fewer minibatches, a smaller one more. The fixed size by budget and
its rate are the best on made tables. Searches draw rate and size. The oracle has the best pair of a grid for
each table, chosen by half of the networks for the other half.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
    HELD_OUT,
    ORACLE,
    SIZE_ORACLE,
    TRIALS,
    Records,
    accuracy_of,
    cross_fitted,
    drawn_scales,
    over_tables,
    regrets,
    searches,
    spec_for,
    splits_of,
    train_static,
    tuning_tables,
    with_rates,
)
from studies.rates import FRESH

# Width and hidden units, from the least cost to the greatest; (8, 2) is the recipe's own. All have its depth.
LADDER = ((3, 1), (4, 1), (6, 2), (8, 2), (12, 3), (16, 4), (24, 6), (32, 8), (48, 12))
UNSPENT = 0.01  # of the minibatches that a budget pays for: the most that may be left to fill whole steps
FIXED = "fixed size by budget"
SAME = 0.9  # of the recipe's networks end alike in two files of one recipe


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
        # Steps as long as the recipe's where that leaves little, but POINTS of them at least.
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
    """Choose the fixed size and its rate on made tables, then meet the held-out ones."""
    tables = with_progress("tuning the size", tuning_tables())
    grids = [train_sizes(sized_specs(config, tasks))[0] for tasks in tables]
    least = min(len(grid) for grid in grids)  # sizes that every budget pays for
    means = np.mean([grid[:least] for grid in grids], axis=(0, 3))
    size, rate = np.unravel_index(means.argmax(), means.shape)
    yield {"tuned": {"size": LADDER[size], "scale": GRID[rate]}, "made means": means.round(3).tolist()}
    for name in with_progress("held-out tables", HELD_OUT):
        specs = sized_specs(config, splits_of(name))
        grid, trials = train_sizes(specs)
        arms = {arm.replace(" ×", " of rate and size ×"): found for arm, found in searches(trials).items()}
        arms[FIXED] = [grid[min(size, len(grid) - 1)][rate]]
        own = LADDER.index((config.host.width, config.host.hidden))
        spent = {
            "minibatches": [spec.episode.steps * spec.population.batches_per_epoch for spec in specs],
            "flops": [float(one_network(spec).budget[0]) for spec in specs],
        }
        yield {"table": name} | spent | {"grid": grid[own], "sized": grid, "arms": arms}


# ---- the report --------------------------------------------------------------------------------------------


def merge(records: Records) -> list[dict[str, Any]]:
    """Return one record for each table with the arms of all files, and the first file's grid.

    Raises ValueError where the files have other networks of the recipe's size.
    """
    found: dict[Any, dict[str, Any]] = {}
    for record in records:
        if name := record.get("table"):
            old = found.setdefault(name, {"grid": record["grid"], "arms": {}})
            # At the highest rate networks diverge, and rounding depends on how many share a program.
            if np.mean(np.equal(old["grid"], record["grid"])) < SAME:
                raise ValueError(
                    f"the files differ in the recipe's networks on {name}; read those of one recipe"
                )
            old |= {**record, "grid": old["grid"], "arms": old["arms"] | record["arms"]}
    return [record for record in found.values() if "sized" in record]


def by_table(records: Records) -> str:
    """Return the best pair of every table, and how far it and some arms are above the best rate."""
    shown = [SIZE_ORACLE, FIXED, "ASHA of rate and size ×4", "ASHA of rate and size ×8"]
    lines = [f"| table | best width | its rate | {' | '.join(shown)} |", "|---" * (3 + len(shown)) + "|"]
    for record in records:
        means, arms = np.mean(record["sized"], axis=2), accuracy_of(record)
        pair = np.unravel_index(means.argmax(), means.shape)
        edges = [" (edge)" if at in (0, end - 1) else "" for at, end in zip(pair, means.shape, strict=True)]
        cells = [f"{LADDER[pair[0]][0]}{edges[0]}", f"{0.01 * GRID[pair[1]]:.2g}{edges[1]}"]
        cells += [f"{arms[name] - arms[ORACLE]:+.1f}" for name in shown]
        lines.append(f"| {record['table']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def by_size(records: Records) -> str:
    """Return what each size loses to the recipe's, both at the best rate for each table."""
    lines = ["| width | tables | regret |", "|---" * 3 + "|"]
    for size, (width, _) in enumerate(LADDER):
        some = [record for record in records if size < len(record["sized"])]
        lost = [
            accuracy_of(record)[ORACLE] - cross_fitted(np.array(record["sized"][size])) for record in some
        ]
        if len(lost) > 1:
            lines.append(f"| {width} | {len(lost)} | {over_tables(lost)[0]} |")
    return "\n".join(lines)


def report(records: Records) -> str:
    """Return the tables of all files, in points; regret is that of `studies.held_out`."""
    tables, others = merge(records), [record for record in records if "arms" not in record]
    parts = [f"{name}: {value}" for record in others for name, value in record.items()]
    least = min(min(record["flops"]) / max(record["flops"]) for record in tables)
    parts += [
        regrets(tables),
        by_table(tables),
        by_size(tables),
        f"least share of the budget that a size spends: {least:.3f}",
    ]
    return "\n\n".join(parts)


def main(arguments: Sequence[str] | None = None) -> None:
    """Tune and judge, or print the tables of files."""
    command_line.run_trainings(arguments, __doc__, 0, judge, report)


if __name__ == "__main__":
    command_line.run(main)
