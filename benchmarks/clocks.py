"""Clocks that tell the host's time and the GPU's time apart, and a way to make the host slower."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any
from unittest.mock import patch

import torch

from esper.foundation.replay import Studio

TWOFOLD, TRIES = 2.0, 8


@contextmanager
def captures() -> Iterator[list[int]]:
    """Counts the CUDA graphs that are captured meanwhile."""
    count, capture = [0], Studio.capture

    def counted(studio: Studio, function: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
        count[0] += 1
        return capture(studio, function)

    with patch.object(Studio, "capture", counted):
        yield count


def host_seconds(call: Callable[[], object]) -> float:
    """Wall seconds of a call without those in which the host waits for the GPU."""
    waited = 0.0

    def waiting(read: Callable[..., Any]) -> Callable[..., Any]:
        def run(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            nonlocal waited
            begun = time.perf_counter()
            torch.cuda.synchronize()
            waited += time.perf_counter() - begun
            return read(tensor, *args, **kwargs)

        return run

    reads = {name: waiting(getattr(torch.Tensor, name)) for name in ("cpu", "tolist", "item")}
    events = waiting(torch.cuda.Event.synchronize)
    torch.cuda.synchronize()
    with patch.multiple(torch.Tensor, **reads), patch.object(torch.cuda.Event, "synchronize", events):
        begun = time.perf_counter()
        call()
        return time.perf_counter() - begun - waited


def gpu_seconds(call: Callable[[], object]) -> tuple[float, int]:
    """Seconds of a call in which a kernel ran, and how many ran."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as prof:
        call()
        torch.cuda.synchronize()
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in prof.events() or ()
        if event.device_type == DeviceType.CUDA
    )
    total, until = 0.0, -math.inf
    for start, end in spans:
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total / 1e6, len(spans)


# Takes a core for a multiple of the time that it was just away, in slices shorter than a step of the loop.
# The scheduler's own slices are milliseconds long; going ahead of all others is what a superuser may.
_TURNS = """
import os, sys, time
multiple = float(sys.argv[1])
try:
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    pause = 5e-5
except PermissionError:
    pause = 0.0  # spin on, and leave the turns to the scheduler
print("begun", flush=True)
while True:
    begun = time.perf_counter()
    if pause:
        time.sleep(pause)
    now = time.perf_counter()
    until = now + multiple * (now - begun)
    while time.perf_counter() < until:
        pass
"""


@contextmanager
def slowed() -> Iterator[Callable[[], float]]:
    """Meanwhile this process has one core, of which another takes as much as makes the host half as fast.

    How much that is differs between machines, so it is searched for. Yields a function that measures how many
    times as long a loop of plain Python takes at the moment.
    """
    cores = os.sched_getaffinity(0)
    threads = [int(name) for name in os.listdir("/proc/self/task")]
    for thread in threads:
        os.sched_setaffinity(thread, {max(cores)})
    try:
        usual, found = python_seconds(), []
        low, high = 0.05, 5.0  # times as long as it is away that the other one stays
        for _ in range(TRIES):
            multiple = math.sqrt(low * high)
            with _other_process(multiple):
                slower = python_seconds() / usual
            found.append((abs(slower - TWOFOLD), multiple))
            low, high = (low, multiple) if slower > TWOFOLD else (multiple, high)
        with _other_process(min(found)[1]):
            yield lambda: python_seconds() / usual
    finally:
        for thread in threads:
            with suppress(ProcessLookupError):
                os.sched_setaffinity(thread, cores)


@contextmanager
def _other_process(multiple: float) -> Iterator[None]:
    """Another process on the cores of this one; see `_TURNS`."""
    with subprocess.Popen([sys.executable, "-c", _TURNS, str(multiple)], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()  # it has begun
        try:
            yield
        finally:
            other.kill()


def python_seconds(turns: int = 1_000_000, repeats: int = 9) -> float:
    """Wall seconds of a loop of plain Python, the median of some: how fast the host is at this moment."""
    found = []
    for _ in range(repeats):
        begun = time.perf_counter()
        for _ in range(turns):
            pass
        found.append(time.perf_counter() - begun)
    return sorted(found)[repeats // 2]
