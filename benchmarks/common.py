"""What benchmarks share: two ways to do the same work in turns, results as lines of JSON, the machine's name.

Times are thread CPU time on one thread, the median of many calls: on a shared machine wall time is noise.
Operations are what reaches the dispatcher, which no machine can blur.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from rich.console import Console
from rich.table import Table

from tests.operations import count_operations

Result = TypeVar("Result")
MEMBERS = (16, 64, 128, 512)
SLOTS = (1, 3, 9, 25)


@dataclass(frozen=True)
class Case:
    """One size of a work: ours and the baseline, ready to call."""

    ours: Callable[[], object]
    baseline: Callable[[], object]


@dataclass(frozen=True)
class Work:
    """A piece of work to be measured. `prepare` builds the inputs of one size outside the clock."""

    name: str
    what: str  # one line for the table
    prepare: Callable[[int, int], Case]  # (members, slots) -> case
    members: tuple[int, ...] = MEMBERS
    slots: tuple[int, ...] = SLOTS


@dataclass(frozen=True)
class Row:
    """One line of the table and of `--json`."""

    work: str
    n: int
    slots: int
    ours_ms: float
    baseline_ms: float
    ratio: float
    ops: int


def _once(call: Callable[[], object]) -> float:
    """Thread CPU time of one call in ms."""
    start = time.thread_time()
    call()
    return 1e3 * (time.thread_time() - start)


def thread_ms(call: Callable[[], object], seconds: float = 0.5, least: int = 3, most: int = 300) -> float:
    """Median thread CPU time of a call in ms: up to `most` calls, within `seconds` after the `least`."""
    call()
    times: list[float] = []
    while len(times) < least or (len(times) < most and sum(times) < 1e3 * seconds):
        times.append(_once(call))
    return statistics.median(times)


def paired_ms(case: Case, seconds: float) -> tuple[float, float]:
    """Median times of ours and of the baseline, taken in turns so that both meet the same machine.

    At least three rounds, then until `seconds` of CPU time are spent; a round is one call of the baseline
    and twenty of ours.
    """
    ours: list[float] = []
    baseline: list[float] = []
    case.ours()
    while len(baseline) < 3 or sum(ours) + sum(baseline) < 1e3 * seconds:
        baseline.append(_once(case.baseline))
        ours.extend(_once(case.ours) for _ in range(20))
    return statistics.median(ours), statistics.median(baseline)


@contextmanager
def one_thread() -> Iterator[None]:
    """One thread inside, as many as before outside."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def measure(work: Work, members: Iterable[int], slots: Iterable[int], seconds: float) -> Iterator[Row]:
    """A row for each size, as soon as it is known."""
    sizes = [(n, s) for s in slots for n in members]
    for n, s in sizes:
        case = work.prepare(n, s)
        with one_thread():
            ours, baseline = paired_ms(case, seconds)
        yield Row(work.name, n, s, ours, baseline, baseline / ours, count_operations(case.ours))


def print_json(rows: Iterable[Row]) -> None:
    """One object per line."""
    for row in rows:
        print(json.dumps(asdict(row)), flush=True)


def print_table(work: Work, rows: Iterable[Row]) -> None:
    """The same rows for people."""
    table = Table(title=f"{work.name}: {work.what}", title_justify="left")
    for column in ("members", "slots", "baseline ms", "ours ms", "ratio", "operations"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            f"{row.n:,}", f"{row.slots:,}", f"{row.baseline_ms:,.2f}", f"{row.ours_ms:,.3f}",
            f"{row.ratio:,.0f}×", f"{row.ops:,}",
        )  # fmt: skip
    Console().print(table)


def line_of(result: Any, machine: str) -> str:
    """What was measured as a line of JSON, null for what was not."""
    fields = {name: None if value != value else value for name, value in asdict(result).items()}
    return json.dumps({"device": machine, **fields}, allow_nan=False)


def read_results(parser: argparse.ArgumentParser, path: Path, kind: type[Result]) -> tuple[list[Result], str]:
    """What --json printed, and the machine; a file that holds nothing of the kind ends the command."""
    try:
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        machine = rows[0].get("device", "an unnamed machine")
        fields = [{k: math.nan if v is None else v for k, v in row.items() if k != "device"} for row in rows]
        return [kind(**row) for row in fields], machine
    except (OSError, ValueError, TypeError, IndexError, AttributeError):
        parser.error(f"{path} does not hold lines of this benchmark; give a file that --json wrote")


def machine_name(device: str) -> str:
    """The GPU, if that is the device, and the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    except OSError:
        names = []
    processor = f"{names[0]}, {platform.machine()}" if names else f"CPU, {platform.machine()}"
    return f"{torch.cuda.get_device_name()}, {processor}" if device.startswith("cuda") else processor


def synchronize(device: torch.device | str) -> None:
    """Wait for a GPU; nothing to wait for on a CPU."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()
