"""Members in shards, and the collectives by which processes exchange their results.

The bits of a run depend on the number of shards, which is a setting, and never on the number of processes;
docs/scaling.md tells how.

How messages travel is an argument: `Gather` is a single process, `Processes` those of torchrun. There
messages travel between CPUs by gloo. All processes are waited for before each collective, so that one that
ended or hangs is an error message and not a silence.
"""

from __future__ import annotations

import io
import re
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from esper.utils.errors import LostProcessError, ReportedElsewhereError, UserError
from esper.utils.launch import Launch

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


Piece = Mapping[str, Tensor]  # the tensors of one shard by name
Result = TypeVar("Result")


class Gather:
    """The collectives of a run, here of a single process. All processes call them in the same order."""

    rank: int = 0  # of this process; the first one reads, writes and prints
    size: int = 1  # the number of processes

    def exchange(self, message: bytes) -> list[bytes]:
        """Return the messages of all processes in the order of their ranks."""
        return [message]


def even_ranges(count: int, parts: int) -> list[range]:
    """Cut range(count) into `parts` ranges of nearly equal length, the longer ones first."""
    each, rest = divmod(count, parts)
    starts = [k * each + min(k, rest) for k in range(parts + 1)]
    return [range(starts[k], starts[k + 1]) for k in range(parts)]


def held_shards(members: int, shards: int, gather: Gather) -> list[range]:
    """Return the positions of the members of each shard that this process holds.

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
    """Gather the tensors of all shards in their order; of several processes they come back on the CPU."""
    if gather.size == 1:
        return list(mine)
    copies = [{name: tensor.detach().cpu().clone() for name, tensor in piece.items()} for piece in mine]
    return [piece for pieces in all_gather_values(gather, copies) for piece in pieces]


def all_gather_values(gather: Gather, value: Any) -> list[Any]:
    """Gather one value of every process: tensors, numbers, text, and lists or dictionaries of these."""
    if gather.size == 1:
        return [value]
    # torch's format keeps dtypes; of it, as of every file, only data are loaded.
    packed = io.BytesIO()
    torch.save(value, packed)
    return [torch.load(io.BytesIO(m), weights_only=True) for m in gather.exchange(packed.getvalue())]


def broadcast(gather: Gather, value: Any) -> Any:
    """Return the value of the first process in all of them; what the others give is ignored."""
    return all_gather_values(gather, value if gather.rank == 0 else None)[0]


def any_process(gather: Gather, flag: bool) -> bool:
    """Return, in all processes, whether the flag is set in any."""
    return any(all_gather_values(gather, flag))


def all_or_none(gather: Gather, work: Callable[[], Result]) -> Result:
    """Return the result of `work`, once it has succeeded in every process.

    Where it raises a ValueError or an OSError in some, all processes raise: the first one UserError with the
    message of the first of them, the others ReportedElsewhereError.
    """
    if gather.size == 1:
        return work()
    problem, result = "", []
    try:
        result.append(work())
    except (ValueError, OSError) as error:
        where = f"process {gather.rank} on {socket.gethostname()}: " if gather.rank else ""
        problem = f"{where}{error}"
    problems = [text for text in all_gather_values(gather, problem) if text]
    if problems:
        raise UserError(problems[0]) if gather.rank == 0 else ReportedElsewhereError(problems[0])
    return result[0]


TIMEOUT = 1800.0  # seconds that the slowest process is waited for
POLL_SECONDS = 0.02  # seconds between two reads of the store


class Processes(Gather):
    """The collectives of the processes that torchrun started."""

    def __init__(self, launch: Launch) -> None:
        """Meet the other processes."""
        self.timeout = TIMEOUT  # seconds that each process is waited for, in every collective
        self.rank, self.size = launch.rank, launch.size
        wait = timedelta(seconds=TIMEOUT)
        try:
            store, rank, size = next(rendezvous("env://", timeout=wait))
            meeting = dist.PrefixStore(agree_on_prefix(store, rank, size, TIMEOUT), store)  # type: ignore[attr-defined]
            dist.init_process_group("gloo", store=meeting, rank=rank, world_size=size, timeout=wait)
        except RuntimeError as error:
            raise LostProcessError(f"the processes did not meet: {_first_line(error)}") from error

    def close(self) -> None:
        """Leave the process group."""
        dist.destroy_process_group()

    def exchange(self, message: bytes) -> list[bytes]:
        """Return the messages of all processes; raise LostProcessError where one is gone."""
        received, begun = [b""] * self.size, time.monotonic()
        try:
            dist.monitored_barrier(timeout=timedelta(seconds=self.timeout))
            dist.all_gather_object(received, message)
        except RuntimeError as error:
            if time.monotonic() - begun < self.timeout:
                what = "another process ended: look for what it said itself"
            else:
                what = f"another process did not come within {self.timeout:g} s: look whether it hangs"
            raise LostProcessError(f"{what} ({_first_line(error)})") from error
        return received


def agree_on_prefix(store: Store, rank: int, size: int, timeout: float) -> str:
    """Return a key prefix that all processes of this start share and no earlier start used.

    The store of torchrun outlives a restart, and with it the addresses of processes that are gone, so that
    every start needs a prefix of its own. No counter of starts is equal on all machines. So each process
    writes a random token; the first one answers the newest token of each process with its own, which is the
    prefix, until all have confirmed it. Raises LostProcessError where one does not come in time.
    """
    own, until = uuid4().hex, time.monotonic() + timeout
    if rank > 0:
        store.set(f"token/{rank}", own)
        while not store.check([f"answer/{own}"]):
            if time.monotonic() > until:
                raise LostProcessError("process 0 did not come in time")
            time.sleep(POLL_SECONDS)
        prefix = store.get(f"answer/{own}").decode()
        store.set(f"confirmed/{prefix}/{rank}", "")
        return prefix
    missing, answered = set(range(1, size)), dict[int, str]()
    while missing:
        if time.monotonic() > until:
            raise LostProcessError(f"process {min(missing)} did not come within {timeout:g} s")
        for other in sorted(missing):
            if store.check([f"confirmed/{own}/{other}"]):
                missing.remove(other)
            elif store.check([f"token/{other}"]):
                # A token may be that of an earlier start: a newer one replaces it and is answered as well.
                token = store.get(f"token/{other}").decode()
                if answered.get(other) != token:
                    store.set(f"answer/{token}", own)
                    answered[other] = token
        time.sleep(POLL_SECONDS)
    return own


def _first_line(error: Exception) -> str:
    """Return the first line of an error of torch, without the place in its sources and its own timeout."""
    line = str(error).strip().splitlines()[0].partition(". ")[0]
    return re.sub(r"^\[[^\]]*\.\w+:\d+\] *| in \d+ ms$", "", line)


@contextmanager
def processes(launch: Launch) -> Iterator[Gather]:
    """Open the collectives of this launch, and close them at the end."""
    if launch.size == 1:
        yield Gather()
        return
    with closing(Processes(launch)) as gather:
        yield gather
