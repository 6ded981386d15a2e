"""Data come in any usual form, and bad data are told in one sentence."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from esper.growing.data import make_loaders
from esper.growing.settings import check_settings
from esper.utils.errors import UserError
from tests.growing import models

X, Y = models.table(20)
BROKEN = torch.where(torch.arange(100).view(20, 5) == 7, float("nan"), X)


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
    assert len(first) == 4
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    drawn = held_back((X, Y), (X, Y), validation_samples=10)
    assert len(drawn) == 10
    assert not torch.equal(drawn, X[:10])


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ((BROKEN, Y), "NaN or infinite in 1 of 20 samples; fill in or drop"),
        ((X, Y.float() / 0), "targets that are NaN or infinite"),
        ((X, Y[:5]), "20 inputs and 5 targets; give one target for each"),
        (X, "train is a Tensor; give a DataLoader"),
        (None, "train is None; give a DataLoader"),
        ((X[:1], Y[:1]), "train has 1 samples; at least 2"),
        ((np.array([["a"], ["b"]]), np.array([0, 1])), "give numbers"),
        ((torch.tensor(1.0), torch.tensor(1)), "a single number"),
        ((np.float64(1.0), np.float64(1.0)), "train holds a float64; give a DataLoader"),
    ],
)
def test_bad_data_are_told_in_one_sentence(given: Any, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence) as told:
        make_loaders(given, None, check_settings({}))
    assert "\n" not in str(told.value)


def test_images_of_bytes_stay_bytes() -> None:
    images = torch.randint(0, 256, (20, 1, 4, 4), dtype=torch.uint8)
    assert held_back((images, Y)).dtype == torch.uint8
