"""Loss and score of a batch and of a whole pass, from the user's functions or from what the targets are."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from esper.growing.data import count_samples, map_batch, split_batch
from esper.growing.settings import GrowSettings
from esper.growing.slots import floating_dtype
from esper.utils.errors import UserError, one_line, raised_at

UserStep = Callable[[nn.Module, Any], tuple[Tensor, Any]]  # (model, batch) → loss, score
TARGETS = ("labels", "label", "targets", "target", "y")  # names of the targets in a dictionary
IGNORED = -100  # a target that counts for nothing, as in torch's own losses


@dataclass(frozen=True)
class BatchResult:
    """Loss and outputs of a model for one batch."""

    loss: Tensor  # [], with its graph
    samples: int
    score: Tensor | None = None  # [] of the whole batch, where outputs are not known
    outputs: Tensor | None = None
    targets: Tensor | None = None


class TargetKind(Enum):
    """What the targets of a batch are."""

    CLASSES = "whole numbers of classes"
    ONE_HOT = "one-hot rows"
    NUMBERS = "numbers"


class Criterion:
    """Computes loss and score of a batch: by the user's step, by the user's functions, or by the targets.

    A batch is (inputs, targets) or (input, input, ..., targets) in a tuple, list, namedtuple or dataclass. A
    dictionary holds the named inputs of a model that computes its own loss or, for a model that takes no
    such names, inputs in their order and one entry of targets (see TARGETS).

    Without a loss of the user's, classes and one-hot rows are trained with cross-entropy and scored by
    accuracy, numbers are trained with the squared error and scored by R². With a loss of the user's, numbers
    need a metric too.
    """

    def __init__(self, settings: GrowSettings, step: UserStep | None = None):
        self.settings, self.step = settings, step
        self.checks = True  # whether values of targets are read and checked
        self.classes = 1  # of the targets that were checked; 1 where there are none
        self.kind: TargetKind | None = None  # None: the model or `step` reads the targets

    @property
    def score_name(self) -> str:
        """What the score is called in reports."""
        if self.step is not None:
            return "score"
        if self.settings.metric is not None:
            return getattr(self.settings.metric, "__name__", "metric")
        if self.kind is None:
            return "e^−loss"
        return "R²" if self.kind is TargetKind.NUMBERS else "accuracy"

    @property
    def remark(self) -> str | None:
        """How decimal targets are trained where the user did not choose it; else None."""
        if self.settings.loss is not None or self.kind in (None, TargetKind.CLASSES):
            return None
        found, trained = "decimals", "the squared error"
        if self.kind is TargetKind.ONE_HOT:
            found, trained = "one-hot rows", "cross-entropy"
        return f"the targets are {found}: trained with {trained} (give loss= for another one)"

    @property
    def is_r_squared(self) -> bool:
        """Whether the score is R², which needs the variance of all validation targets."""
        return self.kind is TargetKind.NUMBERS and self.settings.metric is None

    def __call__(self, model: nn.Module, batch: Any) -> BatchResult:
        """Run the model on a batch; raises a UserError where model, batch and functions do not fit."""
        if self.step is not None:
            loss, score = _check_step_result(self.step(model, batch))
            return BatchResult(loss, count_samples(batch), _to_scalar("the score of step", score))
        pair = _split_dictionary(batch, model) if isinstance(batch, Mapping) else split_batch(batch)
        if pair is None and isinstance(batch, Mapping):
            loss = _model_loss(model(**batch), model)
            return BatchResult(loss, count_samples(batch), torch.exp(-loss.detach().float()))
        if pair is None:
            raise UserError(
                f"a batch is a {type(batch).__name__}; give pairs (inputs, targets), or step=, a function "
                "(model, batch) → loss, score"
            )
        inputs, targets = pair
        outputs = _find_logits(model(*inputs), model)
        # On the first batches alone: to read values of targets is to wait for the device.
        if self.checks and isinstance(targets, Tensor):
            self.kind = find_target_kind(outputs, targets, self.settings.loss is not None)
            if self.is_r_squared and self.settings.loss is not None:
                raise UserError(
                    "loss= is given without metric=, and the targets are no classes; give metric= as well, a "
                    "function (outputs, targets) → one number that rises as the model gets better"
                )
            if self.settings.loss is None:
                self.classes = _count_classes(outputs, targets, self.kind)
                self._check_range(targets)
        loss = self._loss(outputs, targets)
        if not isinstance(loss, Tensor) or loss.ndim:
            raise UserError("the loss gives no single number for a batch; it must return one: take the mean")
        return BatchResult(loss, count_samples(batch), None, outputs.detach(), targets)

    def _loss(self, outputs: Tensor, targets: Any) -> Any:
        if self.settings.loss is None:
            return default_loss(outputs, targets, self.kind or TargetKind.CLASSES)
        try:
            return self.settings.loss(outputs, targets)
        except Exception as error:  # whatever the user's function raises
            given = list(targets.shape) if isinstance(targets, Tensor) else targets
            raise UserError(
                f"loss {_raises(error)} for outputs of shape {list(outputs.shape)} and targets of shape "
                f"{given}; make it a function (outputs, targets) → one number"
            ) from error

    def check(self, model: nn.Module, name: str, batch: Any) -> None:
        """Run the model on the first batch of train or val; raises a UserError for what does not fit."""
        try:
            loss = self(model, batch).loss
        except UserError:
            raise
        except Exception as error:  # whatever the user's model, loss or step raises
            raise UserError(self._explain(model, name, batch, error)) from error
        if not bool(loss.isfinite()):
            raise UserError(
                f"the loss of {type(model).__name__} on the first batch of {name} is {float(loss)} before "
                "any training; look for such values in the batch, in the weights and in the loss"
            )

    def _explain(self, model: nn.Module, name: str, batch: Any, error: Exception) -> str:
        """Return the message for an exception of the user's code, with the line that raised it."""
        kind = type(model).__name__
        if self.step is not None:
            return (
                f"step {_raises(error)} for the first batch of {name}; make it a function (model, batch) → "
                "loss, score that takes such batches"
            )
        given, own = list[Tensor](), floating_dtype(model)
        # Not to change anything, but to list the tensors of a batch of any structure.
        map_batch(batch, lambda x: given.append(x) or x)  # type: ignore[func-returns-value]
        others = {str(x.dtype) for x in given if x.is_floating_point() and x.dtype != own}
        if others and "type" in str(error):  # "must have the same dtype", "expected scalar type", ...
            return (
                f"the batches of {name} hold {' and '.join(sorted(others))} and the weights of {kind} are "
                f"{own}, which do not go together ({one_line(error)}); convert the batches with .to({own}), "
                "or the model"
            )
        if raised_at(error):
            return f"{kind} {_raises(error)} for the first batch of {name}; mend that line, or the batches"
        return (
            f"{kind} does not take the batches of {name} ({one_line(error)}); make the data fit its first "
            "layer, or give step=, a function (model, batch) → loss, score"
        )

    def check_classes(self, loader: Iterable[Any], first: Any) -> None:
        """Raise a UserError for classes without an output, among all targets in memory, else in `first`."""
        data = getattr(loader, "dataset", None)
        pair = split_batch(data.tensors if isinstance(data, TensorDataset) else first)
        if pair is not None and isinstance(pair[1], Tensor):
            self._check_range(pair[1])

    def _check_range(self, targets: Tensor) -> None:
        known, classes = targets[targets != IGNORED], self.classes
        if self.kind is not TargetKind.CLASSES or classes == 1 or not known.numel():
            return
        low, high = int(known.min()), int(known.max())
        if low < 0 or high >= classes:
            raise UserError(
                f"the targets run from {low} to {high}, but the model has {classes} outputs, one for each "
                f"class from 0 to {classes - 1}; "
                + (f"give it {high + 1} outputs, or " if high >= classes else "")
                + f"number the classes from 0, and mark targets that count for nothing with {IGNORED}"
            )

    def score(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the score of some samples; where it is R², their mean squared error.  # → []"""
        if self.settings.metric is not None:
            return _to_scalar("the metric", self.settings.metric(outputs, targets))
        if self.kind is not TargetKind.NUMBERS:
            labels = targets.argmax(-1) if self.kind is TargetKind.ONE_HOT else targets
            axis = _class_axis(outputs, labels)
            assert axis is not None, "the loss was computed along this axis"
            hits = (outputs.argmax(axis) == labels) & (labels != IGNORED)
            return hits.sum() / count_targets(labels).clamp(min=1)
        return default_loss(outputs, targets, TargetKind.NUMBERS).detach().float()


# ---- reading what models and functions return ------------------------------------------------------------


def _raises(error: Exception) -> str:
    return f"raises {type(error).__name__}{raised_at(error)} ({one_line(error)})"


def _check_step_result(result: Any) -> tuple[Tensor, Any]:
    if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[0], Tensor):
        raise UserError(
            f"step gives a {type(result).__name__}; it must return two things: the loss, a tensor, and a "
            "score that rises as the model gets better"
        )
    if result[0].ndim:
        raise UserError(f"step gives a loss of shape {list(result[0].shape)}; take its mean: one number")
    return result


def _to_scalar(what: str, value: Any) -> Tensor:
    """Return a score as a tensor without axes; raises a UserError for anything else.  # → []"""
    try:
        found = torch.as_tensor(value, dtype=torch.float32).detach()
    except (TypeError, ValueError, RuntimeError):
        raise UserError(f"{what} is {value!r}; it must be one number") from None
    if found.numel() != 1:
        raise UserError(f"{what} has the shape {list(found.shape)}; it must be one number: take the mean")
    return found.reshape(())


def _split_dictionary(batch: Mapping[str, Any], model: nn.Module) -> tuple[list[Any], Any] | None:
    """Split a dictionary into inputs and targets, where the model does not take all of its entries by name.

    Returns None where it does, and where no entry, or more than one, has a name of TARGETS.
    """
    try:
        inspect.signature(model.forward).bind(**batch)
        return None
    except TypeError:
        found = [key for key in TARGETS if key in batch]
    if len(found) != 1 or len(batch) < 2:
        return None
    return [value for key, value in batch.items() if key != found[0]], batch[found[0]]


def _model_loss(output: Any, model: nn.Module) -> Tensor:
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    raise UserError(
        f"the batches are dictionaries and {type(model).__name__} gives no loss for them; put labels into "
        "the batch, or give step=, a function (model, batch) → loss, score"
    )


def _find_logits(output: Any, model: nn.Module) -> Tensor:
    """Return the output, its `logits`, or the first tensor in it."""
    found = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", output)
    if found is None and isinstance(output, Mapping):
        found = next((value for value in output.values() if isinstance(value, Tensor)), None)
    if isinstance(found, tuple | list):
        found = next((value for value in found if isinstance(value, Tensor)), None)
    if isinstance(found, Tensor):
        return found
    raise UserError(
        f"{type(model).__name__} gives a {type(output).__name__} in which no tensor is found; give step=, a "
        "function (model, batch) → loss, score"
    )


# ---- targets -------------------------------------------------------------------------------------------


def _class_axis(outputs: Tensor, targets: Tensor) -> int | None:
    """Return the axis of the outputs that holds one number for each class; None where there is none."""
    if outputs.ndim != targets.ndim + 1:
        return None
    if outputs.shape[:-1] == targets.shape:
        return -1
    return 1 if outputs.shape[:1] + outputs.shape[2:] == targets.shape else None


def find_target_kind(outputs: Tensor, targets: Tensor, own_loss: bool) -> TargetKind:
    """Return what targets are, by their type and, for decimals, by their values.

    own_loss: the user's may give whole numbers another meaning, and take 0 and 1 for independent labels.
    """
    if not targets.is_floating_point():
        numbers = own_loss and _class_axis(outputs, targets) is None
        return TargetKind.NUMBERS if numbers else TargetKind.CLASSES
    rows = targets.ndim == 2 and targets.shape == outputs.shape and targets.shape[1] > 1
    if own_loss or not rows:
        return TargetKind.NUMBERS
    one_hot = bool(((targets == 0) | (targets == 1)).all() and (targets.sum(1) == 1).all())
    return TargetKind.ONE_HOT if one_hot else TargetKind.NUMBERS


def default_loss(outputs: Tensor, targets: Tensor, kind: TargetKind) -> Tensor:
    """Return cross-entropy for classes of any shape, −100 left out, and for one-hot rows; else squared error.

    It is computed in float32 where the outputs are in half precision.
    """
    logits = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
    shapes = f"the model gives shape {list(outputs.shape)} and the targets have {list(targets.shape)}"
    if kind is TargetKind.NUMBERS:
        wanted = targets.unsqueeze(-1) if outputs.shape == (*targets.shape, 1) else targets
        if wanted.shape != outputs.shape:
            raise UserError(f"{shapes}; give one output for each target, or loss= of your own")
        return F.mse_loss(logits, wanted.to(logits.dtype))
    if kind is TargetKind.ONE_HOT:
        return F.cross_entropy(logits, targets.to(logits.dtype))
    axis = _class_axis(outputs, targets)
    if axis is None:
        raise UserError(f"{shapes}; give one output for each class, or loss= and metric=, or step=")
    total = F.cross_entropy(logits.movedim(axis, 1), targets.long(), ignore_index=IGNORED, reduction="sum")
    return total / count_targets(targets).clamp(min=1)  # 0 where nothing counts


def count_targets(targets: Tensor) -> Tensor:
    """Count the targets that are not −100; the samples, where the targets are decimals.  # → []"""
    if targets.is_floating_point():
        return torch.tensor(len(targets), device=targets.device)
    return (targets != IGNORED).sum()


def count_tokens(batch: Any, targets: Tensor | None) -> int:
    """Count the tokens that a batch asks a model to predict; 0 where its targets are none.

    targets: of the batch where they are known; else its labels, the token ids of a dictionary, the last of a
    pair, or the tensor that it is. A row of whole numbers for each sample is tokens; a map, as of an image's
    pixels, is not.
    """
    if targets is None and isinstance(batch, Mapping):
        targets = next((batch[key] for key in (*TARGETS, "input_ids") if key in batch), None)
    elif targets is None:
        targets = batch[-1] if isinstance(batch, list | tuple) and batch else batch
    if not isinstance(targets, Tensor) or targets.ndim != 2 or targets.is_floating_point():
        return 0
    return int(count_targets(targets))


def _count_classes(outputs: Tensor, targets: Tensor, kind: TargetKind) -> int:
    """Return the number of classes; 1 for numbers, and where no target counts."""
    if kind is TargetKind.ONE_HOT:
        return outputs.shape[-1]
    axis = _class_axis(outputs, targets) if kind is TargetKind.CLASSES else None
    return 1 if axis is None or not bool((targets != IGNORED).any()) else outputs.shape[axis]


# ---- a pass over validation data -------------------------------------------------------------------------


@dataclass(frozen=True)
class Evaluation:
    """Loss and score of a pass over the validation data."""

    loss: float
    score: float
    blocks: Tensor  # [blocks] scores of parts of the data


class MetricSum:
    """Adds up loss and score over batches, as a whole and by blocks, without waiting for the device."""

    def __init__(self, criterion: Criterion, blocks: int):
        self.criterion, self.blocks = criterion, blocks
        self.samples = self.batches = 0
        self._losses: list[Tensor] = []
        self._weights: list[Tensor] = []  # of each batch in the loss
        self._scores: list[tuple[int, Tensor, Tensor]] = []  # block, weight, score
        self._outputs: list[tuple[Tensor, Tensor]] = []  # with targets, for a metric over all of them
        self._variances: list[tuple[int, Tensor, Tensor]] = []  # of targets: rows, means, squared deviations

    def add(self, result: BatchResult) -> None:
        """Add a batch."""
        settings, outputs, targets = self.criterion.settings, result.outputs, result.targets
        self._losses.append(result.loss.detach().float())
        self._weights.append(_mean_weight(targets, result.samples, settings.loss))
        if outputs is None or targets is None:
            assert result.score is not None, "a batch without outputs has a score"
            self._scores.append((self.batches % self.blocks, self._weights[-1], result.score))
        elif settings.metric is not None:
            self._outputs.append((outputs.cpu(), targets.cpu()))
        else:
            self._score_blocks(outputs, targets, self.samples)
        if self.criterion.is_r_squared and targets is not None:
            values = targets.float()  # columns on the last axis
            values = values.unsqueeze(1) if values.ndim == 1 else values.flatten(0, -2)
            variance, mean = torch.var_mean(values, 0, correction=0)
            self._variances.append((len(values), mean, variance * len(values)))
        self.samples, self.batches = self.samples + result.samples, self.batches + 1

    def _score_blocks(self, outputs: Tensor, targets: Tensor, first: int) -> None:
        """Score samples block by block; sample k, counted from `first`, belongs to block k mod blocks."""
        for k in range(min(self.blocks, len(outputs))):
            part, own = targets[k :: self.blocks], outputs[k :: self.blocks]
            weight = _mean_weight(part, len(part), self.criterion.settings.metric)
            self._scores.append(((first + k) % self.blocks, weight, self.criterion.score(own, part)))

    def result(self) -> Evaluation:
        """Return loss and scores over all batches."""
        pooled = None
        if self._outputs:
            outputs, targets = (torch.cat(parts) for parts in zip(*self._outputs, strict=True))
            pooled = float(self.criterion.score(outputs, targets))
            self._score_blocks(outputs, targets, 0)
        sizes = torch.stack(self._weights).cpu().double()
        loss = float((torch.stack(self._losses).cpu().double() * sizes).sum() / sizes.sum())
        block = torch.tensor([block for block, _, _ in self._scores])
        weight = torch.stack([weight for _, weight, _ in self._scores]).cpu().double()
        scores = torch.stack([score.detach() for _, _, score in self._scores]).cpu().double()
        sums = torch.zeros(self.blocks).double().index_add(0, block, scores * weight)
        weights = torch.zeros(self.blocks).double().index_add(0, block, weight)
        blocks = (sums / weights)[weights > 0]
        total = sums.sum() / weights.sum() if pooled is None else torch.tensor(pooled)
        if self.criterion.is_r_squared:
            blocks, total = self._r_squared(blocks), self._r_squared(total)
        return Evaluation(loss, float(total), blocks.float())

    def _r_squared(self, error: Tensor) -> Tensor:
        """Return R² = 1 − mean squared error / variance of the targets, at least −1.

        The variance is that of all targets about the means of their columns, averaged over the columns.
        """
        counts, means, squares = zip(*self._variances, strict=True)
        count = torch.tensor(counts).double().unsqueeze(1)  # [batches, 1] rows
        mean = torch.stack(means).cpu().double()  # [batches, columns]
        # Between batches: count · (batch mean − mean)². Within them: the squared deviations.
        away = mean - (count * mean).sum(0) / count.sum()
        variance = (torch.stack(squares).cpu().double() + count * away**2).sum(0).mean() / count.sum()
        return (1.0 - error / (float(variance) or 1.0)).clamp(min=-1.0)


def _mean_weight(targets: Tensor | None, samples: int, function: Any) -> Tensor:
    """Return a batch mean's weight: its targets that count, or its samples for a user's function.  # → []"""
    return torch.tensor(samples) if targets is None or function is not None else count_targets(targets)
