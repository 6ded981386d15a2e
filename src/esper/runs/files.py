"""Writing files so that a crash at any moment leaves the old file or the new one, never half of each."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from esper.utils.errors import UserError

_REASONS = {
    errno.ENOSPC: "the disk is full; free some space",
    errno.EDQUOT: "the disk quota is used up; free some space",
    errno.EACCES: "permission is denied; choose a folder that you may write to",
    errno.EPERM: "permission is denied; choose a folder that you may write to",
    errno.EROFS: "the file system is read-only; choose another folder",
    errno.ENOTDIR: "a part of the path is a file; choose another folder",
    errno.EEXIST: "a file of that name is in the way; choose another folder",
    errno.ENOENT: "it does not exist; check the path",
    errno.EISDIR: "it is a folder, and a file was expected; check the path",
    errno.ENAMETOOLONG: "the name is too long; choose a shorter one",
}


_UNFINISHED = re.compile(r"\..+\.\d+\.tmp")  # the names that `write_atomically` writes under


@contextmanager
def disk_errors(doing: str, path: Path) -> Iterator[None]:
    """Turn what the operating system says into one clear sentence."""
    try:
        yield
    except OSError as error:
        reason = _REASONS.get(error.errno or 0, (error.strerror or str(error)).lower())
        raise UserError(f"cannot {doing} {path}: {reason}") from error


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
        _sync_folder(path.parent)


def is_unfinished(path: Path) -> bool:
    """Whether a file is named like one that `write_atomically` had not put into its place yet."""
    return _UNFINISHED.fullmatch(path.name) is not None


def remove_unfinished(folder: Path) -> None:
    """Remove what writers that were killed left half-written in a folder, which need not exist.

    Nobody else may be writing in it.
    """
    with disk_errors("write in", folder):
        for path in filter(is_unfinished, folder.glob(".*.tmp")):
            path.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    """A rename is durable once its folder is on disk; systems that cannot open folders need no such step."""
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
