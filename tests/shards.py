"""Processes that are played by threads: one of them runs at a time, and each waits where it exchanges."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from esper.utils.gather import Gather

Result = TypeVar("Result")


class _Meeting:
    """Where the threads of one run leave their messages. Whoever does not wait has the lock."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.turn = threading.Condition()
        self.messages: dict[int, bytes] = {}
        self.rounds: list[list[bytes]] = []  # of finished exchanges


class PlayedProcess(Gather):
    """One of several processes in a thread."""

    def __init__(self, rank: int, meeting: _Meeting) -> None:
        self.rank, self.size, self.timeout = rank, meeting.size, 60.0
        self._meeting, self._round = meeting, 0

    def exchange(self, message: bytes) -> list[bytes]:
        meeting = self._meeting
        meeting.messages[self.rank] = message
        if len(meeting.messages) == self.size:
            meeting.rounds.append([meeting.messages[rank] for rank in range(self.size)])
            meeting.messages = {}
            meeting.turn.notify_all()
        done = meeting.turn.wait_for(lambda: len(meeting.rounds) > self._round, timeout=self.timeout)
        assert done, f"process {self.rank} waited for the others in vain"
        self._round += 1
        return meeting.rounds[self._round - 1]


def on_processes(size: int, work: Callable[[Gather], Result]) -> list[Result]:
    """What `work` gives in each of `size` processes."""
    meeting = _Meeting(size)

    def run(rank: int) -> Result:
        with meeting.turn:  # torch's random state is that of the whole process
            return work(PlayedProcess(rank, meeting))

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))
