"""Members in shards, and the collectives by which processes exchange their results.

The members of a run are dealt to a fixed number of shards, in ranges of their ids. A shard is computed by
itself, in the same tensors whoever computes it, and a process holds a range of shards. So the bits of a run
depend on the number of shards, which is a setting, and never on the number of processes: whatever is decided
for all members is decided from all shards, in their order, by every process alike.

How messages travel is an argument: `Alone` for one process, `Processes` for those of torchrun. There messages
travel between CPUs by gloo, and tensors between GPUs by NCCL where every process has a GPU of its own. All
processes are waited for before each collective, so that one that ended or hangs is an error message and not
a silence.
"""

from __future__ import annotations

import io
import re
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol, TypeVar
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from esper.utils.errors import LostProcessError, ToldElsewhereError, UserError
from esper.utils.launch import Launch

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


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


BETWEEN_CPUS, BETWEEN_GPUS = "gloo", "nccl"
PATIENCE = 1800.0  # seconds, until a run says otherwise
GLANCE = 0.02  # seconds between two looks at the store


class Processes:
    """All processes that torchrun started, seen from one of them."""

    def __init__(self, launch: Launch, patience: float = PATIENCE) -> None:
        """Meet the others; patience: seconds that each is waited for, in every exchange."""
        self.launch, self.patience = launch, patience
        self.rank, self.size = launch.rank, launch.size
        self._between_gpus: dist.ProcessGroup | None = None
        self.backend = ""  # of tensors between GPUs, once it is known
        wait = timedelta(seconds=patience)
        try:
            store, rank, size = next(rendezvous("env://", timeout=wait))
            meeting = dist.PrefixStore(agree_on_name(store, rank, size, patience), store)  # type: ignore[attr-defined]
            dist.init_process_group(BETWEEN_CPUS, store=meeting, rank=rank, world_size=size, timeout=wait)
        except RuntimeError as error:
            raise LostProcessError(f"the processes did not meet: {_first_line(error)}") from error

    def close(self) -> None:
        """Part from the others."""
        dist.destroy_process_group()

    def exchange(self, message: bytes) -> list[bytes]:
        """The messages of all processes, in the order of ranks; raises LostProcessError where one is gone."""
        received = [b""] * self.size
        with self._everyone():
            dist.all_gather_object(received, message)
        return received

    def share(self, tensor: Tensor) -> list[Tensor]:
        """The tensors of all processes, in the order of ranks; raises LostProcessError where one is gone."""
        if tensor.is_cuda and not self.backend:
            self._find_way(tensor.device)
        with self._everyone():
            given = tensor.contiguous() if self._between_gpus else tensor.detach().cpu().contiguous()
            received = [torch.empty_like(given) for _ in range(self.size)]
            dist.all_gather(received, given, group=self._between_gpus)
            return [each.to(tensor.device) for each in received]

    def _find_way(self, device: torch.device) -> None:
        """Agree on how tensors of GPUs travel."""
        self.backend = backend_between(exchange_values(self, gpu_of(device)))
        if self.backend == BETWEEN_GPUS:
            self._between_gpus = dist.new_group(
                backend=BETWEEN_GPUS, timeout=timedelta(seconds=self.patience)
            )

    @contextmanager
    def _everyone(self) -> Iterator[None]:
        """Wait for all processes; whatever then fails between them is LostProcessError."""
        begun = time.monotonic()
        try:
            dist.monitored_barrier(timeout=timedelta(seconds=self.patience))
            yield
        except RuntimeError as error:
            if time.monotonic() - begun < self.patience:
                what = "another process ended: look for what it said itself"
            else:
                what = (
                    f"another process did not come within {self.patience:g} s: look whether it hangs, or "
                    "wait longer with --set patience=SECONDS"
                )
            raise LostProcessError(f"{what} ({_first_line(error)})") from error


def gpu_of(device: torch.device) -> str:
    """A name that no other GPU has, on any machine; empty for a CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def backend_between(gpus: Sequence[str]) -> str:
    """How tensors travel between processes on these GPUs: NCCL needs one of its own for each of them."""
    apart = all(gpus) and len(set(gpus)) == len(gpus)
    return BETWEEN_GPUS if apart and dist.is_nccl_available() else BETWEEN_CPUS


def agree_on_name(store: Store, rank: int, size: int, patience: float) -> str:
    """A name that all processes of this start have and no earlier one had; LostProcessError without it.

    The store of torchrun outlives a restart, and in it the addresses of processes that are gone, so that a
    start needs a place of its own there. Nothing counts starts alike on all machines. So each process leaves
    a word that was never used; the first one answers the newest word of each process with the name, until
    all have confirmed it.
    """
    word, until = uuid4().hex, time.monotonic() + patience
    if rank > 0:
        store.set(f"word/{rank}", word)
        name = _told(store, f"answer/{word}", until)
        store.set(f"confirmed/{name}/{rank}", "")
        return name
    unmet, heard = set(range(1, size)), dict[int, str]()
    while unmet:
        if time.monotonic() > until:
            raise LostProcessError(f"process {min(unmet)} did not come within {patience:g} s")
        for other in sorted(unmet):
            if store.check([f"confirmed/{word}/{other}"]):
                unmet.remove(other)
            elif store.check([f"word/{other}"]):
                said = store.get(f"word/{other}").decode()
                if heard.get(other) != said:
                    store.set(f"answer/{said}", word)
                    heard[other] = said
        time.sleep(GLANCE)
    return word


def _told(store: Store, key: str, until: float) -> str:
    """The value of a key, once there is one."""
    while not store.check([key]):
        if time.monotonic() > until:
            raise LostProcessError("process 0 did not come in time")
        time.sleep(GLANCE)
    return store.get(key).decode()


def _first_line(error: Exception) -> str:
    """What torch says first, without where in its own sources, and how long it would have waited."""
    line = str(error).strip().splitlines()[0].partition(". ")[0]
    return re.sub(r"^\[[^\]]*\.\w+:\d+\] *| in \d+ ms$", "", line)


@contextmanager
def processes(launch: Launch) -> Iterator[Gather]:
    """The processes of this launch, for as long as they work together."""
    if launch.size == 1:
        yield Alone()
        return
    with closing(Processes(launch)) as gather:
        yield gather
