"""The folder that a run leaves behind, and the only door to the files in it.

    config.yaml     the configuration as resolved
    versions.json   what made the run: esper, python, packages, platform, seed
    command.txt     the command line, ready to be pasted
    metrics.jsonl   one line per round (`schema.RoundSummary`)
    events.jsonl    one line per event (`events.Event`)
    film.json       the slots of a few members over time (`schema.FilmReel`)
    results.json    controllers compared (`schema.Comparison`)
    lanes/          the slots of every member, one file per round that was kept (`lanes.Lanes`)
    checkpoints/    last, best and periodic, as safetensors
    report.html     everything above, as one page

Order of writing in a round: events, metrics, then the checkpoint. After a crash the checkpoint is the
truth, and `truncate_after` takes the rest back to it.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from esper.foundation.errors import UserError
from esper.telemetry.events import Event
from esper.telemetry.files import disk_errors, write_atomically
from esper.telemetry.jsonl import JsonLines
from esper.telemetry.lanes import LanesFolder
from esper.telemetry.schema import Comparison, FilmReel, RoundSummary, from_json, to_json

FORMAT = "esper-run"
FORMAT_VERSION = 1
_PACKAGES = ("esper-lite", "torch", "numpy", "pydantic", "safetensors", "scikit-learn", "matplotlib")


def installed_versions() -> dict[str, str]:
    """The versions that a result may depend on, read without importing anything heavy."""
    versions = {"python": platform.python_version(), "platform": platform.platform()}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return versions


class RunFolder:
    """One run on disk. Make one with `create`, `open` (to go on writing) or `read` (to look only)."""

    def __init__(self, path: Path, about: Mapping[str, Any]) -> None:
        self.path = path
        self.about = dict(about)  # versions.json
        self.metrics_file = JsonLines(path / "metrics.jsonl")
        self.events_file = JsonLines(path / "events.jsonl")
        self.lanes = LanesFolder(path / "lanes")
        self._lock: int | None = None

    @classmethod
    def create(
        cls,
        path: Path | str,
        *,
        config: str,
        seed: int,
        command: Sequence[str] | None = None,
        versions: Mapping[str, str] | None = None,
    ) -> RunFolder:
        """A new run. `config` is the resolved YAML; `command` and `versions` default to this process's."""
        path = Path(path)
        with disk_errors("create", path):
            if path.exists() and (not path.is_dir() or any(path.iterdir())):
                raise UserError(
                    f"{path} exists and is not an empty folder; choose another folder, "
                    f"or continue a run with 'esper resume {path}'"
                )
            (path / "checkpoints").mkdir(parents=True)
        about = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "seed": seed,
            "versions": dict(versions if versions is not None else installed_versions()),
        }
        write_atomically(path / "config.yaml", config.encode())
        write_atomically(path / "command.txt", (shlex.join(command or sys.argv) + "\n").encode())
        write_atomically(path / "versions.json", json.dumps(about, indent=2).encode() + b"\n")
        folder = cls(path, about)
        folder._acquire()
        return folder

    @classmethod
    def read(cls, path: Path | str) -> RunFolder:
        """An existing run, to look at: nothing in it is changed."""
        path = Path(path)
        if not path.is_dir():
            raise UserError(f"there is no run folder at {path}; give the folder that 'esper train' wrote")
        marker = path / "versions.json"
        if not marker.is_file():
            raise UserError(
                f"{path} is not a run folder: it has no versions.json; give one that 'esper train' wrote"
            )
        about = _load_json(marker)
        if (
            not isinstance(about, dict)
            or about.get("format") != FORMAT
            or not isinstance(about.get("seed"), int)
        ):
            raise UserError(f"{path} is not a run folder: its versions.json was not written by esper")
        if about.get("format_version") != FORMAT_VERSION:
            raise UserError(
                f"{path} has run format {about.get('format_version')!r}; this esper reads {FORMAT_VERSION}: "
                "use the version of esper that wrote it"
            )
        return cls(path, about)

    @classmethod
    def open(cls, path: Path | str) -> RunFolder:
        """An existing run, to continue: locked for this process, half-written last lines cut off."""
        folder = cls.read(path)
        with disk_errors("write in", folder.path):
            folder.checkpoints_path.mkdir(exist_ok=True)
        folder._acquire()
        folder.metrics_file.mend()
        folder.events_file.mend()
        return folder

    def close(self) -> None:
        """Let another process write here; the end of the process does the same."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def seed(self) -> int:
        return int(self.about["seed"])

    @property
    def checkpoints_path(self) -> Path:
        return self.path / "checkpoints"

    @property
    def report_path(self) -> Path:
        return self.path / "report.html"

    def config_text(self) -> str:
        return self._read_text("config.yaml")

    def command_text(self) -> str:
        return self._read_text("command.txt").strip()

    def append_metrics(self, summary: RoundSummary) -> None:
        self.metrics_file.append([summary])

    def append_events(self, events: Iterable[Event]) -> None:
        self.events_file.append(events)

    def metrics(self) -> list[RoundSummary]:
        where = str(self.metrics_file.path)
        return [from_json(RoundSummary, line, where) for line in self.metrics_file]

    def events(self) -> list[Event]:
        where = str(self.events_file.path)
        return [from_json(Event, line, where) for line in self.events_file]

    def truncate_after(self, last_round: int) -> None:
        """Forget what was written after `last_round`, the round of the checkpoint that is resumed."""
        self.metrics_file.truncate_after(last_round)
        self.events_file.truncate_after(last_round)
        self.lanes.truncate_after(last_round)

    def write_film(self, reel: FilmReel) -> None:
        write_atomically(self.path / "film.json", to_json(reel).encode() + b"\n")

    def film(self) -> FilmReel | None:
        path = self.path / "film.json"
        return from_json(FilmReel, _load_json(path), str(path)) if path.exists() else None

    def write_results(self, comparison: Comparison) -> None:
        write_atomically(self.path / "results.json", to_json(comparison).encode() + b"\n")

    def results(self) -> Comparison | None:
        path = self.path / "results.json"
        return from_json(Comparison, _load_json(path), str(path)) if path.exists() else None

    def _read_text(self, name: str) -> str:
        path = self.path / name
        with disk_errors("read", path):
            data = path.read_bytes()
        try:
            return data.decode()
        except UnicodeDecodeError:
            raise UserError(f"{path} is damaged: it is not text") from None

    def _acquire(self) -> None:
        """One writer per run. The lock lives with the process, so that a killed one leaves none behind."""
        if os.name != "posix":
            return
        import fcntl

        path = self.path / ".lock"
        with disk_errors("write", path):
            handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(handle)
            raise UserError(
                f"another process is writing to {self.path}; wait for it, or stop it first"
            ) from None
        self._lock = handle


def _load_json(path: Path) -> Any:
    with disk_errors("read", path):
        data = path.read_bytes()
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        raise UserError(f"{path} is damaged: it is not JSON") from None
