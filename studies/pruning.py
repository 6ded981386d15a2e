"""The way from above: a host of twice the width, pruned by magnitude while it trains.

The share of weights that is left falls by a cubic schedule from the end of the warm-up on; in the last third
of the training the masks stay as they are. Biases and scales of norms are never pruned. FLOPs are counted
dense: a mask saves none.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from esper.comparing import EVALUATION_EPISODE, prices_of
from esper.population.bodies import Bodies
from esper.population.data import Clock
from esper.population.optimiser import RowWeights
from esper.simic.environment import GrowthEnvironment
from esper.simic.rollout import evaluate_test
from esper.tasks.task import Task
from studies.records import Arm, rounded, significant, worth
from studies.setting import Setting, ungrown, with_host

WIDER = 2  # times the width of the task's own host
EVERY = 8  # minibatches between projections
FIXED_FROM = 2 / 3  # of the training
BEGINS = 0.2  # of the training: the end of the warm-up


@dataclass
class Masks:
    """Which weights of each member are left."""

    kept: Tensor  # [N, P] bool
    prunable: Tensor  # [P] bool

    @staticmethod
    def full(bodies: Bodies, members: int) -> Masks:
        prunable = prunable_weights(bodies)
        return Masks(torch.ones(members, len(prunable), dtype=torch.bool, device=bodies.device), prunable)

    def shrink(self, weights: Tensor, parameters: int) -> None:
        """Keep the largest weights, so that `parameters` are left in all; what is gone stays gone."""
        spared = int((~self.prunable).sum())
        count = min(max(parameters - spared, 1), int(self.prunable.sum()))
        size = weights.abs().masked_fill(~(self.kept & self.prunable), -1.0)
        left = torch.zeros_like(self.kept).scatter_(1, size.topk(count, dim=1).indices, True)
        self.kept = (left & self.kept) | ~self.prunable

    def project(self, rows: RowWeights) -> None:
        """Pruned weights and their moments become 0."""
        for values in (rows.weights, rows.first, rows.second):
            values.mul_(self.kept)


def prunable_weights(bodies: Bodies) -> Tensor:
    """True for the elements of matrices and kernels of a host's row.  # [P] bool

    Raises ValueError for a host with residual blocks, whose weights lie in rows of their own.
    """
    if bodies.has_blocks:
        raise ValueError(
            "pruning masks the one row of a host; give a host without residual blocks: cnn or mlp"
        )
    parts = [
        torch.full((size,), len(shape) > 1)
        for module in bodies.trunk
        if module is not None
        for size, shape in zip(module.layout.sizes, module.layout.shapes, strict=True)
    ]
    return torch.cat(parts).to(bodies.device)


def parameters_left(done: float, start: int, end: int) -> int:
    """How many parameters are left after a share of the training."""
    way = min(max((done - BEGINS) / (FIXED_FROM - BEGINS), 0.0), 1.0)
    return round(end + (start - end) * (1.0 - way) ** 3)


def prune_from_big(setting: Setting, task: Task, members: Tensor, target: int, host_parameters: int) -> Arm:
    """A wide host pruned to `target` parameters: as many minibatches as every other arm."""
    short = replace(setting, batches=EVERY, steps=setting.steps * setting.batches // EVERY)
    wide = with_host(task, width=WIDER * task.host.options["width"])
    world = GrowthEnvironment(ungrown(short.spec(wide, members)))
    world.reset(EVALUATION_EPISODE)
    population, train = world.population, world.member_data([task.train])
    validation = world.member_data([task.validation])
    masks, dense = Masks.full(population.bodies, len(members)), world.host_parameters
    batches, curve = [0], [world.rows.signals.accuracy]
    looks = {round(k * short.steps / setting.steps) for k in range(1, setting.steps + 1)}
    for epoch in range(short.steps):
        population.train_epoch(world.slots, train, Clock(EVALUATION_EPISODE, epoch, short.steps))
        left = parameters_left((epoch + 1) / short.steps, dense, min(target, dense))
        masks.shrink(population.hosts.weights, left)
        masks.project(population.hosts)
        if epoch + 1 in looks:
            batches.append((epoch + 1) * EVERY)
            curve.append(population.validate(world.slots, validation, ablate=False).accuracy)
    spent = np.array(batches)[:, None] * prices_of(world).batch  # [K, N]
    test, parameters = evaluate_test(world).accuracy, masks.kept.sum(dim=1).cpu().numpy()
    accuracy = torch.stack(curve).cpu().numpy()
    return Arm(
        name="pruned from twice the width",
        test_accuracy=rounded(test),
        validation_accuracy=rounded(accuracy[-1]),
        parameters=parameters.tolist(),
        potential=worth(test, parameters, host_parameters),
        flops=significant(spent[-1]),
        batches=batches,
        curve=rounded(accuracy.mean(axis=1)),
        spent=significant(spent.mean(axis=1)),
    )
