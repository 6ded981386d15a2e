"""A user's own loaders, one batch after another, and what a model makes of a batch: a loss and a score.

Nothing is read into memory: a loader is read from beginning to end in every epoch, so that its workers, its
shuffling and its augmentation do what they always do.
"""

from __future__ import annotations

import copy
import inspect
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    random_split,
)

from esper.growing.data import ALLOWED, VALIDATION_SHARE, is_pair, read_pair
from esper.growing.settings import BATCH_SIZE, GrowSettings
from esper.utils.errors import UserError

UserStep = Callable[[nn.Module, Any], tuple[Tensor, Any]]  # (model, batch) → loss, score
TARGETS = ("labels", "label", "targets", "target", "y")  # what the targets in a dictionary may be called
LONGEST = 4.0  # seconds in which a loader without a length has to end, read without a model
LOSS_RAISED = "raised by loss,"  # how a note on an exception begins
IGNORED = -100  # a target that counts for nothing, as in torch's own losses


def loaders_of(
    train: Any, val: Any, settings: GrowSettings, dtype: torch.dtype = torch.float32
) -> tuple[Iterable[Any], Iterable[Any]]:
    """Both as something that can be read again and again.

    dtype: of the model. Decimals in pairs of tensors or arrays are converted to it; what a loader or a data
    set yields is left as it is.
    Loaders stay as they are; data sets, and pairs of tensors or arrays, are put into loaders that draw from
    the seed. Without `val` a fifth of a data set is held back, and of `val` at most `validation_samples` are
    drawn; a loader cannot be divided, and of one without a length the first ones are read.
    """
    draw = torch.Generator().manual_seed(settings.seed)
    for name, data in (("train", train), ("val", val)):
        if (data is None and name == "train") or isinstance(data, Tensor | str | Mapping):
            said = "None" if data is None else f"a {type(data).__name__}"
            raise UserError(f"{name} is {said}; give {ALLOWED}")
    train, val = _dataset("train", train, dtype), None if val is None else _dataset("val", val, dtype)
    if val is None:
        if not isinstance(train, Dataset) or not isinstance(train, Sized) or len(train) < 2:
            raise UserError("val is missing and train cannot be divided; give a loader for validation as val")
        held = max(1, round(VALIDATION_SHARE * len(train)))
        train, val = random_split(train, [len(train) - held, held], draw)
    most = settings.training.get("validation_samples")
    if most is not None and length_of(val) is not None:
        val = _part_of(val, most, settings.seed)
    size, val_size = (settings.training.get(key) for key in ("batch_size", "validation_batch"))
    own = [isinstance(data, Dataset) for data in (train, val)]  # whether batches are made here
    for key, used in (("batch_size", own[0] or (own[1] and not val_size)), ("validation_batch", own[1])):
        if key in settings.training and not used:
            raise UserError(
                f"{key} is {settings.training[key]}, and the loaders that were given make their own batches; "
                f"leave {key} out, or give a Dataset or tensors"
            )
    return (
        _loader("train", train, size or BATCH_SIZE, draw),
        _loader("val", val, val_size or size or BATCH_SIZE, None),
    )


def _part_of(val: Any, most: int, seed: int) -> Any:
    """At most so many samples of a data set, drawn by the seed; a loader cannot be divided."""
    if not isinstance(val, Dataset) or not hasattr(val, "__len__"):
        raise UserError(
            f"validation_samples is {most}, and of a {type(val).__name__} no part can be drawn; give a "
            "Dataset or tensors as val, or leave validation_samples out"
        )
    drawn = torch.randperm(len(val), generator=torch.Generator().manual_seed(seed))[:most]
    if isinstance(val, TensorDataset):
        return TensorDataset(*(tensor[drawn] for tensor in val.tensors))
    return Subset(val, drawn.tolist())


def _dataset(name: str, data: Any, dtype: torch.dtype) -> Any:
    """Pairs of tensors or arrays as a data set; anything else as it is."""
    return TensorDataset(*read_pair(name, data, dtype)) if is_pair(data) else data


def _loader(name: str, data: Any, size: int, draw: torch.Generator | None) -> Iterable[Any]:
    if isinstance(data, TensorDataset):  # a batch is one look at the tensors, not one for each sample
        order = SequentialSampler(data) if draw is None else RandomSampler(data, generator=draw)
        batches = BatchSampler(order, size, drop_last=False)
        return DataLoader(data, batch_size=None, sampler=batches, generator=draw)
    if isinstance(data, Dataset):
        shuffle = draw is not None and not isinstance(data, IterableDataset)
        return DataLoader(data, size, shuffle=shuffle, generator=draw)
    if not isinstance(data, Iterable):
        raise UserError(f"{name} is a {type(data).__name__}; give {ALLOWED}")
    if iter(data) is data:
        raise UserError(
            f"{name} is a {type(data).__name__} that is read only once; give a loader or a list of batches"
        )
    return data


def first_batch(name: str, loader: Iterable[Any]) -> Any:
    """A batch to look at, or one sentence where there is none."""
    for batch in loader:
        return batch
    raise UserError(
        f"{name} yields nothing; check that its data set is not empty and that its batch_size with drop_last "
        "is not larger than the data set"
    )


def one_pass(name: str, loader: Iterable[Any], most: int | None = None) -> Iterator[Any]:
    """Yield the batches of one pass over a loader: `most` of them, or all.

    A loader that goes on beyond its own length is cut there, with a warning. The length of a stream is an
    estimate (every worker may end with a part of a batch), and is not held against it.
    """
    if most is not None:
        yield from islice(loader, most)
        return
    length = None if isinstance(getattr(loader, "dataset", None), IterableDataset) else length_of(loader)
    for count, batch in enumerate(loader):
        if count == length:
            warnings.warn(
                f"{name} has a length of {length} and yields more batches; a pass ends at its length",
                stacklevel=2,
            )
            return
        yield batch


def length_of(loader: Any) -> int | None:
    """Return the length of a loader; None where it has none."""
    try:
        return len(loader)
    except TypeError:
        return None


def check_end(name: str, loader: Iterable[Any], setting: str, most: int | None) -> None:
    """Raise a UserError for a loader that may go on for ever.

    One without a length is read once, without a model, and has to end within LONGEST seconds, unless `most`,
    the value of `setting`, says how much of it is read.
    """
    if most is not None or length_of(loader) is not None:
        return
    start = time.monotonic()
    for count, _ in enumerate(loader, 1):
        if time.monotonic() - start > LONGEST:
            raise UserError(
                f"{name} is a {type(loader).__name__} without a length that had not ended after {count:,} "
                f"batches and {LONGEST:g} seconds; say with {setting} how many of them are read each "
                "time, or give a loader with a length"
            )


def ran_dry(name: str) -> UserError:
    """What to tell of a loader that had batches before and has none now."""
    return UserError(
        f"{name} had batches before and yields none in this epoch; give a loader that begins anew whenever "
        "it is read, or a list of batches"
    )


def over_tensors(batch: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Apply `change` to every tensor in a batch; containers keep their type.

    batch: a tensor, or tensors in tuples, lists, namedtuples, mappings and dataclasses, nested as one likes.
    Anything else is returned as it is.
    """
    if isinstance(batch, Tensor):
        return change(batch)
    if isinstance(batch, Mapping):
        return type(batch)({key: over_tensors(value, change) for key, value in batch.items()})  # type: ignore[call-arg]
    if isinstance(batch, tuple | list):
        values = [over_tensors(value, change) for value in batch]
        # A namedtuple takes its fields one by one, where a tuple takes an iterable.
        return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)
    if is_record(batch):
        changed = copy.copy(batch)
        for own in fields(batch):  # past __init__ and __setattr__: fields may be frozen or computed
            before = getattr(batch, own.name)
            if (after := over_tensors(before, change)) is not before:
                object.__setattr__(changed, own.name, after)
        return changed
    return batch


def is_record(batch: Any) -> bool:
    """Tell whether a batch is an instance of a dataclass."""
    return is_dataclass(batch) and not isinstance(batch, type)


def values_of(batch: Any) -> list[Any] | None:
    """List what a tuple, list, namedtuple, mapping or dataclass holds, in order; None for anything else."""
    if isinstance(batch, Mapping):
        return list(batch.values())
    if isinstance(batch, tuple | list):
        return list(batch)
    return [getattr(batch, own.name) for own in fields(batch)] if is_record(batch) else None


def inputs_and_targets(batch: Any) -> tuple[list[Any], Any] | None:
    """Split a tuple, list, namedtuple or dataclass into the model's inputs and the targets, its last value.

    Returns None for a mapping, and for what holds fewer than two values.
    """
    values = None if isinstance(batch, Mapping) else values_of(batch)
    if values is None or len(values) < 2:
        return None
    *inputs, targets = values
    nested = len(inputs) == 1 and isinstance(inputs[0], tuple | list)
    return (list(inputs[0]) if nested else inputs), targets


def to_device(batch: Any, device: torch.device) -> Any:
    """The batch with every tensor in it on the device."""
    return over_tensors(batch, lambda x: x.to(device, non_blocking=True))


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """The context in which a model runs on a device in a precision, float32 or bfloat16."""
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bfloat16")


def samples_in(batch: Any) -> int:
    """Return the length of the first tensor in a batch."""
    if isinstance(batch, Tensor):
        return len(batch) if batch.ndim else 1
    held = (v for v in values_of(batch) or () if isinstance(v, Tensor) or values_of(v) is not None)
    return next((samples_in(value) for value in held), 1)


@dataclass(frozen=True)
class Judged:
    """What a model made of one batch."""

    loss: Tensor  # [], with its graph
    samples: int
    score: Tensor | None = None  # [] of the whole batch, where parts of it cannot be scored
    outputs: Tensor | None = None
    targets: Tensor | None = None


class TargetKind(Enum):
    """What the targets of a batch are."""

    CLASSES = "whole numbers of classes"
    ONE_HOT = "rows of class probabilities, such as one-hot rows"
    NUMBERS = "numbers"


@dataclass
class Judge:
    """From a batch to a loss and a score: by the user's step, by the user's functions, or by the targets.

    A batch is (inputs, targets) or (input, input, ..., targets) in a tuple, list, namedtuple or dataclass. A
    dictionary holds the named inputs of a model that computes its own loss or, for a model that takes no
    such names, inputs in their order and one entry of targets (see TARGETS).

    Without a loss of the user's, classes and one-hot rows are trained with cross-entropy and scored by
    accuracy, numbers are trained with the squared error and scored by R². With a loss and no metric, numbers
    are scored by the share of the first loss that is gone.
    """

    settings: GrowSettings
    step: UserStep | None = None
    first_loss: float | None = field(default=None, init=False)
    checks: bool = field(default=True, init=False)  # whether values of targets are read and checked
    classes: int = field(default=1, init=False)  # of the targets that were checked; 1 where there are none
    kind: TargetKind | None = field(default=None, init=False)  # None: the model or `step` reads the targets

    @property
    def score_name(self) -> str:
        """How to speak of the score."""
        if self.step is not None:
            return "score"
        if self.settings.metric is not None:
            return getattr(self.settings.metric, "__name__", "metric")
        if self.kind is None:
            return "e^−loss"
        if self.kind is TargetKind.NUMBERS:
            return "R²" if self.settings.loss is None else "share of the first loss gone"
        return "accuracy"

    @property
    def remark(self) -> str | None:
        """What decimal targets were taken for, where the user did not say it; else None."""
        chosen = self.settings.loss is not None or self.settings.objective is not None
        if chosen or self.kind in (None, TargetKind.CLASSES):
            return None
        if self.kind is TargetKind.ONE_HOT:
            return (
                "the targets are one-hot rows: trained with cross-entropy (objective='regression' trains "
                "with the squared error)"
            )
        return "the targets are decimals: trained with the squared error (give loss= for another one)"

    @property
    def r_squared(self) -> bool:
        """Whether the score is R², which needs the variance of all validation targets."""
        functions = (self.step, self.settings.metric, self.settings.loss)
        return self.kind is TargetKind.NUMBERS and all(function is None for function in functions)

    @property
    def pooled(self) -> bool:
        """Whether a score needs the outputs for all of the validation data at once."""
        return self.step is None and self.settings.metric is not None

    def __call__(self, model: nn.Module, batch: Any) -> Judged:
        """Run the model on a batch; raises a UserError where model, batch and functions do not fit."""
        if self.step is not None:
            loss, score = _two(self.step(model, batch))
            return Judged(loss, samples_in(batch), _one_number("the score of step", score))
        pair = _named_targets(batch, model) if isinstance(batch, Mapping) else inputs_and_targets(batch)
        if pair is None and isinstance(batch, Mapping):
            loss = _own_loss(model(**batch), model)
            return Judged(loss, samples_in(batch), torch.exp(-loss.detach().float()))
        if pair is None:
            raise UserError(
                f"a batch is a {type(batch).__name__}; give pairs (inputs, targets), or step=, a function "
                "(model, batch) → loss, score"
            )
        inputs, targets = pair
        outputs = logits_of(model(*inputs), model)
        if self.checks and isinstance(targets, Tensor):
            self.kind = kind_of_targets(outputs, targets, self.settings)
            if self.settings.loss is None:
                self.classes = check_targets(outputs, targets, self.kind)
        loss = self._loss(outputs, targets)
        if not isinstance(loss, Tensor) or loss.ndim:
            raise UserError("the loss gives no single number for a batch; it must return one: take the mean")
        return Judged(loss, samples_in(batch), None, outputs.detach(), targets)

    def _loss(self, outputs: Tensor, targets: Any) -> Any:
        if self.settings.loss is None:
            return default_loss(outputs, targets, self.kind or TargetKind.CLASSES)
        try:
            return self.settings.loss(outputs, targets)
        except Exception as error:
            shapes = (
                list(value.shape) if isinstance(value, Tensor) else value for value in (outputs, targets)
            )
            error.add_note("{} for outputs of shape {} and targets of shape {}".format(LOSS_RAISED, *shapes))
            raise

    def check_classes(self, loader: Iterable[Any], first: Any) -> None:
        """Raises a UserError for classes that the model has no output for: among all targets where they lie
        in memory, else among those of the first batch."""
        data = getattr(loader, "dataset", None)
        pair = inputs_and_targets(data.tensors if isinstance(data, TensorDataset) else first)
        counted = self.classes > 1 and self.kind is TargetKind.CLASSES
        if counted and pair is not None and isinstance(pair[1], Tensor):
            check_range(pair[1][pair[1] != IGNORED], self.classes)

    def score(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The score of some samples, one number; where it is R², their mean squared error."""
        if self.settings.metric is not None:
            return _one_number("the metric", self.settings.metric(outputs, targets))
        if self.kind is not TargetKind.NUMBERS:
            one_hot = self.kind is TargetKind.ONE_HOT
            return share_found(outputs, targets.argmax(-1) if one_hot else targets)
        value: Tensor = self._loss(outputs, targets).detach().float()
        if self.r_squared:
            return value
        if self.first_loss is None:
            self.first_loss = float(value)
        if not self.first_loss > 0:
            raise UserError(
                f"the loss of the untrained model is {self.first_loss}, which no score can be made from; "
                "give metric=, a function (outputs, targets) → one number that rises as the model gets better"
            )
        return (1.0 - value / self.first_loss).clamp(min=-1.0)


def _two(result: Any) -> tuple[Tensor, Any]:
    if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[0], Tensor):
        raise UserError(
            f"step gives a {type(result).__name__}; it must return two things: the loss, a tensor, and a "
            "score that rises as the model gets better"
        )
    if result[0].ndim:
        raise UserError(f"step gives a loss of shape {list(result[0].shape)}; take its mean: one number")
    return result


def _one_number(what: str, value: Any) -> Tensor:
    """A score as a tensor without axes; raises a UserError for anything else.  # → []"""
    try:
        found = torch.as_tensor(value, dtype=torch.float32).detach()
    except (TypeError, ValueError, RuntimeError):
        raise UserError(f"{what} is {value!r}; it must be one number") from None
    if found.numel() != 1:
        raise UserError(f"{what} has the shape {list(found.shape)}; it must be one number: take the mean")
    return found.reshape(())


def _named_targets(batch: Mapping[str, Any], model: nn.Module) -> tuple[list[Any], Any] | None:
    """Split a dictionary into inputs and targets, where the model does not take all of its entries by name.

    Returns None where it does, and where no entry, or more than one, is called like targets.
    """
    try:
        inspect.signature(model.forward).bind(**batch)
        return None
    except TypeError:
        found = [key for key in TARGETS if key in batch]
    if len(found) != 1 or len(batch) < 2:
        return None
    return [value for key, value in batch.items() if key != found[0]], batch[found[0]]


def _own_loss(output: Any, model: nn.Module) -> Tensor:
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    raise UserError(
        f"the batches are dictionaries and {type(model).__name__} gives no loss for them; put labels into "
        "the batch, or give step=, a function (model, batch) → loss, score"
    )


def logits_of(output: Any, model: nn.Module) -> Tensor:
    """The tensor to judge by: the output, its `logits`, or the first tensor in it."""
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


def class_axis(outputs: Tensor, targets: Tensor) -> int | None:
    """The axis of the outputs that holds one number for each class; None where there is none."""
    if outputs.ndim != targets.ndim + 1:
        return None
    if outputs.shape[:-1] == targets.shape:
        return -1
    return 1 if outputs.shape[:1] + outputs.shape[2:] == targets.shape else None


def kind_of_targets(outputs: Tensor, targets: Tensor, settings: GrowSettings) -> TargetKind:
    """What targets are: by the objective, else by their type and, for decimals, by their values.

    Raises a UserError for decimals that are to be classes and are no row of probabilities for each sample.
    """
    objective, own_loss = settings.objective, settings.loss is not None
    if objective == "regression":
        return TargetKind.NUMBERS
    if not targets.is_floating_point():  # a loss of the user's may read whole numbers in its own way
        numbers = own_loss and class_axis(outputs, targets) is None
        return TargetKind.NUMBERS if numbers else TargetKind.CLASSES
    rows = targets.ndim == 2 and targets.shape == outputs.shape and targets.shape[1] > 1
    if objective is not None and not rows and not own_loss:
        raise UserError(
            f"objective is {objective!r} and the targets are {targets.dtype} of shape {list(targets.shape)}; "
            "give class numbers (int64), or a row with a probability for each class"
        )
    if objective is None and not own_loss:
        rows = rows and bool(((targets == 0) | (targets == 1)).all() and (targets.sum(1) == 1).all())
    elif objective is None:
        rows = False  # the loss may ask several yes-or-no questions of a row
    return TargetKind.ONE_HOT if rows else TargetKind.NUMBERS


def default_loss(outputs: Tensor, targets: Tensor, kind: TargetKind) -> Tensor:
    """Cross-entropy for classes of any shape, −100 left out, and for one-hot rows; squared error for numbers.

    It is computed in float32 where the outputs are in half precision.
    """
    logits = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
    if kind is TargetKind.NUMBERS:
        wanted = targets.unsqueeze(-1) if outputs.shape == (*targets.shape, 1) else targets
        if wanted.shape != outputs.shape:
            raise UserError(
                f"the model gives shape {list(outputs.shape)} and the targets have {list(targets.shape)}; "
                "give one output for each target, or loss= of your own"
            )
        return F.mse_loss(logits, wanted.to(logits.dtype))
    if kind is TargetKind.ONE_HOT:
        return F.cross_entropy(logits, targets.to(logits.dtype))
    axis = class_axis(outputs, targets)
    if axis is None:
        raise UserError(
            f"the model gives shape {list(outputs.shape)} and the targets have {list(targets.shape)}; end "
            "the model with one output for each class, or give loss= and metric=, or step="
        )
    total = F.cross_entropy(logits.movedim(axis, 1), targets.long(), ignore_index=IGNORED, reduction="sum")
    return total / count_targets(targets).clamp(min=1)  # 0 where nothing counts


def count_targets(targets: Tensor) -> Tensor:
    """How many targets are not −100; how many samples there are, where the targets are decimals.  # → []"""
    if targets.is_floating_point():
        return torch.tensor(len(targets), device=targets.device)
    return (targets != IGNORED).sum()


def check_targets(outputs: Tensor, targets: Tensor, kind: TargetKind) -> int:
    """How many classes the model has, 1 for numbers; classes that it has no output for are refused."""
    if kind is TargetKind.ONE_HOT:
        return outputs.shape[-1]
    axis = class_axis(outputs, targets) if kind is TargetKind.CLASSES else None
    known = targets[targets != IGNORED]
    if axis is None or not known.numel():
        return 1
    check_range(known, outputs.shape[axis])
    return outputs.shape[axis]


def check_range(targets: Tensor, classes: int) -> None:
    """Raise a UserError for targets that are no classes of a model with so many outputs."""
    low, high = (int(targets.min()), int(targets.max())) if targets.numel() else (0, 0)
    if low < 0 or high >= classes:
        raise UserError(
            f"the targets run from {low} to {high}, but the model has {classes} outputs, one for each class "
            f"from 0 to {classes - 1}; give it {high + 1} outputs, or number the classes from 0"
        )


def share_found(outputs: Tensor, targets: Tensor) -> Tensor:
    """The share of targets that are found, −100 left out."""
    axis = class_axis(outputs, targets)
    assert axis is not None
    known = targets != IGNORED
    return ((outputs.argmax(axis) == targets) & known).sum() / count_targets(targets).clamp(min=1)
