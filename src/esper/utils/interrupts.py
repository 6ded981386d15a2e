"""Stopping on request: the first signal asks for a clean end, the second ends at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, Self


@contextmanager
def interruptible() -> Iterator[None]:
    """While it is entered, SIGINT raises KeyboardInterrupt, so that what was opened is closed in order."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
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
        notify: Callable[[], None] | None = None,
        signals: Sequence[signal.Signals] = (signal.SIGINT, signal.SIGTERM),
    ) -> None:
        self.signal: signal.Signals | None = None
        self._notify, self._signals = notify, signals
        self._before: dict[signal.Signals, Any] = {}

    @property
    def requested(self) -> bool:
        """Whether a signal came."""
        return self.signal is not None

    @property
    def exit_code(self) -> int:
        """By convention 128 and the number of the signal; 0 where none came."""
        return 0 if self.signal is None else 128 + int(self.signal)

    def __enter__(self) -> Self:
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
