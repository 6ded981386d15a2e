"""Train every plan on every cell of a group, as one population with a learning rate for each member.

A plan is fixed beforehand. All plans are the same until CHANGE_AT of the budget, so that whoever chooses one
there has seen the same curve under each. A reactive rule changes the rate by the validation loss; its
two parameters are an arm each. The rate is the cell's own, after a warm-up, and falls to 0 over the last 30 %
of the budget, unless a plan begins that earlier. Every arm spends the same training FLOPs; validations are
charged to nobody. The governor is on, as in every run.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from esper.population.data import MemberData
from esper.simic.ending import BestStates
from esper.simic.environment import EnvironmentSpec, GrowthEnvironment
from esper.simic.rollout import Episode
from esper.tamiyo.controller import Blocks, Controller
from esper.tamiyo.schedule import Schedule
from esper.tamiyo.scripted import Static
from studies.growth.environments import CONFIG
from studies.growth.records import rounded
from studies.headroom.cells import BATCH, VALIDATION, Group

CHANGE_AT = 0.15  # of the budget: where plans part
CURVE = 0.2  # of the budget: what is recorded of the curve
DECAY_AT = 0.7  # the rate falls linearly from here to the end
TWINS = 2  # networks of each cell and arm: other initial weights, other order of the data


@dataclass(frozen=True)
class Plan:
    """What is done without looking."""

    factor: float = 1.0  # of the rate, from CHANGE_AT on
    decay_at: float = DECAY_AT
    growth: str = ""  # a schedule


@dataclass(frozen=True)
class Rule:
    """Change the rate where the validation loss has not fallen by the share `fall` over `window` of budget.

    A rule that halves does so there. One that doubles takes slow progress for a rate that is too small: it
    doubles there, and halves where the loss has risen.
    """

    fall: float
    window: float
    doubles: bool = False

    @property
    def name(self) -> str:
        return f"rule {'double' if self.doubles else 'halve'} {self.fall:g} {self.window:g}"


PLANS = {
    "static": Plan(),
    "rate ×2": Plan(factor=2.0),
    "rate ÷2": Plan(factor=0.5),
    "rate ×4": Plan(factor=4.0),
    "rate ÷4": Plan(factor=0.25),
    "decay at 20 %": Plan(decay_at=0.2),
    "decay at 50 %": Plan(decay_at=0.5),
    "clone": Plan(growth=f"clone@{CHANGE_AT}"),
    "widen": Plan(growth=f"widen_full@{CHANGE_AT}"),
    "widen and clone": Plan(growth=f"widen_full@{CHANGE_AT}+clone@0.2"),
}
STOP = "stop early"  # static with the weights of its best epoch: needs no run of its own
RULES = tuple(
    [Rule(fall, window) for fall in (0.0, 0.02, 0.1) for window in (0.05, 0.15)]
    + [Rule(fall, window, doubles=True) for fall in (0.02, 0.1) for window in (0.05, 0.15)]
)


@dataclass(frozen=True)
class Arms:
    """What is trained on every cell."""

    plans: Mapping[str, Plan] = field(default_factory=lambda: PLANS)
    rules: tuple[Rule, ...] = RULES

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.plans, *(rule.name for rule in self.rules))

    def controllers(self) -> Blocks:
        """A block of members for each arm."""
        growing: dict[str, Controller] = {
            name: Schedule.parse(plan.growth) for name, plan in self.plans.items() if plan.growth
        }
        return Blocks({name: growing.get(name, Static()) for name in self.names})


QUICK_ARMS = Arms(rules=(RULES[1], RULES[-1]))


class Rates:
    """The learning rate of every member, from step to step. Members lie arm by arm."""

    def __init__(self, base: Tensor, epochs: int, arms: Arms) -> None:
        """Begin a run; base [n]: the cells' own rates, the same for each arm."""
        each, plans, device = len(base), list(arms.plans.values()), base.device

        def spread(values: list[float]) -> Tensor:
            return torch.tensor(values, device=device).repeat_interleave(each)

        still = [Plan()] * len(arms.rules)
        self._arms, self._epochs = arms, epochs
        self._base = base.repeat(len(arms.names))
        self._factor = spread([plan.factor for plan in plans + still])
        self._decay_at = spread([plan.decay_at for plan in plans + still])
        self._scale = torch.ones_like(self._base)  # by rules
        self._since = torch.zeros_like(self._base)  # epochs since a rule changed it
        self._losses: list[Tensor] = []

    def at(self, middle: Tensor, spent: Tensor) -> Tensor:
        """Return the rates of an epoch whose middle is at that share of the budget.  # [N] each"""
        fall = ((1.0 - middle) / (1.0 - self._decay_at)).clamp(0.0, 1.0)
        changed = torch.where(spent >= CHANGE_AT - 1e-6, self._factor, 1.0)
        return self._base * self._scale * changed * fall

    def see(self, loss: Tensor, spent: Tensor) -> None:
        """Let the rules look at a validation.  # [N] each"""
        self._losses.append(loss)
        self._since += 1
        each = len(loss) // len(self._arms.names)
        for k, rule in enumerate(self._arms.rules, start=len(self._arms.plans)):
            mine, window = slice(k * each, (k + 1) * each), max(1, round(rule.window * self._epochs))
            if len(self._losses) <= window:
                continue
            fallen = 1.0 - loss[mine] / self._losses[-1 - window][mine]
            # Not `fallen <= fall`: a loss that is NaN has not fallen.
            due = ~(fallen > rule.fall) & (self._since[mine] >= window) & (spent[mine] < DECAY_AT)
            step = torch.where(fallen >= 0, 2.0, 0.5) if rule.doubles else torch.full_like(fallen, 0.5)
            self._scale[mine] = torch.where(due, self._scale[mine] * step, self._scale[mine])
            self._since[mine] = torch.where(due, 0.0, self._since[mine])


def environment_of(group: Group, members: Tensor, device: str) -> GrowthEnvironment:
    """Build the population of a group; members [N]: ids, by which the tasks of the cells are dealt."""
    recipe = {
        "batch_size": BATCH,
        "batches_per_epoch": group.batches,
        "validation_samples": VALIDATION,
        "schedule": "flat",  # whose warm-up is kept; what follows it is set epoch by epoch
        "decay": 0.0,
        "folds": 2,  # widen and clone
        "widest": 2,
    }
    spec = EnvironmentSpec(
        task=group.tasks[0],
        variants=group.tasks,
        members=members,
        device=device,
        seed=group.index,
        gamma=CONFIG.ppo.gamma,
        episode=CONFIG.episode.model_copy(update={"steps": group.epochs}),
        population=CONFIG.population.model_copy(update=recipe),
        reward=CONFIG.reward,
        governor=CONFIG.governor,
        lifecycle=CONFIG.lifecycle,
    )
    return GrowthEnvironment(spec)


def run_group(
    group: Group, device: str, arms: Arms | None = None, twins: int = TWINS
) -> list[dict[str, Any]]:
    """Train all arms of a group; return a record for each cell."""
    began, arms = time.perf_counter(), arms or Arms()
    blocks = arms.controllers()
    # Members lie arm by arm, twin by twin, cell by cell.
    environment = environment_of(group, blocks.members(torch.arange(twins * len(group.cells))), device)
    own = torch.tensor([cell.rate for cell in group.cells], device=environment.device).repeat(twins)
    rates = Rates(own, group.epochs, arms)
    episode, best = Episode(environment, blocks), BestStates(environment)
    curve, flops = [], torch.zeros_like(environment.flops)
    while True:
        spent, cost = environment.flops / environment.budget, _epoch_cost(environment)
        left = ((environment.budget - environment.flops) / cost).round()
        # The nearest whole number of epochs: the environment would always pay for one more.
        environment.bodies.finished.logical_or_(left < 1)
        active = ~environment.bodies.finished
        if not bool(active.any()):
            break
        middle = spent + 0.5 * (1.0 - spent) / left.clamp(min=1.0)
        # In place, because the captured step reads this tensor.
        environment.population.rate_scale.copy_(rates.at(middle.float(), spent.float()))
        result = episode.step()
        flops += torch.where(active, _epoch_cost(environment), 0.0)
        seen = result.observation
        rates.see(seen.val_loss, seen.progress)
        best.update()
        curve.append(torch.stack([seen.progress, result.training.loss, seen.val_loss, seen.val_accuracy]))
        if environment.done:
            break
    final, parameters = score_halves(environment), environment.derived.parameters.cpu()
    best.restore()
    kept = score_halves(environment)
    shape = (len(arms.names), twins, len(group.cells))
    curves = torch.stack(curve).cpu().numpy().reshape(len(curve), 4, *shape)
    spent_all = (flops / environment.budget).cpu().numpy().reshape(shape)
    seconds = (time.perf_counter() - began) / len(group.cells)
    return [
        {
            **group.facts(k),
            "budget_flops": float(environment.budget[0]),
            "host_parameters": environment.host_parameters,
            "seconds": round(seconds, 3),
            "arms": {
                arm: {
                    "final": _pairs(final.reshape(2, *shape)[:, a, :, k]),
                    "best": _pairs(kept.reshape(2, *shape)[:, a, :, k]),
                    "flops": rounded(spent_all[a, :, k]),
                    "parameters": int(parameters.view(shape)[a, 0, k]),
                }
                for a, arm in enumerate(arms.names)
            },
            "curve": _start_of(curves[:, :, 0, :, k]),
        }
        for k in range(len(group.cells))
    ]


def _epoch_cost(environment: GrowthEnvironment) -> Tensor:
    """Training FLOPs of an epoch of each member as it is now.  # [N] float64"""
    return environment.population.relative_cost(environment.slots) * environment.bare_cost


def score_halves(environment: GrowthEnvironment) -> NDArray[np.float64]:
    """Test accuracy of the present networks on each half of the test split.  # [2, N]"""
    population = environment.population
    data = population.member_data([task.test() for task in population.tasks])
    size, found = environment.spec.population.validation_samples, []
    middle = data.num_samples // 2
    for first in (0, middle):
        accuracy = torch.zeros(environment.num_members, dtype=torch.float64, device=environment.device)
        for start in range(first, first + middle, size):
            part = slice(start, min(start + size, first + middle))
            samples = MemberData(data.inputs[:, part], data.targets[:, part], data.task_of)
            measured = population.validate(environment.slots, samples, ablate=False)
            accuracy += measured.accuracy.double() * samples.num_samples / middle
        found.append(accuracy)
    scores: NDArray[np.float64] = torch.stack(found).cpu().numpy()
    return scores


def _pairs(halves: NDArray[np.float64]) -> list[list[float]]:
    """The halves of every twin.  # [2, twins] → [twins][2]"""
    return [rounded(twin, 5) for twin in halves.T]


def _start_of(curves: NDArray[np.float32]) -> dict[str, Any]:
    """What is kept of the curves of a cell, until CURVE of the budget.  # [T, 4, twins]"""
    early = curves[curves[:, 0, 0] <= CURVE + 1e-6]
    names = ("training_loss", "loss", "accuracy")
    return {
        "spent": rounded(early[:, 0, 0]),
        **{name: [rounded(twin) for twin in early[:, 1 + i].T] for i, name in enumerate(names)},
    }
