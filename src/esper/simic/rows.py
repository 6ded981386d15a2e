"""Choosing between two records, member by member."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

Record = TypeVar("Record")


def fit(where: Tensor, value: Tensor) -> Tensor:
    """A flag per member, shaped to choose rows of `value`.  # where [N], value [N·k, ...] → [N·k, 1, ...]"""
    rows = where.repeat_interleave(value.shape[0] // where.shape[0])
    return rows.view(-1, *[1] * (value.ndim - 1))


def choose(where: Tensor, yes: Record, no: Record) -> Record:
    """The rows of `yes` where True and of `no` elsewhere, in every tensor of a record.  # where [N]"""
    if isinstance(yes, Tensor) and isinstance(no, Tensor):
        return torch.where(fit(where, yes), yes, no)  # type: ignore[return-value]
    if not is_dataclass(yes) or isinstance(yes, type):
        raise TypeError(f"a record is a tensor or a dataclass of records, not {type(yes).__name__}")
    return replace(
        yes, **{f.name: choose(where, getattr(yes, f.name), getattr(no, f.name)) for f in fields(yes)}
    )
