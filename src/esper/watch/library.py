"""Which runs may be looked at: those in the folders that were given, and nothing beside them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from esper.runs.lanes import LanesFolder
from esper.utils.errors import UserError

MARKER = "versions.json"  # every run folder has one
_DEPTH = 2  # how far below a given folder runs are looked for
_MOST = 500  # runs that are listed


class Library:
    """The runs in some folders, each by a name that is unique among them.

    A given folder is a run itself, or holds runs up to two folders below. Runs that appear later are found
    when `runs` is asked again. Raises `UserError` for a folder that does not exist.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        for folder in folders:
            if not folder.is_dir():
                raise UserError(
                    f"there is no folder at {folder}; give run folders, or a folder that holds some"
                )
        self._roots = list(dict.fromkeys(folder.resolve() for folder in folders))

    def runs(self) -> dict[str, Path]:
        """Name → folder, in the order in which the folders were given, then by name."""
        found: dict[str, Path] = {}
        for root in self._roots:
            for folder in _below(root, root, _DEPTH):
                if folder not in found.values() and len(found) < _MOST:
                    found[_unique(root, folder, found)] = folder
        return found

    def find(self, name: str) -> Path:
        """The folder of a run. Raises `UserError` for a name that is not in `runs`."""
        runs = self.runs()
        if name not in runs:
            raise UserError(f"there is no run {name!r} here")
        return runs[name]


def file_of(run: Path, name: str) -> Path:
    """Return the path of a file of a run, which need not exist.

    Everything that the server reads passes here. Raises `UserError` where the file is a link that leads out
    of the run's folder.
    """
    path = run / name
    try:
        inside = path.resolve().is_relative_to(run.resolve())
    except (OSError, RuntimeError):  # a link that leads to itself
        inside = False
    if not inside:
        raise UserError(f"{name} leads out of the run's folder")
    return path


def lanes_of(run: Path, round: int) -> LanesFolder:
    """Return the lanes of a run, to read the file of `round`. Raises `UserError` as `file_of` does."""
    lanes = LanesFolder(file_of(run, "lanes"))
    file_of(run, lanes.file(round).relative_to(run).as_posix())
    return lanes


def _below(root: Path, folder: Path, depth: int) -> Iterator[Path]:
    """The runs at `folder` or under it; links out of `root` are passed over."""
    try:
        resolved = folder.resolve()
        if not resolved.is_relative_to(root):
            return
        if (folder / MARKER).is_file():
            yield resolved
        elif depth:
            for child in sorted(f for f in folder.iterdir() if f.is_dir() and not f.name.startswith(".")):
                yield from _below(root, child, depth - 1)
    except OSError:  # unreadable, or gone in this moment
        return


def _unique(root: Path, folder: Path, taken: dict[str, Path]) -> str:
    name = root.name if folder == root else folder.relative_to(root).as_posix()
    if name in taken:
        name = f"{folder.parent.name}/{folder.name}"
    return name if name not in taken else str(folder)
