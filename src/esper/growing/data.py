"""A user's data: loaders, data sets and tensors read batch by batch, and the random generators behind them.

Nothing is read into memory: a loader is read from beginning to end in every epoch, so that its workers, its
shuffling and its augmentation work as ever.
"""

from __future__ import annotations

import copy
import math
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
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

from esper.growing.settings import BATCH_SIZE, GrowSettings
from esper.utils.errors import UserError
from esper.utils.streams import seeded_globals

ALLOWED = "a DataLoader, a Dataset, or a pair (inputs, targets) of tensors or arrays"
VALIDATION_SHARE = 0.2  # of the training data, where no validation data are given
# Seconds in which a loader without a length has to end, read without a model: a stream that goes on for ever
# would otherwise make the first epoch endless without a word.
LONGEST = 4.0


# ---- loaders -------------------------------------------------------------------------------------------


def make_loaders(
    train: Any, val: Any, settings: GrowSettings, dtype: torch.dtype = torch.float32
) -> tuple[Iterable[Any], Iterable[Any]]:
    """Return training and validation data as iterables of batches that can be read many times.

    Loaders stay as they are. Data sets and pairs of tensors or arrays are put into loaders that draw from the
    seed; floating-point values of pairs are converted to `dtype`, that of the model. Without `val` a fifth of
    a data set is held back, and of `val` at most `validation_samples` are drawn.
    Raises a UserError for other data, and for a loader without a length that does not end.
    """
    generator = torch.Generator().manual_seed(settings.seed)
    given = {"train": train, "val": val}
    for name, data in given.items():
        if (data is None and name == "train") or isinstance(data, Tensor | str | Mapping | int | float):
            kind = "None" if data is None else f"a {type(data).__name__}"
            raise UserError(f"{name} is {kind}; give {ALLOWED}")
        if is_pair(data):
            given[name] = TensorDataset(*_read_pair(name, data, dtype))
        if isinstance(given[name], Dataset) and length_of(given[name]) == 0:
            raise UserError(f"{name} has no samples; give at least one")
    train, val = given["train"], given["val"]
    if val is None:
        if not isinstance(train, Dataset) or not isinstance(train, Sized) or len(train) < 2:
            raise UserError("val is missing and train cannot be divided; give a loader for validation as val")
        held = max(1, round(VALIDATION_SHARE * len(train)))
        train, val = random_split(train, [len(train) - held, held], generator)
    most = settings.training.get("validation_samples")
    # Of a stream without a length the first samples are taken when it is read.
    if most is not None and length_of(val) is not None:
        val = _draw_samples(val, most, settings.seed)
    size = settings.training.get("batch_size")
    if size is not None and not isinstance(train, Dataset) and not isinstance(val, Dataset):
        raise UserError(
            f"batch_size is {size}, and the loaders that were given make their own batches; leave "
            "batch_size out, or give a Dataset or tensors"
        )
    loaders = (
        _make_loader("train", train, size or BATCH_SIZE, generator),
        _make_loader("val", val, size or BATCH_SIZE, None),
    )
    _check_end("train", loaders[0], "batches_per_epoch", settings.training.get("batches_per_epoch"))
    _check_end("val", loaders[1], "validation_samples", most)
    return loaders


def _draw_samples(val: Any, most: int, seed: int) -> Any:
    """Return at most so many samples of a data set, drawn by the seed; a loader cannot be divided."""
    if not isinstance(val, Dataset) or not hasattr(val, "__len__"):
        raise UserError(
            f"validation_samples is {most}, and of a {type(val).__name__} no part can be drawn; give a "
            "Dataset or tensors as val, or leave validation_samples out"
        )
    drawn = torch.randperm(len(val), generator=torch.Generator().manual_seed(seed))[:most]
    if isinstance(val, TensorDataset):
        return TensorDataset(*(tensor[drawn] for tensor in val.tensors))
    return Subset(val, drawn.tolist())


def _make_loader(name: str, data: Any, size: int, generator: torch.Generator | None) -> Iterable[Any]:
    """Return a loader of batches, shuffled where a generator is given; a user's loader as it is."""
    if isinstance(data, TensorDataset):  # one indexing of the tensors for a batch, not one for each sample
        order = SequentialSampler(data) if generator is None else RandomSampler(data, generator=generator)
        batches = BatchSampler(order, size, drop_last=False)
        return DataLoader(data, batch_size=None, sampler=batches, generator=generator)
    if isinstance(data, Dataset):
        shuffle = generator is not None and not isinstance(data, IterableDataset)
        return DataLoader(data, size, shuffle=shuffle, generator=generator)
    if not isinstance(data, Iterable):
        raise UserError(f"{name} is a {type(data).__name__}; give {ALLOWED}")
    if iter(data) is data:
        raise UserError(f"{name} is a {type(data).__name__} that is read only once; give a loader or a list")
    return data


def length_of(loader: Any) -> int | None:
    """Return the length of a loader; None where it has none."""
    try:
        return len(loader)
    except TypeError:
        return None


def _check_end(name: str, loader: Iterable[Any], setting: str, most: int | None) -> None:
    """Raise a UserError for a loader that may go on for ever.

    One without a length is read once, without a model, and has to end within LONGEST seconds, unless `most`,
    the value of `setting`, tells how much of it is read.
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


def first_batch(name: str, loader: Iterable[Any]) -> Any:
    """Return the first batch of a loader; raises a UserError where there is none."""
    for batch in loader:
        return batch
    raise UserError(f"{name} yields nothing: its data set is empty, or less than a batch with drop_last")


def no_more_batches(name: str) -> UserError:
    """Return the error for a loader that had batches before and has none now."""
    return UserError(f"{name} had batches before and yields none in this epoch; give one that begins anew")


# ---- pairs of tensors ----------------------------------------------------------------------------------


def is_pair(data: Any) -> bool:
    """Tell whether data are two arrays or tensors."""
    return isinstance(data, tuple | list) and len(data) == 2 and all(hasattr(part, "shape") for part in data)


def _read_pair(name: str, data: Any, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return inputs and targets on the CPU, as int64 or `dtype`; raise a UserError where they are wrong."""
    for part in data:
        if isinstance(part, np.ndarray) and part.dtype.kind not in "fiub":
            raise UserError(f"{name} holds {part.dtype}; give numbers: encode text and categories first")
        if not isinstance(part, Tensor | np.ndarray):
            raise UserError(f"{name} holds a {type(part).__name__}; give {ALLOWED}")
    inputs, targets = (torch.as_tensor(part).detach().to("cpu") for part in data)
    targets = targets if targets.is_floating_point() else targets.long()
    inputs, targets = (x.to(dtype) if x.is_floating_point() else x for x in (inputs, targets))
    if len(inputs) != len(targets):
        raise UserError(f"{name} has {len(inputs)} inputs and {len(targets)} targets; give one for each")
    for what, tensor in (("inputs", inputs), ("targets", targets)):
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            bad = int((~tensor.flatten(1).isfinite().all(1) if tensor.ndim > 1 else ~tensor.isfinite()).sum())
            raise UserError(
                f"{name} has {what} that are NaN or infinite in {bad} of {len(tensor)} samples; fill in "
                "or drop those samples"
            )
    return inputs, targets


# ---- batches of any structure --------------------------------------------------------------------------


def map_batch(batch: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Apply `change` to every tensor in a batch; containers keep their type.

    batch: a tensor, or tensors in tuples, lists, namedtuples, mappings and dataclasses, nested at will.
    Anything else is returned as it is.
    """
    if isinstance(batch, Tensor):
        return change(batch)
    if isinstance(batch, Mapping):
        return type(batch)({key: map_batch(value, change) for key, value in batch.items()})  # type: ignore[call-arg]
    if isinstance(batch, tuple | list):
        values = [map_batch(value, change) for value in batch]
        # A namedtuple takes its fields one by one, where a tuple takes an iterable.
        return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)
    if _is_record(batch):
        changed = copy.copy(batch)
        for own in fields(batch):  # past __init__ and __setattr__: fields may be frozen or computed
            before = getattr(batch, own.name)
            if (after := map_batch(before, change)) is not before:
                object.__setattr__(changed, own.name, after)
        return changed
    return batch


def _is_record(batch: Any) -> bool:
    return is_dataclass(batch) and not isinstance(batch, type)


def _values_of(batch: Any) -> list[Any] | None:
    """List what a tuple, list, namedtuple, mapping or dataclass holds, in order; None for anything else."""
    if isinstance(batch, Mapping):
        return list(batch.values())
    if isinstance(batch, tuple | list):
        return list(batch)
    return [getattr(batch, own.name) for own in fields(batch)] if _is_record(batch) else None


def split_batch(batch: Any) -> tuple[list[Any], Any] | None:
    """Split a tuple, list, namedtuple or dataclass into the model's inputs and the targets, its last value.

    Returns None for a mapping, and for what holds fewer than two values.
    """
    values = None if isinstance(batch, Mapping) else _values_of(batch)
    if values is None or len(values) < 2:
        return None
    *inputs, targets = values
    nested = len(inputs) == 1 and isinstance(inputs[0], tuple | list)
    return (list(inputs[0]) if nested else inputs), targets


def to_device(batch: Any, device: torch.device) -> Any:
    """Move every tensor in a batch to a device."""
    return map_batch(batch, lambda x: x.to(device, non_blocking=True))


def count_samples(batch: Any) -> int:
    """Return the length of the first tensor in a batch."""
    if isinstance(batch, Tensor):
        return len(batch) if batch.ndim else 1
    held = (v for v in _values_of(batch) or () if isinstance(v, Tensor) or _values_of(v) is not None)
    return next((count_samples(value) for value in held), 1)


# ---- random generators ---------------------------------------------------------------------------------


@contextmanager
def seeded_generators(seed: int, device: torch.device) -> Iterator[None]:
    """Seed torch's, NumPy's and Python's global generators; afterwards restore the caller's states."""
    devices = [device] if device.type == "cuda" else []
    with seeded_globals(seed), torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield


class GeneratorStates:
    """The states of the global generators of torch, NumPy and Python, and of those of the loaders."""

    def __init__(self, device: torch.device, loaders: Iterable[Any] = ()):
        self._device = device
        found: list[Any] = []
        for loader in loaders:
            sampler = getattr(loader, "batch_sampler", None)
            holders = (loader, getattr(loader, "sampler", None), sampler, getattr(sampler, "sampler", None))
            found += [getattr(holder, "generator", None) for holder in holders]
        # Each once: a loader and its sampler often share one.
        self._loader_generators = list(dict.fromkeys(g for g in found if isinstance(g, torch.Generator)))

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state of every generator now."""
        _, keys, position, has_gauss, gauss = np.random.get_state()  # noqa: NPY002
        _, words, spare = random.getstate()
        states = {
            "torch": torch.get_rng_state(),
            "numpy.keys": torch.from_numpy(np.asarray(keys, dtype=np.int64)),
            "numpy.rest": torch.tensor([position, has_gauss, gauss], dtype=torch.float64),
            "python.words": torch.tensor(words),
            "python.spare": torch.tensor(math.nan if spare is None else spare, dtype=torch.float64),
        }
        if self._device.type == "cuda":
            states["cuda"] = torch.cuda.get_rng_state(self._device)
        return states | {f"loader.{i}": own.get_state() for i, own in enumerate(self._loader_generators)}

    def load_state_dict(self, states: Mapping[str, Tensor]) -> None:
        """Restore what `state_dict` returned. A generator that it does not name keeps its state."""
        torch.set_rng_state(states["torch"])
        position, has_gauss, gauss = states["numpy.rest"].tolist()
        keys = states["numpy.keys"].numpy().astype(np.uint32)
        np.random.set_state(("MT19937", keys, int(position), int(has_gauss), gauss))  # noqa: NPY002
        spare = float(states["python.spare"])
        words = tuple(states["python.words"].tolist())
        random.setstate((3, words, None if math.isnan(spare) else spare))  # 3: the version of that form
        if "cuda" in states and self._device.type == "cuda":
            torch.cuda.set_rng_state(states["cuda"], self._device)
        for i, own in enumerate(self._loader_generators):
            if f"loader.{i}" in states:
                own.set_state(states[f"loader.{i}"])
