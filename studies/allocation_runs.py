"""Train what `studies.allocation` replays: networks at many rates, forked populations, and longer runs.

On every made task a grid of networks is left alone, so that any plan that only stops networks can be
replayed from their learning curves. Forks (population based training) and longer runs are trained for
themselves, with the same training FLOPs. Validations are charged to nobody.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from esper.config import RunConfig
from esper.simic.environment import EnvironmentSpec, GrowthEnvironment
from esper.simic.rollout import Episode, evaluate_test, play
from esper.tamiyo.scripted import Static
from esper.tasks.task import Task, TestSplit
from studies.command_line import with_progress
from studies.headroom.runs import score_halves
from studies.held_out import SPAN, spec_for, varied_tables, with_rates
from studies.rates import FRESH

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
FIRST = 2 * FRESH  # seed of the first shape: no other study has these tables
SHAPES, TASKS = 40, 4  # shapes of tables, and tasks of each: the kinds of rules in turn
TIMES = (2, 4, 8)  # the compute of an allocator, in runs
STEPS = 16  # decision times of a run: after every 6 minibatches
RATES = tuple(SPAN ** np.linspace(-0.5, 0.5, 10))  # times the usual rate of 0.01
TWINS, NETWORKS = 2, 8  # networks of a rate in each twin of a task; twins share the task alone
RUNGS = (1, 2, 3, 4, 8)  # decision times that are recorded
EARLY = (2, 3)  # those among the first 10 to 20 %, where training losses are recorded too
LONG_RATES = RATES[4:9]  # of runs that are longer: 0.008 to 0.06
NEAR = (2.0, 8.0)  # first rates of forked populations that know the range, around 4, the best for all tables
# Population based training: decision times between two exploits, and by what a fork changes the rate.
FORKS = tuple((every, by, near) for near in (False, True) for every in (2, 4) for by in (1.25, 2.0))
SHARE = 4  # one in so many networks is replaced, and as many are copied
LOSS_SCALE = 16  # a recorded loss is this many times its natural logarithm, over that of chance


# ---- training ----------------------------------------------------------------------------------------------


def at_the_end(environment: GrowthEnvironment) -> dict[str, Ints]:
    """Return the score of every network at the end, per mille.  # whole validation split [N], test [2, N]"""
    halves, tasks = score_halves(environment), environment.population.tasks
    environment.population.tasks = [replace(task, held_out=TestSplit(task.validation)) for task in tasks]
    validation = evaluate_test(environment).accuracy
    return {"validation": per_mille(validation), "test": per_mille(halves)}


def per_mille(values: NDArray[Any]) -> Ints:
    """Round shares to whole thousandths."""
    return np.round(1000.0 * values).astype(np.int64)


def train_grid(spec: EnvironmentSpec) -> dict[str, Ints]:
    """Train networks at all rates; return scores and the recorded part of the learning curves.

    Shapes end with [rates, twins · networks, tasks].
    """
    own = np.repeat(RATES, TWINS * NETWORKS)[:, None].repeat(TASKS, 1)
    environment = GrowthEnvironment(with_rates(spec, own, offset=TASKS))
    record, rungs = play(environment, Static(), 0), list(RUNGS)
    chance = np.log(spec.task.num_classes)

    def as_logarithm(losses: NDArray[Any]) -> Ints:
        known = np.nan_to_num(losses.astype(np.float64), nan=20.0 * chance) / chance
        return np.round(LOSS_SCALE * np.log(np.clip(known, 0.02, 20.0))).astype(np.int64)

    found = at_the_end(environment) | {
        "accuracy": per_mille(record.accuracy[rungs]) // 10,  # of 100 samples
        "loss": as_logarithm(record.loss[rungs]),
        "training_loss": as_logarithm(record.training_loss[[rung - 1 for rung in EARLY]]),
    }
    return {name: value.reshape(*value.shape[:-1], len(RATES), -1, TASKS) for name, value in found.items()}


def train_longer(spec: EnvironmentSpec, times: int) -> dict[str, Ints]:
    """Train one network of each twin at some rates for so many times the usual budget."""
    episode = spec.episode.model_copy(update={"steps": times * spec.episode.steps})
    own = np.repeat(LONG_RATES, TWINS)[:, None].repeat(TASKS, 1)
    environment = GrowthEnvironment(with_rates(replace(spec, episode=episode), own, offset=TASKS))
    play(environment, Static(), 0)
    return {"test": at_the_end(environment)["test"].reshape(2, len(LONG_RATES), TWINS, TASKS)}


def fork(environment: GrowthEnvironment, source: Ints, factor: Floats) -> None:
    """Replace networks by copies of others, optimizer state included, and multiply their learning rates.

    source [N]: the network that each becomes a copy of; factor [N] of the rate that is copied too.
    """
    state, rows = environment.state_dict(), torch.from_numpy(source)
    for name, value in state.items():
        if name not in ("members", "episode", "clock"):
            state[name] = value.reshape(len(rows), -1)[rows].reshape(value.shape)
    state["state.rates.scale"] *= torch.from_numpy(factor).float()
    environment.load_state_dict(state)


def choose_forks(accuracy: Floats, by: float, rng: np.random.Generator) -> tuple[Ints, Floats]:
    """Let the worst of a population copy some of the best, at a rate that is higher or lower.

    accuracy [n] → whom each copies [n], and the factor of its rate [n]
    """
    source, factor = np.arange(len(accuracy)), np.ones(len(accuracy))
    order, some = np.argsort(accuracy, kind="stable"), max(1, len(accuracy) // SHARE)
    for worse in order[:some]:
        better = rng.choice(order[-some:])
        if accuracy[better] > accuracy[worse]:
            source[worse], factor[worse] = better, by ** rng.choice((-1.0, 1.0))
    return source, factor


def train_forked(spec: EnvironmentSpec, seed: int) -> dict[str, Ints]:
    """Train populations of 2, 4 and 8 networks with forks; return the test score of the best of each.

    The best is that of the whole validation split.  # [2, forks, twins, times, tasks]
    """
    rng, each = np.random.default_rng([seed, 23]), sum(TIMES)
    spans = [NEAR if near else (RATES[0], RATES[-1]) for _, _, near in FORKS]
    drawn = [np.exp(rng.uniform(np.log(a), np.log(b), (TWINS * each, TASKS))) for a, b in spans]
    environment = GrowthEnvironment(with_rates(spec, np.concatenate(drawn), offset=TASKS))
    numbers = np.arange(environment.num_members).reshape(len(FORKS), TWINS, each, TASKS)
    bounds = np.cumsum((0, *TIMES))
    groups = {
        (arm, twin, k, task): numbers[arm, twin, bounds[k] : bounds[k + 1], task]
        for arm, twin, k, task in np.ndindex(len(FORKS), TWINS, len(TIMES), TASKS)
    }
    episode = Episode(environment, Static())
    while not environment.done:
        seen = episode.step().observation.val_accuracy.numpy().astype(np.float64)
        source, factor = np.arange(environment.num_members), np.ones(environment.num_members)
        for (arm, *_), members in groups.items():
            every, by, _ = FORKS[arm]
            if environment.clock % every == 0:
                own, factor[members] = choose_forks(seen[members], by, rng)
                source[members] = members[own]
        if not environment.done and (factor != 1.0).any():
            fork(environment, source, factor)
    ended = at_the_end(environment)
    found = np.zeros((2, len(FORKS), TWINS, len(TIMES), TASKS), dtype=np.int64)
    for place, members in groups.items():
        found[:, *place] = ended["test"][:, members[ended["validation"][members].argmax()]]
    return {"test": found}


def facts_of(task: Task) -> list[float]:
    """Return what is known beforehand: samples to train on, columns, classes."""
    return [len(task.train), task.input_shape[0], task.num_classes]


def judge(config: RunConfig, _: int) -> Iterator[dict[str, Any]]:
    """Train all networks of every shape; yield a record for each task."""
    for shape in with_progress("shapes", range(SHAPES)):
        tasks = varied_tables(FIRST + shape)[:TASKS]
        spec = spec_for(config, tasks)
        spec = replace(spec, population=spec.population.model_copy(update={"folds": 0}))  # nothing grows
        found = {"grid": train_grid(spec), "forked": train_forked(spec, shape)}
        found |= {f"longer {times}": train_longer(spec, times) for times in TIMES}
        for k, task in enumerate(tasks):
            own = {n: {part: v[..., k].tolist() for part, v in arm.items()} for n, arm in found.items()}
            yield {"shape": shape, "name": task.name, "facts": facts_of(task)} | own
