"""Which runs may be looked at: those in the folders that were given, and nothing beside them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from esper.utils.errors import UserError

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
        """Return name → folder, in the order in which the folders were given, then by name."""
        found: dict[str, Path] = {}
        for root in self._roots:
            for folder in _below(root, root, _DEPTH):
                if folder not in found.values() and len(found) < _MOST:
                    name = root.name if folder == root else folder.relative_to(root).as_posix()
                    longer = (name, f"{folder.parent.name}/{folder.name}", str(folder))
                    found[next(n for n in longer if n not in found)] = folder
        return found

    def find(self, name: str) -> Path:
        """Return the folder of a run. Raises `UserError` for a name that is not in `runs`."""
        runs = self.runs()
        if name not in runs:
            raise UserError(f"there is no run {name!r} here")
        return runs[name]


def _below(root: Path, folder: Path, depth: int) -> Iterator[Path]:
    """Yield the runs at `folder` or under it; links out of `root` are passed over."""
    try:
        resolved = folder.resolve()
        if not resolved.is_relative_to(root):
            return
        if (folder / "versions.json").is_file():
            yield resolved
        elif depth:
            for child in sorted(f for f in folder.iterdir() if f.is_dir() and not f.name.startswith(".")):
                yield from _below(root, child, depth - 1)
    except OSError:  # unreadable, or gone in this moment
        return
