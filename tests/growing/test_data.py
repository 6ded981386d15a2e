"""Data come in any usual form, and bad data are told in one sentence."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from esper.foundation.errors import UserError
from esper.growing.data import read_data, read_split
from tests.growing import models

X, Y = models.table(20)
BROKEN = torch.where(torch.arange(100).view(20, 5) == 7, float("nan"), X)


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
    split = read_split("train", given)
    torch.testing.assert_close(split.inputs, X)
    assert torch.equal(split.targets, Y)
    assert (split.inputs.dtype, split.targets.dtype) == (torch.float32, torch.long)


def test_validation_is_held_back_once_by_the_seed() -> None:
    data, again, other = (read_data((X, Y), None, seed) for seed in (1, 1, 2))
    assert (len(data.train), len(data.validation)) == (16, 4)
    assert torch.equal(data.validation.inputs, again.validation.inputs)
    assert not torch.equal(data.validation.inputs, other.validation.inputs)
    rows = {tuple(row.tolist()) for row in torch.cat([data.train.inputs, data.validation.inputs])}
    assert len(rows) == 20


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (
            DataLoader(TensorDataset(X[:0], Y[:0])),
            "train yields nothing; check that its data set is not empty",
        ),
        (DataLoader(TensorDataset(X, Y), batch_size=30, drop_last=True), "train yields nothing.*drop_last"),
        ((BROKEN, Y), "NaN or infinite in 1 of 20 samples; fill in or drop"),
        ((X, Y.float() / 0), "targets that are NaN or infinite"),
        ((X, Y[:5]), "20 inputs and 5 targets; give one target for each"),
        (X, r"one array of shape \[20, 5\] without targets; give a DataLoader"),
        (None, "train is None; give a DataLoader"),
        ([{"x": X, "y": Y}], "yields a dict; each batch must be a pair"),
        ([(X[:3], Y[:3]), (X[:3, :4], Y[:3])], "different shapes"),
        ((X[:1], Y[:1]), "train has 1 samples; at least 2"),
        ((np.array([["a"], ["b"]]), np.array([0, 1])), "give numbers"),
        ((torch.tensor(1.0), torch.tensor(1)), "a single number"),
    ],
)
def test_bad_data_are_told_in_one_sentence(given: Any, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence) as told:
        read_data(given, None)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    ("val", "sentence"),
    [((X[:, :4], Y), "give both the same shape"), ((X, Y.float()), "whole numbers in both")],
)
def test_splits_that_do_not_fit_each_other(val: Any, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        read_data((X, Y), val)


def test_images_of_bytes_stay_bytes() -> None:
    images = torch.randint(0, 256, (20, 1, 4, 4), dtype=torch.uint8)
    for given in ((images, Y), DataLoader(TensorDataset(images, Y), batch_size=6)):
        assert read_split("train", given).inputs.dtype == torch.uint8


def test_a_part_of_the_validation_data_is_drawn_and_not_the_first() -> None:
    labels = torch.arange(20) // 10  # sorted by class
    data = read_data((X, labels), (X, labels), seed=3, validation_samples=10)
    assert len(data.validation) == 10
    assert set(data.validation.targets.tolist()) == {0, 1}


def test_the_loaders_own_batch_size_is_remembered() -> None:
    assert read_data(DataLoader(TensorDataset(X, Y), batch_size=7), None).batch_size == 7
    assert read_data((X, Y), None).batch_size is None
