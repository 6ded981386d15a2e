"""The processes of torchrun as a `Gather`.

Messages travel between the CPUs, by gloo: there is one in a round, of what the members lived through, so that
it costs little beside the round, and one way serves every machine. Tensors that are shared travel between the
GPUs, by NCCL, where every process has one of its own, and by gloo elsewhere. Before each of these everyone is
waited for, so that a process which ended or hangs is received as a sentence and not as a silence.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from esper.utils.errors import LostProcessError
from esper.utils.gather import Alone, Gather, exchange_values
from esper.utils.launch import Launch

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

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
