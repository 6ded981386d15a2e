"""How a process was started (alone or by torchrun) and how signals stop it. Needs no torch."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, Self


@dataclass(frozen=True)
class Launch:
    """The environment variables of torchrun; the defaults are those of a single process."""

    rank: int = 0  # among all processes
    size: int = 1
    local_rank: int = 0  # among those of this machine
    restarts: int = 0  # how often torchrun has started everything again
    may_restart: int = 0  # how often it would

    @staticmethod
    def of() -> Launch:
        """Read the environment variables."""
        names = {
            "rank": "RANK",
            "size": "WORLD_SIZE",
            "local_rank": "LOCAL_RANK",
            "restarts": "TORCHELASTIC_RESTART_COUNT",
            "may_restart": "TORCHELASTIC_MAX_RESTARTS",
        }
        return Launch(**{key: int(os.environ[name]) for key, name in names.items() if name in os.environ})

    def __str__(self) -> str:
        return f"process {self.rank} of {self.size} on {socket.gethostname()}"


@contextmanager
def interruptible() -> Iterator[None]:
    """Let SIGINT raise KeyboardInterrupt in a block, so that what was opened is closed in order."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # `esper` starts with the default action of SIGINT, so that Ctrl-C during imports shows no traceback.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class StopRequest:
    """While it is entered, SIGINT and SIGTERM, or the given signals, set `signal` and do not end the process.

    `notify` is called at once with the first one, from inside the handler: it must be quick and must not
    write through a buffered stream. The second one raises KeyboardInterrupt.
    """

    def __init__(
        self,
        notify: Callable[[], object] | None = None,
        signals: Sequence[signal.Signals] = (signal.SIGINT, signal.SIGTERM),
    ) -> None:
        self.signal: signal.Signals | None = None
        self._notify, self._signals = notify, signals
        self._before: dict[signal.Signals, Any] = {}

    @property
    def requested(self) -> bool:
        """Return whether a signal came."""
        return self.signal is not None

    @property
    def exit_code(self) -> int:
        """Return 128 plus the number of the signal, by convention; 0 where none came."""
        return 0 if self.signal is None else 128 + int(self.signal)

    def __enter__(self) -> Self:
        # Python allows signal handlers in the main thread alone.
        if threading.current_thread() is threading.main_thread():
            for number in self._signals:
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.signal = signal.Signals(number)
        if self._notify is not None:
            self._notify()
