"""Data in every form: loaders, data sets and tensors, and batches in any container."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import esper
from esper.growing.data import count_samples, make_loaders, map_batch
from esper.growing.settings import check_settings
from tests.growing import models

X, Y = models.table(24)
Pair = namedtuple("Pair", "image label")


@dataclass(frozen=True)
class Record:
    image: Tensor
    label: Tensor
    size: int = field(init=False, default=7, repr=False, compare=False)


@dataclass
class Sample:
    image: Tensor
    label: Tensor


MAKERS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "tuple": lambda x, y: (x, y),
    "list": lambda x, y: [x, y],
    "namedtuple": Pair,
    "dict": lambda x, y: {"label": y, "image": x},
    "dataclass": Sample,
}


def batches(container: str) -> list[Any]:
    return [MAKERS[container](X[k : k + 8], Y[k : k + 8]) for k in range(0, 24, 8)]


def read(container: str, batch: Any) -> tuple[Tensor, Tensor]:
    if container == "dict":
        return batch["image"], batch["label"]
    return (batch.image, batch.label) if container in ("namedtuple", "dataclass") else (batch[0], batch[1])


@cache
def grown_from(container: str, own_step: bool) -> dict[str, Tensor]:
    def step(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        assert isinstance(batch, type(MAKERS[container](X, Y)))
        x, y = read(container, batch)
        outputs = model(x)
        return F.cross_entropy(outputs, y), (outputs.argmax(1) == y).float().mean()

    torch.manual_seed(0)
    settings = {"epochs": 3, "controller": "schedule:mlp@0.1", "step": step if own_step else None}
    data = batches(container)
    return esper.grow(models.small_mlp(), data, data, progress=False, **settings).model.state_dict()


@pytest.mark.parametrize("own_step", [False, True], ids=["by its targets", "by a step"])
@pytest.mark.parametrize("container", [name for name in MAKERS if name != "tuple"])
def test_every_container_gives_what_a_tuple_gives(own_step: bool, container: str) -> None:
    usual, found = grown_from("tuple", own_step), grown_from(container, own_step)
    assert usual.keys() == found.keys()
    assert all(torch.equal(found[name], value) for name, value in usual.items())


@pytest.mark.parametrize(
    "batch",
    [
        (X, Y),
        [X, (Y, {"rest": X})],
        Pair(X, Y),
        OrderedDict(image=X, label=Y),
        Record(X, Y),
        Sample(X, [Y, "a name"]),
        {"both": Pair(X, Record(X, Y))},
    ],
)
def test_tensors_are_moved_and_containers_keep_their_type(batch: Any) -> None:
    def shape(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.dtype
        if isinstance(value, dict):
            return type(value), {key: shape(part) for key, part in value.items()}
        if isinstance(value, tuple | list):
            return type(value), [shape(part) for part in value]
        return (type(value), shape(vars(value))) if hasattr(value, "image") else value

    moved = map_batch(batch, lambda tensor: tensor.to("meta"))
    assert shape(moved) == shape(batch)
    seen: list[str] = []
    map_batch(moved, lambda tensor: seen.append(tensor.device.type) or tensor)
    assert set(seen) == {"meta"}
    assert count_samples(batch) == len(X)


def held_back(given: Any, val: Any = None, **settings: Any) -> torch.Tensor:
    """The inputs that validation sees."""
    return torch.cat([batch[0] for batch in make_loaders(given, val, check_settings(settings))[1]])


@pytest.mark.parametrize(
    "given",
    [
        (X, Y),
        [X.numpy().astype(np.float64), Y.numpy().astype(np.int32)],
        DataLoader(TensorDataset(X, Y), batch_size=7),
        TensorDataset(X, Y),
        [(X[:8], Y[:8]), (X[8:], Y[8:])],
    ],
)
def test_every_form_gives_the_same_tensors(given: Any) -> None:
    batches = list(make_loaders((X, Y), given, check_settings({}))[1])
    inputs, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
    torch.testing.assert_close(inputs, X)
    assert torch.equal(targets, Y)
    assert (inputs.dtype, targets.dtype) == (torch.float32, torch.long)


def test_validation_is_held_back_by_the_seed_and_a_part_of_it_is_drawn() -> None:
    first, again, other = (held_back((X, Y), seed=seed) for seed in (1, 1, 2))
    assert len(first) == 5
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    drawn = held_back((X, Y), (X, Y), validation_samples=10)
    assert len(drawn) == 10
    assert not torch.equal(drawn, X[:10])
