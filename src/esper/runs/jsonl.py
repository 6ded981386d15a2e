"""Append-only files of JSON lines.

JSON lines and not Parquet: a line is appended in one write, so a crash costs at most the last line; the
file can be read while the run goes on, with any tool and no dependency; and a round is one line, so a
column store would have nothing to gain.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from esper.runs.files import disk_errors, write_atomically
from esper.runs.schema import to_json
from esper.utils.errors import UserError


class JsonLines:
    """One file of JSON lines, each a record with the `round` that it belongs to."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, records: Iterable[Any]) -> None:
        """All records in one write, forced to disk."""
        text = "".join(to_json(record) + "\n" for record in records)
        if not text:
            return
        with disk_errors("write", self.path), open(self.path, "ab", buffering=0) as file:
            whole = os.fstat(file.fileno()).st_size
            rest = memoryview(text.encode())
            try:
                while rest:
                    rest = rest[file.write(rest) :]
                os.fsync(file.fileno())
            except OSError:  # a full disk: what came before stays readable
                with suppress(OSError):
                    os.truncate(self.path, whole)
                raise

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Every whole line; a half-written last one is passed over."""
        for number, line in enumerate(self._whole_lines(), start=1):
            yield self._parse(line, number)

    def mend(self) -> None:
        """Cut off a last line that has no end, or that a dying machine left as something else than JSON."""
        lines = self._whole_lines()
        if lines and not _is_json(lines[-1]):
            lines.pop()
        self._rewrite(lines)

    def truncate_after(self, last_round: int) -> None:
        """Keep the lines of rounds up to `last_round`: what a resumed run has yet to live is forgotten."""
        lines = self._whole_lines()
        records = [self._parse(line, number) for number, line in enumerate(lines, start=1)]
        self._rewrite([line for line, r in zip(lines, records, strict=True) if r["round"] <= last_round])

    def _whole_lines(self) -> list[bytes]:
        if not self.path.exists():
            return []
        with disk_errors("read", self.path):
            return self.path.read_bytes().split(b"\n")[:-1]

    def _rewrite(self, lines: list[bytes]) -> None:
        data = b"".join(line + b"\n" for line in lines)
        if self.path.exists() and self.path.stat().st_size != len(data):
            write_atomically(self.path, data)

    def _parse(self, line: bytes, number: int) -> dict[str, Any]:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if not isinstance(record, dict) or not isinstance(record.get("round"), int):
            raise UserError(f"{self.path} is damaged in line {number}: it is no record of a round; remove it")
        return record


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True
