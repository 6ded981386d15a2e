"""Members in shards, and processes that tell each other what became of theirs.

The members of a run are dealt to a fixed number of shards, in ranges of their ids. A shard is computed by
itself, in the same tensors whoever computes it, and a process holds a range of shards. So the bits of a run
depend on the number of shards, which is a setting, and never on the number of processes: whatever is decided
for all members is decided from all shards, in their order, by every process alike.

How messages travel is an argument: `Alone` for one process, `Processes` for those of torchrun.
"""

from __future__ import annotations

import io
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from esper.utils.errors import ToldElsewhereError, UserError

Piece = Mapping[str, Tensor]  # what one shard has to tell, by name
Result = TypeVar("Result")


class Gather(Protocol):
    """How the processes of a run talk. All of them call these in the same order."""

    patience: float  # seconds that the slowest is waited for

    @property
    def rank(self) -> int:
        """The number of this process, from 0; the first one writes, shows and serves."""

    @property
    def size(self) -> int:
        """How many processes there are."""

    def exchange(self, message: bytes) -> list[bytes]:
        """The messages of all processes in the order of their ranks, once each has given its own."""

    def share(self, tensor: Tensor) -> list[Tensor]:
        """The tensors of all processes in the order of their ranks, each on the device that this one is on.

        All have the same shape and type.
        """


@dataclass
class Alone:
    """One process that has nobody to talk to."""

    rank: int = 0
    size: int = 1
    patience: float = 0.0

    def exchange(self, message: bytes) -> list[bytes]:
        """The message itself."""
        return [message]

    def share(self, tensor: Tensor) -> list[Tensor]:
        """The tensor itself."""
        return [tensor]


def even_ranges(count: int, parts: int) -> list[range]:
    """`count` things in `parts` ranges of nearly equal length, the longer ones first."""
    each, rest = divmod(count, parts)
    starts = [k * each + min(k, rest) for k in range(parts + 1)]
    return [range(starts[k], starts[k + 1]) for k in range(parts)]


def held_shards(members: int, shards: int, gather: Gather) -> list[range]:
    """The members, as positions, of each shard that this process holds.

    Raises UserError where a shard would have no member, or a process no shard.
    """
    if members < shards:
        raise UserError(
            f"members is {members} and shards is {shards}; a shard needs at least one member: give fewer "
            "shards (or processes), or more members"
        )
    if shards < gather.size:
        raise UserError(
            f"shards is {shards} and there are {gather.size} processes; give at least as many shards as "
            f"processes (--set shards={gather.size}, which a run that has begun cannot change), or fewer "
            "processes"
        )
    mine = even_ranges(shards, gather.size)[gather.rank]
    return [even_ranges(members, shards)[shard] for shard in mine]


def gather_pieces(gather: Gather, mine: Sequence[Piece]) -> list[Piece]:
    """What every shard has to tell, in the order of the shards, from what those of this process have.

    With several processes everything comes back on the CPU.
    """
    if gather.size == 1:
        return list(mine)
    copies = [{name: tensor.detach().cpu().clone() for name, tensor in piece.items()} for piece in mine]
    return [piece for pieces in exchange_values(gather, copies) for piece in pieces]


def gather_rows(gather: Gather, mine: Tensor, count: int) -> Tensor:
    """`count` rows of one length, that each process has some of, by `even_ranges`.  # [n, K] → [count, K]"""
    if gather.size == 1:
        return mine
    held = even_ranges(count, gather.size)
    padded = mine.new_zeros(len(held[0]), *mine.shape[1:])
    padded[: len(mine)] = mine
    return torch.cat([rows[: len(h)] for rows, h in zip(gather.share(padded), held, strict=True)])


def exchange_values(gather: Gather, value: Any) -> list[Any]:
    """One value of every process, in the order of ranks: tensors, numbers, text, and lists of these."""
    if gather.size == 1:
        return [value]
    packed = io.BytesIO()
    torch.save(value, packed)
    return [
        torch.load(io.BytesIO(message), weights_only=True) for message in gather.exchange(packed.getvalue())
    ]


def from_first(gather: Gather, value: Any) -> Any:
    """The value of the first process, in all of them; what the others give is not looked at."""
    return exchange_values(gather, value if gather.rank == 0 else None)[0]


def any_process(gather: Gather, flag: bool) -> bool:
    """Whether the flag is up in any process; all get the same answer."""
    return any(exchange_values(gather, flag))


def all_or_none(gather: Gather, work: Callable[[], Result]) -> Result:
    """What `work` gives here, once it has succeeded in every process.

    Where it raises a ValueError or an OSError in some, all of them end alike: the first process raises
    UserError with what the first of them said, the others raise ToldElsewhereError.
    """
    if gather.size == 1:
        return work()
    problem, result = "", []
    try:
        result.append(work())
    except (ValueError, OSError) as error:
        where = f"process {gather.rank} on {socket.gethostname()}: " if gather.rank else ""
        problem = f"{where}{error}"
    problems = [text for text in exchange_values(gather, problem) if text]
    if problems:
        raise UserError(problems[0]) if gather.rank == 0 else ToldElsewhereError(problems[0])
    return result[0]
