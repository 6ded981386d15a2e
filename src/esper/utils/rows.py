"""Dataclasses of tensors with one row for each member: select, combine, flatten to named tensors and back.

A field may be None, which is a part that a record lacks: it stays None and has no name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, Self, TypeVar

import torch
from torch import Tensor

Record = TypeVar("Record")


class RowRecord:
    """Base of frozen dataclasses of tensors that share their first axis, the members."""

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors by field name; nested records give dotted names."""
        return tensors_of(self)

    def replace(self, **changes: Tensor) -> Self:
        """Return the record with some fields replaced."""
        return replace(self, **changes)  # type: ignore[type-var]

    def to(self, device: torch.device | str) -> Self:
        """Return the record on another device."""
        return map_tensors(lambda tensor: tensor.to(device), self)

    def __getitem__(self, members: Any) -> Self:
        """Select members by index, slice, index tensor or mask; the first axis stays."""
        if isinstance(members, int):
            members = [members]
        return map_tensors(lambda tensor: tensor[members], self)


def flags_of_rows(where: Tensor, value: Tensor) -> Tensor:
    """Shape a flag per member, or per slot, to select rows of `value`.

    where [N] or [N, S], value [N·k, ...] → [N·k, 1, ...] or [N·k, S, 1, ...]
    """
    # Some tensors have k consecutive rows for each member.
    each = value.shape[0] // where.shape[0]
    rows = where if each == 1 else where.repeat_interleave(each, 0)
    return rows.view(*rows.shape, *[1] * (value.ndim - rows.ndim))


def where_rows(where: Tensor, yes: Record, no: Record) -> Record:
    """Take the rows of `yes` where True and of `no` elsewhere, in every tensor.  # where [N] or [N, S]"""
    own, other = tensors_of(yes), tensors_of(no)
    alike: dict[object, list[str]] = {}  # tensors of one kind, which a few launches choose together
    for name in (name for name in own if own[name] is not other[name]):
        alike.setdefault((own[name].dtype, own[name].shape), []).append(name)
    for names in alike.values():
        pair = (torch.stack([part[name] for name in names]) for part in (own, other))
        own |= zip(names, torch.where(flags_of_rows(where, own[names[0]]), *pair), strict=True)
    return refill(yes, own)


def tensors_of(record: Any) -> dict[str, Tensor]:
    """Return the tensors of a record by dotted name, in the order of its fields."""
    found: dict[str, Tensor] = {}
    for field in fields(record):
        value = getattr(record, field.name)
        if isinstance(value, Tensor):
            found[field.name] = value
        elif value is not None:
            found |= {f"{field.name}.{name}": tensor for name, tensor in tensors_of(value).items()}
    return found


def map_tensors(function: Callable[..., Tensor], record: Record, *others: Record) -> Record:
    """Return the record with every tensor passed through `function`, with those of the same name in others.

    Raises TypeError for a field that is neither a tensor, nor a dataclass of such fields, nor None.
    """
    if record is None:
        return record
    if isinstance(record, Tensor):
        return function(record, *others)  # type: ignore[return-value]
    if not is_dataclass(record) or isinstance(record, type):
        raise TypeError(f"a record is a tensor or a dataclass of records, not {type(record).__name__}")
    changes = {
        f.name: map_tensors(function, getattr(record, f.name), *[getattr(other, f.name) for other in others])
        for f in fields(record)
    }
    return replace(record, **changes)


def put_rows(record: Any, index: Tensor, part: Any) -> None:
    """Write the rows of `part` into every tensor of a record of the same kind, in place.  # index [n]"""
    for value, rows in zip(tensors_of(record).values(), tensors_of(part).values(), strict=True):
        value.index_copy_(0, index, rows)


def add_prefix(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copy tensors to names with a prefix, as a checkpoint holds them."""
    return {f"{prefix}.{name}": value.detach().clone() for name, value in tensors.items()}


def strip_prefix(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors under a prefix, without it: the inverse of `add_prefix`."""
    start = f"{prefix}."
    return {name.removeprefix(start): value for name, value in tensors.items() if name.startswith(start)}


def to_cpu(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copy tensors to the CPU, in one transfer for each dtype."""
    found: dict[str, Tensor] = {}
    # A transfer waits for the device; one for each dtype instead of one for each tensor.
    for kind in {tensor.dtype for tensor in tensors.values()}:
        alike = {name: tensor for name, tensor in tensors.items() if tensor.dtype == kind}
        sent = torch.cat([tensor.flatten() for tensor in alike.values()]).cpu()
        parts = sent.split([tensor.numel() for tensor in alike.values()])
        found |= {name: part.view(alike[name].shape) for name, part in zip(alike, parts, strict=True)}
    return {name: found[name] for name in tensors}


def stack_steps(rows: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Stack the tensors of all steps by name; return {} where there are no steps."""
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]} if rows else {}


def unstack_steps(steps: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """Invert `stack_steps`."""
    count = len(next(iter(steps.values()), ()))
    return [{name: value[t] for name, value in steps.items()} for t in range(count)]


def refill(record: Record, tensors: Mapping[str, Tensor]) -> Record:
    """Return a record like this one with the tensors of the given dotted names."""
    names = iter(tensors_of(record))  # in the order in which `map_tensors` meets them
    return map_tensors(lambda own: tensors[next(names)].to(own.device), record)


def check_like(
    own: Mapping[str, Tensor],
    given: Mapping[str, Tensor],
    what: str,
    advice: str = "restore into the same members, host, slots and config",
) -> None:
    """Raise ValueError for tensors whose names, shapes or dtypes differ, before anything is overwritten."""
    missing, unknown = sorted(set(own) - set(given)), sorted(set(given) - set(own))
    if missing or unknown:
        raise ValueError(f"{what} lacks {missing or 'nothing'} and has unknown {unknown or 'nothing'}")
    for name, tensor in own.items():
        other = given[name]
        if other.shape != tensor.shape or other.dtype != tensor.dtype:
            raise ValueError(
                f"{name} of {what} is {other.dtype} {tuple(other.shape)}; expected {tensor.dtype} "
                f"{tuple(tensor.shape)}: {advice}"
            )
