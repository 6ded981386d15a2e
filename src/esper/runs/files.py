"""Files that survive a crash: replaced whole or not at all, or appended to line by line.

Records are JSON lines and not Parquet: a line is appended in one write, so that a crash costs at most the
last line; the file can be read while the run goes on, with any tool and no dependency; and a round is one
line, so that a column store would have nothing to gain.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from esper.runs.schema import to_json
from esper.utils.errors import UserError

_UNFINISHED = re.compile(r"\..+\.\d+\.tmp")  # the names that `write_atomically` writes under


@contextmanager
def disk_errors(doing: str, path: Path) -> Iterator[None]:
    """Raise a UserError of one sentence in place of an OSError."""
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot {doing} {path}: {(error.strerror or str(error)).lower()}") from error


def write_atomically(path: Path, data: bytes | bytearray) -> None:
    """Replace `path` by `data`: written beside it, forced to disk, then renamed over it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with disk_errors("write", path):
        try:
            with open(temporary, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        if os.name == "posix":  # a rename is durable once its folder is on disk
            handle = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)


def remove_unfinished(folder: Path) -> None:
    """Remove what killed writers left half-written in a folder. Nobody else may be writing in it."""
    with disk_errors("write in", folder):
        for path in folder.glob(".*.tmp"):
            if _UNFINISHED.fullmatch(path.name):
                path.unlink(missing_ok=True)


def file_in(folder: Path, name: str) -> Path:
    """Return the path of a file in a run folder; it need not exist.

    Whatever a page may show is read through this. Raises UserError for a link that leads out of the folder.
    """
    path = folder / name
    try:
        inside = path.resolve().is_relative_to(folder.resolve())
    except (OSError, RuntimeError):  # a link that leads to itself
        inside = False
    if not inside:
        raise UserError(f"{name} leads out of the run's folder")
    return path


def read_json(path: Path) -> Any:
    """Return the value of a JSON file. Raises UserError where it is missing or damaged."""
    with disk_errors("read", path):
        data = path.read_bytes()
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        raise UserError(f"{path} is damaged: it is not JSON") from None


class JsonLines:
    """One file of JSON lines, each a record with the `round` that it belongs to."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, *records: Any) -> None:
        """Add all records in one write and force them to disk."""
        text = "".join(to_json(record) + "\n" for record in records)
        if not text:
            return
        with disk_errors("write", self.path), open(self.path, "ab", buffering=0) as file:
            rest = memoryview(text.encode())
            while rest:  # a full disk may leave half a line, which `repair` cuts off
                rest = rest[file.write(rest) :]
            os.fsync(file.fileno())

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield every whole line; a half-written last one is passed over."""
        for number, line in enumerate(self._whole_lines(), start=1):
            record = parse_line(line)
            if not isinstance(record, dict) or not isinstance(record.get("round"), int):
                raise UserError(f"{self.path} is damaged: line {number} is no record of a round; remove it")
            yield record

    def repair(self) -> None:
        """Cut off a last line that has no end, or that a dying machine left as something else than JSON."""
        lines = self._whole_lines()
        if lines and parse_line(lines[-1]) is None:
            lines.pop()
        self._rewrite(lines)

    def truncate_after(self, last_round: int) -> None:
        """Keep the lines of rounds up to `last_round`: a resumed run writes the others again."""
        lines = self._whole_lines()
        self._rewrite([line for line, r in zip(lines, self, strict=True) if r["round"] <= last_round])

    def _whole_lines(self) -> list[bytes]:
        if not self.path.exists():
            return []
        with disk_errors("read", self.path):
            return self.path.read_bytes().split(b"\n")[:-1]

    def _rewrite(self, lines: list[bytes]) -> None:
        data = b"".join(line + b"\n" for line in lines)
        if self.path.exists() and self.path.stat().st_size != len(data):
            write_atomically(self.path, data)


def parse_line(line: bytes) -> Any:
    """Return the value of a line, None for what is not JSON."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None
