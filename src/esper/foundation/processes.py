"""The processes of torchrun as a `Gather`.

Messages travel between the CPUs, by gloo: there is one in a round, of what the members lived through, so that
it costs little beside the round, and one way serves every machine. Before each message everyone is waited
for, so that a process which ended or hangs is told as a sentence and not as a silence.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from esper.foundation.errors import LostProcessError
from esper.foundation.gather import Alone, Gather
from esper.foundation.launch import Launch

BACKEND = "gloo"
PATIENCE = 1800.0  # seconds, until a run says otherwise


class Processes:
    """All processes that torchrun started, seen from one of them."""

    def __init__(self, launch: Launch, patience: float = PATIENCE) -> None:
        """Meet the others; patience: seconds that each is waited for, in every exchange."""
        self.launch, self.patience = launch, patience
        self.rank, self.size = launch.rank, launch.size
        wait = timedelta(seconds=patience)
        store, rank, size = next(rendezvous("env://", timeout=wait))
        # The store of torchrun outlives a restart, and in it the addresses of processes that are gone.
        store = dist.PrefixStore(f"start-{launch.restarts}", store)  # type: ignore[attr-defined]
        dist.init_process_group(BACKEND, store=store, rank=rank, world_size=size, timeout=wait)

    def exchange(self, message: bytes) -> list[bytes]:
        """The messages of all processes, in the order of ranks; raises LostProcessError where one is gone."""
        try:
            dist.monitored_barrier(timeout=timedelta(seconds=self.patience))
            return self._exchange(message)
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[0]
            raise LostProcessError(
                f"another process ended, or did not come within {self.patience:g} s: look for what it said "
                f"itself, or wait longer with --set patience=SECONDS ({reason})"
            ) from error

    def _exchange(self, message: bytes) -> list[bytes]:
        """Lengths first, then all messages at the length of the longest."""
        lengths = [torch.zeros(1, dtype=torch.long) for _ in range(self.size)]
        dist.all_gather(lengths, torch.tensor([len(message)]))
        longest = int(max(lengths))
        mine = torch.zeros(longest, dtype=torch.uint8)
        mine[: len(message)] = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        told = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(told, mine)
        return [text[: int(length)].numpy().tobytes() for text, length in zip(told, lengths, strict=True)]


@contextmanager
def processes(launch: Launch, patience: float = PATIENCE) -> Iterator[Gather]:
    """The processes of this launch, for as long as they work together."""
    if launch.size == 1:
        yield Alone()
        return
    try:
        yield Processes(launch, patience)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
