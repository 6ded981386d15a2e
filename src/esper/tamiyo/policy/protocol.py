"""What the learner asks of a policy, and the records that travel between them.

Observations and masks are frozen dataclasses of tensors that share their leading axes: [N, ...] for one
step, [N, T, ...] for a sequence. A step is a sequence of length 1, so that acting and learning run the
same code.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Protocol, TypeVar

from torch import Tensor, device, nn

Record = TypeVar("Record")


class HasFeatures(Protocol):
    """An observation: a frozen dataclass of tensors of which one is `features`."""

    @property
    def features(self) -> Tensor: ...  # [..., F] float32


def tensors_of(record: Any) -> dict[str, Tensor]:
    """The tensors of a record by dotted name, in the order of its fields."""
    found: dict[str, Tensor] = {}
    for field in fields(record):
        value = getattr(record, field.name)
        if isinstance(value, Tensor):
            found[field.name] = value
        else:
            found |= {f"{field.name}.{name}": tensor for name, tensor in tensors_of(value).items()}
    return found


def map_tensors(function: Callable[[Tensor], Tensor], record: Record) -> Record:
    """The same record with every tensor passed through `function`."""
    if isinstance(record, Tensor):
        return function(record)  # type: ignore[return-value]
    if not is_dataclass(record) or isinstance(record, type):
        raise TypeError(f"a record is a tensor or a dataclass of records, not {type(record).__name__}")
    return replace(record, **{f.name: map_tensors(function, getattr(record, f.name)) for f in fields(record)})


@dataclass(frozen=True)
class PolicyOutput:
    """What a policy says about N rows of T steps with H heads."""

    actions: Tensor  # [N, T, H] int64; 0 where the head is not read
    log_prob: Tensor  # [N, T, H] float32; 0 where the head is not read
    entropy: Tensor  # [N, T, H] in 0..1; 0 where the head is not read
    relevant: Tensor  # [N, T, H] bool: the sampled action reads this head
    forced: Tensor  # [N, T] bool: there was nothing to choose
    fault: Tensor  # [N, T, H] int8: 0 fine, see distribution.Fault
    value: Tensor  # [N, T] float32, in the units that the value head was trained in
    state: Tensor  # [N, state] the memory after the last step


class Policy(nn.Module, ABC):
    """A stochastic policy over H heads with a memory of `state` numbers per row."""

    head_names: tuple[str, ...]
    value_head: nn.Linear  # the last layer of V(s), so that a change of units can be undone in it

    @abstractmethod
    def initial_state(self, num_rows: int, on: device | str = "cpu") -> Tensor:
        """The memory of a fresh episode.  # [N, state]"""

    @abstractmethod
    def sequence(
        self,
        observation: Any,
        masks: Any,
        state: Tensor,
        resets: Tensor,
        actions: Tensor | None = None,
        uniforms: Tensor | None = None,
    ) -> PolicyOutput:
        """Judge the given actions, or sample by the uniforms, or take the likeliest if neither is given.

        resets [N, T]: the memory is cleared before that step. actions, uniforms [N, T, H].
        """

    @abstractmethod
    def value(self, observation: Any, state: Tensor, resets: Tensor) -> Tensor:
        """V(s) alone; it draws nothing and reads no action.  # [N, T]"""
