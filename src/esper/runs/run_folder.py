"""The folder that a run leaves behind: its files and the rules for resuming it.

    versions.json   what made the run: its kind, what was asked for, esper, python, packages, platform, seed
    command.txt     the command lines, the first and each that resumed it, ready to be pasted
    config.yaml     the configuration as resolved; written last, so that a folder without it never began
    metrics.jsonl   one line per round (`schema.RoundSummary`)
    events.jsonl    one line per event (`schema.Event`)
    results.json    controllers compared (`schema.Comparison`)
    network.*       the network that was grown: its description (`schema.SavedNetwork`) and its files
    growth.json     the course of an `esper.grow` (`schema.Growth`)
    networks/       what each network of a demo reached (`schema.ControllerResult`)
    trajectories/   the slots of every member, one file per round that was kept (`trajectories.Trajectories`)
    checkpoints/    last and periodic, as safetensors
    report.html     everything above, as one page

Order of writing in a round: events, metrics, then the checkpoint. After a crash the checkpoint is the
truth, and `truncate_after` takes the rest back to it. A run is resumed by the same rules whoever wrote it:
`check_settings` and `check_checkpoint`.
"""

from __future__ import annotations

import json
import platform
import shlex
import sys
from collections.abc import Container, Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, get_args

from filelock import FileLock, Timeout

from esper import __version__
from esper.runs.files import JsonLines, disk_errors, file_in, read_json, remove_unfinished, write_atomically
from esper.runs.schema import Comparison, Event, Growth, Record, SavedNetwork, from_json, to_json
from esper.runs.trajectories import TrajectoryFolder
from esper.utils.errors import UserError
from esper.utils.settings import parse_yaml

FORMAT = "esper-run"
FORMAT_VERSION = 1
CALL = "esper.grow"  # what a folder says under `call` that no command wrote
Kind = Literal["train", "compare", "grow", "demo"]
KINDS: tuple[str, ...] = get_args(Kind)
_BEGINNING = {"versions.json", "command.txt", "checkpoints", ".lock"}  # all that is there before config.yaml
_FILES: dict[type, str] = {Comparison: "results.json", Growth: "growth.json", SavedNetwork: "network.json"}
_PACKAGES = ("esper-lite", "torch", "numpy", "pydantic", "safetensors", "scikit-learn")


def version_of(package: str) -> str | None:
    """Return the version of an installed package, None without one; nothing is imported."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


class RunFolder:
    """One run on disk. Make one with `create`, `open` (to go on writing) or `read` (to look only)."""

    def __init__(self, path: Path, about: Mapping[str, Any]) -> None:
        self.path = path
        self.about = dict(about)  # versions.json
        self.metrics_file = JsonLines(path / "metrics.jsonl")
        self.events_file = JsonLines(path / "events.jsonl")
        self.trajectories = TrajectoryFolder(path)
        self.checkpoints_path, self.report_path = path / "checkpoints", path / "report.html"
        # What was asked for beside the configuration, as given to `create`.
        self.request = dict(self.about.get("request", {}))
        # Whether `esper.grow` was called for it, with a model and data that no folder holds.
        self.from_python = self.request.get("call") == CALL
        self._lock = FileLock(path / ".lock")

    @classmethod
    def create(
        cls,
        path: Path | str,
        *,
        config: str,
        seed: int,
        kind: Kind = "train",
        request: Mapping[str, Any] | None = None,
        command: Sequence[str] | None = None,
    ) -> RunFolder:
        """Begin a run in a folder that does not exist or holds nothing, and lock it for this process.

        `config` is the resolved YAML, `request` what was asked for beside it, so that an interrupted run can
        be done again; `command` defaults to this process's. Raises UserError where the folder is in use or
        cannot be written to.
        """
        path = Path(path)
        check_free(path)
        with disk_errors("create", path):
            (path / "checkpoints").mkdir(parents=True, exist_ok=True)
        about = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "kind": kind,
            "request": dict(request or {}),
            "seed": seed,
            "versions": {
                "python": platform.python_version(),
                "platform": platform.platform(),
                **{package: version_of(package) or "not installed" for package in _PACKAGES},
                "esper-lite": __version__,  # that of an editable install stays as it was then
            },
        }
        folder = cls(path, about)
        folder._acquire()
        # config.yaml comes last: a folder without it was killed before it began, and may be used again.
        write_atomically(path / "versions.json", json.dumps(about, indent=2).encode() + b"\n")
        write_atomically(path / "command.txt", (shlex.join(command or sys.argv) + "\n").encode())
        folder.write_config(config)
        return folder

    @classmethod
    def read(cls, path: Path | str) -> RunFolder:
        """Open an existing run to read it, without changing it. Raises UserError for any other folder."""
        path = Path(path)
        if not path.is_dir():
            raise UserError(f"there is no run folder at {path}; give a folder that esper wrote")
        if not (path / "versions.json").is_file():
            raise UserError(f"{path} is not a run folder: it has no versions.json; give one that esper wrote")
        about = read_json(file_in(path, "versions.json"))
        ours = isinstance(about, dict) and about.get("format") == FORMAT
        ours = ours and all(isinstance(about.get(part, {}), dict) for part in ("request", "versions"))
        if not ours or not isinstance(about.get("seed"), int):
            raise UserError(f"{path} is not a run folder: its versions.json was not written by esper")
        if about.get("format_version") != FORMAT_VERSION or about.get("kind", "train") not in KINDS:
            version = f"{about.get('kind', '')} {about.get('format_version')!r}".strip()
            raise UserError(f"{path} has run format {version}, not {FORMAT_VERSION}; use its own esper")
        return cls(path, about)

    @classmethod
    def open(cls, path: Path | str) -> RunFolder:
        """Open an existing run to continue it: lock it, and remove half-written files and lines."""
        folder = cls.read(path)
        with disk_errors("write in", folder.path):
            folder.checkpoints_path.mkdir(exist_ok=True)
        folder._acquire()
        folder.metrics_file.repair()
        folder.events_file.repair()
        return folder

    def close(self) -> None:
        """Let another process write here; the end of the process does the same."""
        self._lock.release()

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def kind(self) -> str:
        """What made the run: one of KINDS."""
        return str(self.about.get("kind", "train"))

    @property
    def in_use(self) -> bool:
        """Whether a process is writing here now, this one included."""
        if self._lock.is_locked:
            return True
        try:
            lock = file_in(self.path, ".lock")
            if lock.exists():
                with FileLock(lock, timeout=0.1):  # another reader holds it for a moment, too
                    pass
        except Timeout:
            return True
        except (OSError, UserError):  # a folder that may only be read, or a link
            pass
        return False

    def settings(self) -> dict[str, Any]:
        """Return config.yaml as a mapping, empty where it holds none. Raises UserError if it is damaged."""
        found = parse_yaml(self._read_text("config.yaml"), str(self.path / "config.yaml"))
        return found if isinstance(found, dict) else {}

    def command_text(self) -> str:
        """Return the command lines that wrote here, one on each line."""
        return self._read_text("command.txt").strip()

    def write_config(self, text: str) -> None:
        """Replace config.yaml."""
        write_atomically(self.path / "config.yaml", text.encode())

    def add_command(self) -> None:
        """Add the command line of this process to command.txt."""
        lines = f"{self.command_text()}\n{shlex.join(sys.argv)}\n"
        write_atomically(self.path / "command.txt", lines.encode())

    def replace_events(self, events: Iterable[Event]) -> None:
        """Replace all of events.jsonl."""
        write_atomically(self.events_file.path, "".join(to_json(event) + "\n" for event in events).encode())

    def truncate_after(self, last_round: int) -> None:
        """Remove what was written after `last_round`, the round of the checkpoint that is resumed."""
        self.metrics_file.truncate_after(last_round)
        self.events_file.truncate_after(last_round)
        self.trajectories.truncate_after(last_round)

    def check_settings(
        self, before: Mapping[str, Any], now: Mapping[str, Any], may_change: Container[str]
    ) -> None:
        """Raise UserError for a setting that decides the numbers of the run and differs from before."""
        was, asked = flatten(before), flatten(now)
        for name in {**was, **asked}:
            free = name in may_change or name.partition(".")[0] in may_change
            if not free and was.get(name) != asked.get(name):
                raise UserError(
                    f"{name} is {asked.get(name)!r}, and {self.path} was begun with {was.get(name)!r}, which "
                    "stays as it is; give the same to go on, or choose another folder for a new run"
                )

    def check_checkpoint(self, path: Path) -> None:
        """Raise UserError if the checkpoint at `path` is missing and finished rounds would be lost."""
        # A run that was killed in its first round has no checkpoint yet, and nothing to lose.
        rounds = [line["round"] for file in (self.metrics_file, self.events_file) for line in file]
        # A page is no sign of rounds: 'esper report' writes one at any time.
        growth = self.growth()
        ended = (self.path / "results.json").exists() or (growth is not None and growth.finished)
        if not path.exists() and (max(rounds, default=0) > 1 or ended):
            raise UserError(
                f"{self.path} holds finished rounds, and {path} is missing: to go on would erase them; give "
                "a checkpoint of the run, or choose another folder for a new run"
            )

    def state(self, rounds_done: int, rounds: int) -> str:
        """Return "finished", "running" or "stopped"; `rounds` were asked for, 0 if nobody knows."""
        growth = self.growth()
        if growth is not None:
            finished = growth.finished
        else:
            trained = self.kind != "train" or 0 < rounds <= rounds_done
            finished = trained and (self.kind == "train" or (self.path / "results.json").exists())
        return "finished" if finished else "running" if self.in_use else "stopped"

    def write(self, record: Comparison | Growth | SavedNetwork) -> None:
        """Replace the file that holds this kind of record."""
        write_atomically(self.path / _FILES[type(record)], to_json(record).encode() + b"\n")

    def results(self) -> Comparison | None:
        """Return what results.json holds, None without one."""
        return self._record(Comparison)

    def growth(self) -> Growth | None:
        """Return what growth.json holds, None without one."""
        return self._record(Growth)

    def network(self) -> SavedNetwork | None:
        """Return what network.json holds, None without one."""
        return self._record(SavedNetwork)

    def _record(self, kind: type[Record]) -> Record | None:
        path = file_in(self.path, _FILES[kind])
        return from_json(kind, read_json(path), str(path)) if path.exists() else None

    def _read_text(self, name: str) -> str:
        path = file_in(self.path, name)
        with disk_errors("read", path):
            data = path.read_bytes()
        try:
            return data.decode()
        except UnicodeDecodeError:
            raise UserError(f"{path} is damaged: it is not text") from None

    def _acquire(self) -> None:
        """Lock the folder for this process, and remove what a killed one had half-written.

        The system releases the lock with the process, so that a killed one leaves none behind.
        """
        with disk_errors("write", self.path / ".lock"):
            try:
                self._lock.acquire(timeout=1)  # `in_use` of another process holds it for a moment
            except Timeout:
                raise UserError(f"another process writes to {self.path}; wait for it, or stop it") from None
            except NotImplementedError:  # filelock: the file system has no flock, as some network disks
                raise UserError(f"the disk of {self.path} knows no locks; choose another folder") from None
        for folder in (self.path, self.checkpoints_path, self.trajectories.path):
            remove_unfinished(folder)


def check_free(path: Path) -> None:
    """Raise a UserError for a folder in which no run may begin."""
    with disk_errors("create", path):
        others = (i for i in path.rglob("*") if i.name not in _BEGINNING and i.suffix != ".tmp")
        if path.is_file() or any(others):
            raise UserError(_occupied(path))


def _occupied(path: Path) -> str:
    """Return why no run may begin in a folder, and what to do instead."""
    try:
        found = RunFolder.read(path)
    except UserError:
        return f"{path} exists and is not an empty folder; choose another folder"
    made, again = f"'esper {found.kind}'", f"'esper resume {path}'"
    if found.from_python:
        made, again = CALL, f"{CALL}(..., out={str(path)!r}, resume=True)"
    return (
        f"{path} exists and is not an empty folder: it holds a run of {made}; choose another folder, or go "
        f"on with that run: {again}"
    )


def flatten(settings: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings under dotted names: {"ppo": {"clip": 0.2}} is {"ppo.clip": 0.2}."""
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
