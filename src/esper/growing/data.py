"""A user's data as two splits of tensors: from loaders, data sets, tensors or NumPy arrays."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from esper.foundation.errors import UserError
from esper.tasks.task import HostSpec, Split, Task, TestSplit

ALLOWED = "a DataLoader, a Dataset, or a pair (inputs, targets) of tensors or arrays"
VALIDATION_SHARE = 0.2  # of the training data, where no validation data are given
LEAST_SAMPLES = 2
_READING_BATCH = 256


class GivenSplit(Split):
    """A split whose targets may be numbers."""

    def __post_init__(self) -> None:
        """Everything was checked where it was read."""


class GivenTask(Task):
    """A task around a user's own data; the test split stays with the user."""

    def __post_init__(self) -> None:
        """Everything was checked where it was read."""


@dataclass(frozen=True)
class Data:
    """What there is to learn from."""

    train: GivenSplit
    validation: GivenSplit
    batch_size: int | None = None  # of the loader that held the training data

    @property
    def sample(self) -> Tensor:
        """A few inputs.  # [2..8, *input_shape]"""
        return self.train.inputs[:8]

    def as_task(self, topology: str, num_classes: int) -> Task:
        """The data as a task; the validation data stand in for a test split, which nobody reads."""
        return GivenTask(
            name="given",
            topology=topology,
            input_shape=tuple(self.train.inputs.shape[1:]),
            num_classes=num_classes,
            train=self.train,
            validation=self.validation,
            held_out=TestSplit(self.validation),
            host=HostSpec("given"),
        )


def read_data(train: Any, val: Any, seed: int = 0, validation_samples: int | None = None) -> Data:
    """Both splits; without `val`, a fifth of the training data, drawn by the seed, is held back for it.

    validation_samples: at most this many samples for validation, drawn by the seed; all if left out.
    """
    training = read_split("train", train)
    if val is None:
        count = max(1, round(VALIDATION_SHARE * len(training)))
        if len(training) - count < LEAST_SAMPLES:
            raise UserError(
                f"train has {len(training)} samples, too few to hold some back; give val, or at least "
                f"{LEAST_SAMPLES + 1} samples"
            )
        drawn, kept = _shuffled(len(training), seed).tensor_split([count])
        training, held = training.subset(kept), training.subset(drawn)
    else:
        held = read_split("val", val)
        _check_alike(training, held)
    if validation_samples is not None and validation_samples < len(held):
        held = held.subset(_shuffled(len(held), seed)[:validation_samples])
    return Data(training, held, train.batch_size if isinstance(train, DataLoader) else None)


def _shuffled(count: int, seed: int) -> Tensor:
    """The numbers 0 to count − 1 in an order that belongs to the seed.  # [count]"""
    return torch.from_numpy(np.random.default_rng(seed).permutation(count))


def _check_alike(training: GivenSplit, validation: GivenSplit) -> None:
    if training.inputs.shape[1:] != validation.inputs.shape[1:]:
        raise UserError(
            f"train has inputs of shape {list(training.inputs.shape[1:])} and val of "
            f"{list(validation.inputs.shape[1:])}; give both the same shape"
        )
    if training.targets.dtype != validation.targets.dtype:
        raise UserError(
            f"train has targets of type {training.targets.dtype} and val of {validation.targets.dtype}; give "
            "whole numbers in both (classes) or decimals in both (regression)"
        )


def read_split(name: str, data: Any, dtype: torch.dtype = torch.float32) -> GivenSplit:
    """Everything that `data` holds, as tensors, or one sentence about what is wrong with it.

    dtype: of decimals, inputs and targets alike.
    """
    inputs, targets = (x.to(dtype) if x.is_floating_point() else x for x in _tensors(name, data))
    if len(inputs) != len(targets):
        raise UserError(
            f"{name} has {len(inputs)} inputs and {len(targets)} targets; give one target for each input"
        )
    least = LEAST_SAMPLES if name == "train" else 1
    if len(inputs) < least:
        raise UserError(f"{name} has {len(inputs)} samples; at least {least} are needed: give more data")
    for what, tensor in (("inputs", inputs), ("targets", targets)):
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            bad = int((~tensor.flatten(1).isfinite().all(1) if tensor.ndim > 1 else ~tensor.isfinite()).sum())
            raise UserError(
                f"{name} has {what} that are NaN or infinite in {bad} of {len(tensor)} samples; fill in "
                "or drop those samples"
            )
    return GivenSplit(inputs, targets)


def _tensors(name: str, data: Any) -> tuple[Tensor, Tensor]:
    if isinstance(data, Dataset):
        data = DataLoader(data, batch_size=_READING_BATCH)
    if isinstance(data, tuple | list) and len(data) == 2 and all(_is_array(part) for part in data):
        return _tensor(name, data[0]), _as_targets(_tensor(name, data[1]))
    if data is None or _is_array(data) or not isinstance(data, Iterable):
        raise UserError(f"{name} is {_described(data)}; give {ALLOWED}")
    return _read_batches(name, data)


def _read_batches(name: str, loader: Iterable[Any]) -> tuple[Tensor, Tensor]:
    """A loader is read once, from beginning to end."""
    inputs, targets = [], []
    for batch in loader:
        if not isinstance(batch, tuple | list) or len(batch) != 2 or not all(map(_is_array, batch)):
            raise UserError(
                f"{name} yields {_described(batch)}; each batch must be a pair (inputs, targets) of tensors"
            )
        inputs.append(_tensor(name, batch[0]))
        targets.append(_tensor(name, batch[1]))
    if not inputs:
        raise UserError(
            f"{name} yields nothing; check that its data set is not empty and that its batch_size with "
            "drop_last is not larger than the data set"
        )
    shapes = {tuple(part.shape[1:]) for part in inputs}
    if len(shapes) > 1:
        raise UserError(
            f"{name} yields inputs of different shapes {sorted(map(list, shapes))}; pad or crop them to "
            "one shape"
        )
    return torch.cat(inputs), _as_targets(torch.cat(targets))


def _is_array(data: Any) -> bool:
    return isinstance(data, Tensor | np.ndarray)


def _tensor(name: str, data: Any) -> Tensor:
    """On the CPU, in the type that it has."""
    if isinstance(data, np.ndarray) and data.dtype.kind not in "fiub":
        raise UserError(f"{name} holds {data.dtype} values; give numbers: encode text and categories first")
    tensor = torch.as_tensor(data).detach().to("cpu")
    if tensor.ndim == 0:
        raise UserError(f"{name} holds a single number; the first axis must be the samples")
    return tensor


def _as_targets(targets: Tensor) -> Tensor:
    """Classes as int64, decimals as they are."""
    return targets if targets.is_floating_point() else targets.long()


def _described(data: Any) -> str:
    if _is_array(data):
        return f"one array of shape {list(data.shape)} without targets"
    return "None" if data is None else f"a {type(data).__name__}"
