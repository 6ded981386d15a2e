"""Small constant tables that live on each device once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, wraps
from typing import Concatenate, ParamSpec

import torch
from torch import Tensor
from torch.nn.functional import embedding

P = ParamSpec("P")


def device_table(build: Callable[P, Tensor]) -> Callable[Concatenate[torch.device, P], Tensor]:
    """Turn `build(*key) -> CPU tensor` into `table(device, *key)`, built once per device and key.

    The copy does not wait for the device, and the table is an ordinary tensor even when the first call
    comes from inside inference mode, so that a later backward pass may keep it.
    """

    @lru_cache(maxsize=None, typed=True)  # typed: members of two IntEnums may be equal
    @wraps(build)
    def table(device: torch.device, *args: P.args, **kwargs: P.kwargs) -> Tensor:
        with torch.inference_mode(False):
            return build(*args, **kwargs).to(device, non_blocking=True)

    return table  # type: ignore[return-value]


def lookup(values: Sequence[float] | Sequence[Sequence[float]]) -> Callable[[Tensor], Tensor]:
    """A function from any tensor of positions to the values, or the rows, there, on that tensor's device."""

    @device_table
    def table() -> Tensor:
        return torch.tensor(values)

    def look_up(index: Tensor) -> Tensor:
        found = table(index.device)
        return found.take(index) if found.ndim == 1 else embedding(index, found)

    return look_up
