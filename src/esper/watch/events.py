"""The events of one round, found without reading the rounds before it."""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from esper.runs.schema import Event, from_json, json_values
from esper.utils.errors import UserError
from esper.utils.statistics import mean_interval
from esper.watch.earnings import BlueprintEarnings, blueprint_ledger

_MOST_READ = 100_000  # lines of one round that are looked at
MOST_TOLD = 2_000  # events that are sent as they are; the others are counted only


@dataclass(frozen=True)
class RoundEvents:
    """The events of a round: as many as may be told, and what all of them come to."""

    events: list[Event]
    total: int
    damaged: int
    kinds: dict[str, int]
    ledger: list[dict[str, Any]]  # one entry per blueprint, the most planted first


def round_events(path: Path, round: int, member: int | None = None) -> RoundEvents:
    """The events of `round`, or those of one member in it. A file that is not there has none.

    Rounds only grow from line to line, so the first line is found by halving the file.
    """
    events, damaged = [], 0
    for line in _lines_of_round(path, round):
        try:
            event = from_json(Event, json.loads(line), str(path))
        except (ValueError, RecursionError, UserError):
            damaged += 1
            continue
        if event.round == round and member in (None, event.member):
            events.append(event)
    kinds = dict(Counter[str](event.kind for event in events))
    ledger = [_entry(entry) for entry in blueprint_ledger(events)]
    return RoundEvents(events[:MOST_TOLD], len(events), damaged, kinds, ledger)


def _entry(entry: BlueprintEarnings) -> dict[str, Any]:
    mean, half = mean_interval(entry.contributions)
    sizes, _ = mean_interval(entry.parameters)
    counts = {"blueprint": entry.blueprint, "planted": entry.planted, **entry.fates}
    return dict(json_values(counts | {"contribution": mean, "contribution_ci": half, "parameters": sizes}))


def _lines_of_round(path: Path, round: int) -> list[bytes]:
    try:
        with open(path, "rb") as file:
            file.seek(_first_offset(file, round))
            lines: list[bytes] = []
            for line in file:
                if not line.endswith(b"\n") or len(lines) >= _MOST_READ:
                    break
                found = _round_of(line)
                if found is not None and found > round:
                    break
                lines.append(line)
            return lines
    except OSError:
        return []


def _first_offset(file: BinaryIO, round: int) -> int:
    """The offset of the first line whose round is `round` or later, or the end of the file."""

    def at(offset: int) -> float:
        found = _line_behind(file, offset)[1]
        return math.inf if found is None else found

    return _line_behind(file, bisect_left(range(file.seek(0, 2)), float(round), key=at))[0]


def _line_behind(file: BinaryIO, offset: int) -> tuple[int, int | None]:
    """Where the first readable line that begins at `offset` or behind it begins, and its round."""
    if offset:
        file.seek(offset - 1)
        file.readline()
    else:
        file.seek(0)
    while True:
        start = file.tell()
        line = file.readline()
        found = _round_of(line)
        if found is not None or not line:
            return start, found


def _round_of(line: bytes) -> int | None:
    """The round of a line, without parsing all of it where it begins as ours do."""
    try:
        if line.startswith(b'{"round":'):
            return int(line[9 : line.index(b",", 9)])
        record = json.loads(line)
        return int(record["round"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
