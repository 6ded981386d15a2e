"""What a model is trained for and judged by: a preset for its targets, or the user's own functions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.func import vmap

from esper.foundation.errors import UserError
from esper.growing.data import Data, GivenSplit
from esper.population.objectives import Objective, RowFunction, accuracy, cross_entropy, squared_error

BatchFunction = Callable[[Tensor, Tensor], Tensor]  # outputs [B, ...], targets [B, ...] → one number
GOALS = ("classification", "regression", "language")


@dataclass(frozen=True)
class Goal:
    """An objective over rows, and how to speak of it."""

    name: str
    objective: Objective
    score_name: str
    classes: int  # 1 where a loss at chance is unknown


def choose_goal(
    data: Data,
    output_shape: tuple[int, ...],
    name: str | None,
    loss: BatchFunction | None,
    metric: BatchFunction | None,
) -> tuple[Goal, Data]:
    """The goal for these data and outputs, and the data with targets in the shape that it needs."""
    name = name or _guess(data.train.targets, output_shape)
    if name not in GOALS:
        raise UserError(f"objective is {name!r}; allowed are {', '.join(GOALS)}")
    goal, data = (
        _regression(data, output_shape) if name == "regression" else _classes(name, data, output_shape)
    )
    objective = goal.objective
    if loss is not None:
        objective, goal = replace(objective, loss=over_rows(loss)), replace(goal, classes=1)
    if metric is not None:
        objective = replace(objective, score=over_rows(metric))
        goal = replace(goal, score_name=getattr(metric, "__name__", "metric"))
    return replace(goal, objective=objective), data


def _guess(targets: Tensor, output_shape: tuple[int, ...]) -> str:
    if targets.is_floating_point():
        return "regression"
    return "language" if targets.ndim > 1 and len(output_shape) == targets.ndim else "classification"


def _classes(name: str, data: Data, output_shape: tuple[int, ...]) -> tuple[Goal, Data]:
    targets, classes = data.train.targets, output_shape[-1] if output_shape else 0
    if targets.is_floating_point():
        raise UserError(
            f"the targets are {targets.dtype} and the objective is {name}; give class numbers (int64), or "
            "objective='regression'"
        )
    if len(output_shape) != targets.ndim or tuple(output_shape[:-1]) != tuple(targets.shape[1:]):
        need = [*targets.shape[1:], "classes"]
        raise UserError(
            f"the model gives shape [batch, {', '.join(map(str, output_shape))}] and the targets have "
            f"[batch{''.join(f', {s}' for s in targets.shape[1:])}]; {name} needs outputs of "
            f"[batch, {', '.join(map(str, need))}]: end the model with one output per class"
        )
    for split in (data.train, data.validation):
        low, high = int(split.targets.min()), int(split.targets.max())
        if low < 0 or high >= classes:
            raise UserError(
                f"the targets run from {low} to {high}, but the model has {classes} outputs, one for each "
                "class "
                f"from 0 to {classes - 1}; give it {high + 1} outputs, or number the classes from 0"
            )
    return Goal(name, Objective(cross_entropy, accuracy), "accuracy", classes), data


def _regression(data: Data, output_shape: tuple[int, ...]) -> tuple[Goal, Data]:
    data = Data(*(_fitted(split, output_shape) for split in (data.train, data.validation)))
    spread = float(data.train.targets.var(correction=0)) or 1.0

    def explained(outputs: Tensor, targets: Tensor) -> Tensor:
        """R² against the spread of the training targets, 0 where it would be negative.  # [R]"""
        return (1.0 - squared_error(outputs, targets) / spread).clamp(min=0.0)

    return Goal("regression", Objective(squared_error, explained), "R²", 1), data


def _fitted(split: GivenSplit, output_shape: tuple[int, ...]) -> GivenSplit:
    """Targets in the shape of the outputs: [n] is taken as [n, 1] where the model has one output."""
    targets = split.targets.float()
    if tuple(targets.shape[1:]) != output_shape and (*targets.shape[1:], 1) == output_shape:
        targets = targets.unsqueeze(-1)
    if tuple(targets.shape[1:]) != output_shape:
        raise UserError(
            f"the model gives shape [batch, {', '.join(map(str, output_shape))}] and the targets have "
            f"{['batch', *targets.shape[1:]]}; regression needs one output for each target: change the "
            "last layer"
        )
    return GivenSplit(split.inputs, targets)


def over_rows(function: BatchFunction) -> RowFunction:
    """A user's function of one batch, for rows of batches: under vmap where it can be, else one by one."""

    def each(outputs: Tensor, targets: Tensor) -> Tensor:
        try:
            result = vmap(function)(outputs, targets)
        except (RuntimeError, ValueError, TypeError):
            pairs = zip(outputs, targets, strict=True)
            result = torch.stack([torch.as_tensor(function(o, t), device=outputs.device) for o, t in pairs])
        if result.shape != outputs.shape[:1]:
            raise UserError(
                f"{getattr(function, '__name__', 'the loss or metric')} gives shape "
                f"{list(result.shape[1:])} for "
                "a batch; it must return one number: take the mean"
            )
        return result.float()

    return each
