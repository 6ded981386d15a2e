"""Reading on in a file of JSON lines that somebody else may be writing, cutting short or replacing."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO
from zlib import crc32

CHUNK = 512 * 1024  # bytes that are read at a time
_LONGEST = 32 * CHUNK  # a line longer than this is passed over
_MARKED = 64
_FARTHEST = 2**63  # offsets from here on cannot be sought


@dataclass(frozen=True)
class Position:
    """How far a file was read: a byte offset, and a checksum of the bytes before it.

    The checksum tells a file that was cut and written anew from one that only grew.
    """

    offset: int = 0
    mark: int = 0

    @classmethod
    def parse(cls, text: str) -> Position:
        """What `str` made of a position; the beginning of the file for anything else."""
        offset, _, mark = text.partition("-")
        try:
            position = cls(int(offset), int(mark, 16))
        except ValueError:
            return cls()
        return position if 0 <= position.offset < _FARTHEST else cls()

    def __str__(self) -> str:
        return f"{self.offset}-{self.mark:x}"


@dataclass(frozen=True)
class Piece:
    """What was found behind a position."""

    position: Position  # to read on from
    lines: list[str]  # whole lines, each one JSON object without line ends
    damaged: int  # whole lines that are not
    restarted: bool  # the file is another one: forget what came before


def read_on(path: Path, position: Position) -> Piece | None:
    """The next whole lines behind `position`, about `CHUNK` bytes of them, or None where there are none.

    A last line without an end is held back until it has one.
    """
    try:
        with open(path, "rb") as file:
            restarted = position.offset > 0 and _mark(file, position.offset) != position.mark
            start = 0 if restarted else position.offset
            data = _whole_lines(file, start)
            end = start + len(data)
            after = Position(end, _mark(file, end)) if end else Position()
    except OSError:  # not there, or not there any more
        return Piece(Position(), [], 0, True) if position.offset else None
    if not data and not restarted:
        return None
    lines = [line for line in data.split(b"\n") if line.strip()]
    whole = [text for line in lines if (text := _json_object(line)) is not None]
    return Piece(after, whole, len(lines) - len(whole), restarted)


def _mark(file: BinaryIO, offset: int) -> int:
    """A checksum of the bytes before `offset`; that of nothing where the file is shorter."""
    begin = max(offset - _MARKED, 0)
    file.seek(begin)
    data = file.read(offset - begin)
    return crc32(data) if len(data) == offset - begin else 0


def _whole_lines(file: BinaryIO, start: int) -> bytes:
    file.seek(start)
    data = file.read(CHUNK)
    while b"\n" not in data and len(data) < _LONGEST:
        more = file.read(CHUNK)
        if not more:
            return b""
        data += more
    return data[: data.rfind(b"\n") + 1] or data


def _json_object(line: bytes) -> str | None:
    try:
        text = line.decode()
        record = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict):
        return None
    # JSON allows a carriage return as white space only; in a server-sent event it would end the line.
    return text.replace("\r", " ").strip()


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
