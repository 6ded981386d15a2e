"""What a model is trained for and judged by: a preset for its targets, or the user's own functions."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.func import vmap

from esper.foundation.errors import UserError
from esper.growing.batches import check_range
from esper.growing.data import Data, GivenSplit
from esper.growing.settings import GrowSettings
from esper.population.objectives import Objective, RowFunction, accuracy, cross_entropy, squared_error

BatchFunction = Callable[[Tensor, Tensor], Tensor]  # outputs [B, ...], targets [B, ...] → one number


@dataclass(frozen=True)
class Goal:
    """An objective over rows, and how to speak of it."""

    objective: Objective
    score_name: str
    classes: int  # 1 where a loss at chance is unknown


def choose_goal(data: Data, outputs: Tensor, settings: GrowSettings) -> tuple[Goal, Data]:
    """The goal for these data, and the data with targets in the shape that it needs.

    outputs: what the untrained model gives for the first training samples. A loss and a metric of the
    user's own may take outputs and targets of any shape. With a loss and no metric, the score is the accuracy
    where the targets are classes of the outputs, else the share of the untrained model's loss that is gone.
    Raises a UserError where outputs, targets and objective do not fit each other.
    """
    targets, shape = data.train.targets, tuple(outputs.shape[1:])
    loss = None if settings.loss is None else over_rows(settings.loss)
    metric = None if settings.metric is None else over_rows(settings.metric)
    name = getattr(settings.metric, "__name__", "metric")
    if loss is not None and metric is not None:
        return Goal(Objective(loss, metric, pooled=True), name, 1), data
    if loss is not None and settings.objective is None and not _is_classification(targets, shape):
        return _lowered_loss(loss, outputs, targets[: len(outputs)]), data
    kind = settings.objective or _guess(targets, shape)
    goal, data = _regression(data, shape) if kind == "regression" else _classes(kind, data, shape)
    if loss is not None:
        goal = replace(goal, objective=replace(goal.objective, loss=loss), classes=1)
    if metric is not None:
        goal = replace(goal, objective=Objective(goal.objective.loss, metric, pooled=True), score_name=name)
    return goal, data


def _is_classification(targets: Tensor, output_shape: tuple[int, ...]) -> bool:
    """Whether the targets number the entries of the outputs' last axis."""
    fits = tuple(output_shape[:-1]) == tuple(targets.shape[1:]) and len(output_shape) == targets.ndim
    return fits and not targets.is_floating_point() and 0 <= int(targets.min()) <= int(targets.max())


def _guess(targets: Tensor, output_shape: tuple[int, ...]) -> str:
    if targets.is_floating_point():
        return "regression"
    return "language" if targets.ndim > 1 and len(output_shape) == targets.ndim else "classification"


def _lowered_loss(loss: RowFunction, outputs: Tensor, targets: Tensor) -> Goal:
    """Judge by the user's own loss, against that of the untrained model."""
    first = float(loss(outputs.unsqueeze(0), targets.unsqueeze(0)))
    if not (math.isfinite(first) and first > 0):
        raise UserError(
            f"the loss of the untrained model is {first}, which no score can be made from; give metric=, a "
            "function (outputs, targets) → one number that rises as the model gets better"
        )

    def share_gone(outputs: Tensor, targets: Tensor) -> Tensor:
        """1 − loss / first loss, at least −1.  # [R]"""
        return (1.0 - loss(outputs, targets) / first).clamp(min=-1.0)

    return Goal(Objective(loss, share_gone), "share of the first loss gone", 1)


def _classes(name: str, data: Data, output_shape: tuple[int, ...]) -> tuple[Goal, Data]:
    targets, classes = data.train.targets, output_shape[-1] if output_shape else 0
    if targets.is_floating_point():
        raise UserError(
            f"the targets are {targets.dtype} and the objective is {name}; give class numbers (int64), or "
            "objective='regression'"
        )
    if len(output_shape) != targets.ndim or tuple(output_shape[:-1]) != tuple(targets.shape[1:]):
        raise UserError(
            f"the model gives shape {['batch', *output_shape]} and the targets have "
            f"{['batch', *targets.shape[1:]]}; {name} needs outputs of "
            f"{['batch', *targets.shape[1:], 'classes']}: end the model with one output per class, or give "
            "loss= and metric="
        )
    for split in (data.train, data.validation):
        check_range(split.targets, classes)
    return Goal(Objective(cross_entropy, accuracy), "accuracy", classes), data


def _regression(data: Data, output_shape: tuple[int, ...]) -> tuple[Goal, Data]:
    data = replace(
        data, train=_fitted(data.train, output_shape), validation=_fitted(data.validation, output_shape)
    )
    spread = float(data.train.targets.var(correction=0)) or 1.0

    def explained(outputs: Tensor, targets: Tensor) -> Tensor:
        """R² against the spread of the training targets, 0 where it would be negative.  # [R]"""
        return (1.0 - squared_error(outputs, targets) / spread).clamp(min=0.0)

    return Goal(Objective(squared_error, explained, pooled=True), "R²", 1), data


def _fitted(split: GivenSplit, output_shape: tuple[int, ...]) -> GivenSplit:
    """Targets in the shape of the outputs: [n] is taken as [n, 1] where the model has one output."""
    targets = split.targets.float()
    if tuple(targets.shape[1:]) != output_shape and (*targets.shape[1:], 1) == output_shape:
        targets = targets.unsqueeze(-1)
    if tuple(targets.shape[1:]) != output_shape:
        raise UserError(
            f"the model gives shape {['batch', *output_shape]} and the targets have "
            f"{['batch', *targets.shape[1:]]}; regression needs one output for each target: change the last "
            "layer, or give loss= of your own"
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
                f"{getattr(function, '__name__', 'the loss or metric')} gives shape {list(result.shape[1:])} "
                "for a batch; it must return one number: take the mean"
            )
        return result.float()

    return each
