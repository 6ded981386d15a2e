"""Read JSON lines of rounds and events that another process may be appending to, cutting or replacing."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO
from zlib import crc32

from esper.runs.schema import NAN, Event, from_json
from esper.utils.errors import UserError
from esper.utils.statistics import mean_interval

CHUNK = 512 * 1024  # bytes that are read at a time
MAX_EVENTS = 2_000  # of a round that are sent; the others are only counted
_LONGEST_LINE = 32 * CHUNK  # a longer one is skipped
_CHECKSUM_BYTES = 64  # ahead of a position, which its checksum covers
_MAX_OFFSET = 2**63  # a file cannot be positioned at this offset or a larger one


@dataclass(frozen=True)
class Position:
    """How far a file was read: a byte offset, and a checksum of the bytes before it.

    The checksum tells a file that was cut and written anew from one that only grew.
    """

    offset: int = 0
    checksum: int = 0

    @classmethod
    def parse(cls, text: str) -> Position:
        """Return what `str` made of a position; the beginning of the file for anything else."""
        offset, _, checksum = text.partition("-")
        try:
            position = cls(int(offset), int(checksum, 16))
        except ValueError:
            return cls()
        return position if 0 <= position.offset < _MAX_OFFSET else cls()

    def __str__(self) -> str:
        return f"{self.offset}-{self.checksum:x}"


@dataclass(frozen=True)
class NewLines:
    """The lines of a file after a position."""

    position: Position  # to read on from
    lines: list[str]  # whole lines, each one JSON object without line ends
    damaged: int  # whole lines that are not
    restarted: bool  # the file was replaced: drop the lines from before


def read_new_lines(path: Path, position: Position) -> NewLines | None:
    """Return the next whole lines after `position`, about `CHUNK` bytes of them; None if there are none.

    A last line without a line end is left for the next call.
    """
    try:
        with open(path, "rb") as file:
            restarted = position.offset > 0 and _checksum(file, position.offset) != position.checksum
            start = 0 if restarted else position.offset
            data = _whole_lines(file, start)
            end = start + len(data)
            after = Position(end, _checksum(file, end)) if end else Position()
    except OSError:  # not there, or not there any more
        return NewLines(Position(), [], 0, True) if position.offset else None
    if not data and not restarted:
        return None
    lines = [line for line in data.split(b"\n") if line.strip()]
    whole = [text for line in lines if (text := _json_object(line)) is not None]
    return NewLines(after, whole, len(lines) - len(whole), restarted)


def last_line(path: Path) -> dict[str, Any] | None:
    """Return the last whole line of a file that is a JSON object; None without one."""
    try:
        with open(path, "rb") as file:
            file.seek(max(file.seek(0, 2) - CHUNK, 0))
            lines = file.read().split(b"\n")[:-1]
    except OSError:
        return None
    whole = (text for line in reversed(lines) if (text := _json_object(line)) is not None)
    return json.loads(next(whole, "null"))


def _checksum(file: BinaryIO, offset: int) -> int:
    """Return a checksum of the bytes before `offset`; 0 where the file is shorter."""
    begin = max(offset - _CHECKSUM_BYTES, 0)
    file.seek(begin)
    data = file.read(offset - begin)
    return crc32(data) if len(data) == offset - begin else 0


def _whole_lines(file: BinaryIO, start: int) -> bytes:
    file.seek(start)
    data = file.read(CHUNK)
    while b"\n" not in data and len(data) < _LONGEST_LINE:
        more = file.read(CHUNK)
        if not more:
            return b""
        data += more
    # Without a line end it is a part of a line that is too long, which is skipped as damaged.
    return data[: data.rfind(b"\n") + 1] or data


def _json_object(line: bytes) -> str | None:
    """Return a line as text without line ends, None for anything but a JSON object."""
    try:
        text = line.decode()
        record = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None
    # JSON allows a carriage return as white space only; in a server-sent event it would end the line.
    return text.replace("\r", " ").strip() if isinstance(record, dict) else None


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def round_events(path: Path, round: int, member: int | None = None) -> dict[str, Any]:
    """Return the events of `round`, or those of one member in it, and their counts.

    events: at most `MAX_EVENTS`; total, damaged: how many there are, and how many could not be read; kinds:
    how many of each; ledger: `blueprint_ledger`. A missing file has no events.
    """
    events, damaged = [], 0
    for line in _lines_of_round(path, round):
        try:
            event = from_json(Event, line, str(path))
        except UserError:
            damaged += 1
            continue
        if member in (None, event.member):
            events.append(event)
    kinds = dict(Counter[str](event.kind for event in events))
    sums = {"total": len(events), "damaged": damaged, "kinds": kinds, "ledger": blueprint_ledger(events)}
    return {"events": events[:MAX_EVENTS], **sums}


def blueprint_ledger(events: Iterable[Event]) -> list[dict[str, Any]]:
    """Count the outcomes of the seeds of each blueprint, the most planted first.

    "taken out": pruned, by the governor too. `contribution` (points) and `parameters` are means over the
    seeds that were kept.
    """
    by_kind: dict[str, dict[str, list[Event]]] = {}
    for event in events:
        if event.blueprint:
            by_kind.setdefault(event.blueprint, {}).setdefault(event.kind, []).append(event)
    ledger = []
    for blueprint, kinds in by_kind.items():
        planted, kept, pruned = (kinds.get(k, []) for k in ("germinated", "fossilised", "pruned"))
        contribution, half = mean_interval([event.numbers.get("contribution", NAN) for event in kept])
        parameters, _ = mean_interval([event.numbers.get("parameters", NAN) for event in kept])
        ledger.append(
            {
                "blueprint": blueprint,
                "planted": len(planted),
                "kept": len(kept),
                "taken out": len(pruned),
                "unfinished": max(len(planted) - len(kept) - len(pruned), 0),
                "contribution": contribution,
                "contribution_ci": half,
                "parameters": parameters,
            }
        )
    return sorted(ledger, key=lambda entry: (-entry["planted"], entry["blueprint"]))


def _lines_of_round(path: Path, round: int) -> Iterator[bytes]:
    """Yield the lines of a round, and damaged ones among them; rounds only grow from line to line."""
    own = False
    # Only the beginning of a line is compared: to parse all 9 MB of a long run would take seconds.
    with suppress(OSError), open(path, "rb") as file:
        for line in file:
            if line.startswith(b'{"round":'):
                own = line.startswith(b'{"round":%d,' % round)
            if own and line.endswith(b"\n"):
                yield line
