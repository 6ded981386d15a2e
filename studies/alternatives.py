"""Other ways to a network: hosts of other widths, and a random search over sizes at the same budget."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import torch
from torch import Tensor

from esper.comparing import EVALUATION_EPISODE, prices_of
from esper.simic.environment import GrowthEnvironment
from esper.simic.rollout import EpisodeRecord, evaluate_test, play
from esper.tamiyo.scripted import Static
from esper.tasks.task import HostSpec, Task
from studies.finals import train_fixed, training_alone
from studies.records import Arm, arm_of, rounded, significant, worth
from studies.setting import Setting, tidy, ungrown, with_host

WIDTHS = (4, 5, 6, 8, 12)
DEPTHS = (2, 3, 4)
CANDIDATES = 4  # sizes that a member tries, each for a share of the steps


def widths_for(host: HostSpec) -> tuple[int, ...]:
    """The widths that a host can have: heads must divide them."""
    return tuple(width for width in WIDTHS if width % host.options.get("heads", 1) == 0)


def static_widths(setting: Setting, task: Task, members: Tensor, host_parameters: int) -> Iterator[Arm]:
    """Static hosts along the size frontier, to twice the task's own width, which is an arm already."""
    own = task.host.options["width"]
    for width in sorted({*widths_for(task.host), 2 * own}):
        if width != own:
            played = train_fixed(setting, with_host(task, width=width), members)
            tidy()
            yield replace(arm_of(f"static width {width}", played, host_parameters), growth=None)


@dataclass(frozen=True)
class Candidate:
    """One size with the members that try it."""

    world: GrowthEnvironment
    record: EpisodeRecord
    rows: dict[int, int]  # member → its row in the world


def random_search(setting: Setting, task: Task, members: Tensor, host_parameters: int) -> Arm:
    """Each member tries a few random sizes for equal shares of the steps; validation chooses."""
    sizes = list(product(widths_for(task.host), DEPTHS))
    drawn = {int(m): draw(int(m), len(sizes), setting.seed) for m in members}
    share = replace(setting, steps=max(1, setting.steps // CANDIDATES))
    candidates: dict[int, Candidate] = {}
    for k, (width, depth) in enumerate(sizes):
        mine = [m for m, choices in drawn.items() if k in choices]
        if mine:
            spec = share.spec(with_host(task, width=width, depth=depth), torch.tensor(mine))
            world = GrowthEnvironment(ungrown(spec))
            record = play(world, Static(), EVALUATION_EPISODE)
            candidates[k] = Candidate(world, record, {m: row for row, m in enumerate(mine)})
    tried = {m: {k: candidates[k] for k in choices} for m, choices in drawn.items()}
    chosen = {m: best_by_validation(m, mine) for m, mine in tried.items()}
    tests = {k: evaluate_test(candidates[k].world).accuracy for k in sorted(set(chosen.values()))}
    row = {m: candidates[k].rows[m] for m, k in chosen.items()}
    test = np.array([tests[k][row[m]] for m, k in chosen.items()])
    validation = [candidates[k].record.accuracy[-1, row[m]] for m, k in chosen.items()]
    parameters = np.array([candidates[k].record.host_parameters for k in chosen.values()])
    flops = np.array([sum(spent_on(c) for c in mine.values()) for mine in tried.values()])
    return Arm(
        name="random search over sizes",
        test_accuracy=rounded(test),
        validation_accuracy=rounded(validation),
        parameters=parameters.tolist(),
        potential=worth(test, parameters, host_parameters),
        flops=significant(flops),
        batches=[share.steps * CANDIDATES * setting.batches],
        curve=rounded([float(np.mean(validation))]),
        spent=significant(flops.mean(keepdims=True)),
    )


def spent_on(candidate: Candidate) -> float:
    """FLOPs of one member's try: its training, and the validation that it is judged by."""
    price = prices_of(candidate.world)
    return float(training_alone(candidate.world)[-1, 0] + price.validation[0])


def draw(member: int, sizes: int, seed: int) -> tuple[int, ...]:
    """The sizes that a member tries, all different."""
    rng = np.random.default_rng([seed, member])
    return tuple(rng.choice(sizes, size=min(CANDIDATES, sizes), replace=False).tolist())


def best_by_validation(member: int, tried: dict[int, Candidate]) -> int:
    """The size with the highest validation accuracy at its end; the test split stays shut."""
    return max(tried, key=lambda k: float(tried[k].record.accuracy[-1, tried[k].rows[member]]))
