"""What the page is told of a run besides its rounds: what it is, its settings and its results."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import yaml

from esper.runs.differences import COMPARED
from esper.runs.run_folder import RunFolder
from esper.runs.schema import Comparison, Growth, json_values
from esper.utils.errors import UserError
from esper.utils.statistics import mean_interval
from esper.watch.library import MARKER, file_of

_SIGNED = ("versions.json", "config.yaml", "results.json", "network.md", "growth.json", "lanes")
_BACK = (64 * 1024, 4 * 1024 * 1024)  # bytes at the end of a file in which its last line is looked for


def signature(run: Path) -> str:
    """Changes whenever `facts` would: the page asks again then."""
    marks = []
    for name in _SIGNED:
        try:
            stat = (run / name).stat()
            marks.append(f"{stat.st_mtime_ns}.{stat.st_size}")
        except OSError:
            marks.append("")
    return "/".join(marks)


def read_run(run: Path) -> RunFolder:
    """Open a run folder to read it. Raises `UserError` as `RunFolder.read` and `file_of` do."""
    file_of(run, MARKER)
    return RunFolder.read(run)


def growth_of(folder: RunFolder) -> Growth | None:
    """Return what growth.json holds, None without one. Raises `UserError` where it is damaged or a link."""
    file_of(folder.path, "growth.json")
    return folder.growth()


def facts(run: Path) -> dict[str, Any]:
    """Everything but the rounds. What is missing is null, and what is damaged is told under `problems`."""
    problems: list[str] = []

    def tried(read: Any) -> Any:
        try:
            return read()
        except UserError as error:
            problems.append(str(error))
            return None

    folder = tried(lambda: read_run(run))
    about = folder.about if folder is not None else {}
    folder = folder or RunFolder(run, about)
    config = tried(lambda: settings_of(run))
    for name in ("metrics.jsonl", "events.jsonl"):  # read elsewhere, and passed over without a word there
        tried(partial(file_of, run, name))
    return {
        "kind": tried(lambda: file_of(run, "command.txt") and folder.kind),
        "about": about,
        "command": tried(lambda: file_of(run, "command.txt") and folder.command_text()),
        "config": config or {},
        "results": _results(tried(lambda: file_of(run, "results.json") and folder.results())),
        "network": tried(lambda: _text(run, "network.md")),
        "growth": json_values(tried(lambda: growth_of(folder))),
        "lanes": tried(lambda: file_of(run, "lanes") and folder.lanes.rounds()) or [],
        "problems": list(dict.fromkeys(problems)),
    }


def _results(results: Comparison | None) -> dict[str, Any] | None:
    """A comparison as JSON, with the mean and the interval of every quantity of every controller."""
    if results is None:
        return None
    found: dict[str, Any] = json_values(results)
    for entry, controller in zip(found["controllers"], results.controllers, strict=True):
        pairs = {quantity: mean_interval(getattr(controller, quantity)) for quantity in COMPARED}
        entry["figures"] = json_values({name: {"mean": mean, "ci": ci} for name, (mean, ci) in pairs.items()})
    return found


def settings_of(run: Path) -> dict[str, Any]:
    """Return config.yaml as dotted names and plain values. Raises `UserError` where it is damaged."""
    path = file_of(run, "config.yaml")
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError, RecursionError):
        raise UserError(f"{path} is missing or damaged") from None
    return dict(_flat(data)) if isinstance(data, Mapping) else {}


def _flat(data: Mapping[Any, Any], prefix: str = "") -> list[tuple[str, Any]]:
    pairs: list[tuple[str, Any]] = []
    for key, value in data.items():
        if isinstance(value, Mapping) and value:
            pairs += _flat(value, f"{prefix}{key}.")
        else:
            pairs.append((f"{prefix}{key}", json_values(value) if not isinstance(value, str) else value))
    return pairs


def state(run: Path, last: Mapping[str, Any] | None) -> str:
    """finished, running or stopped, by the last line of the metrics and the lock of whoever writes there."""
    try:
        folder = read_run(run)
        growth = growth_of(folder)
        if growth is not None:
            done = growth.finished
        elif last is None:
            done = file_of(run, "results.json").exists()
        else:
            done = last.get("round", 0) >= last.get("rounds", 0)
        in_use = not done and file_of(run, ".lock").exists() and folder.in_use
        return "finished" if done else "running" if in_use else "stopped"
    except UserError:
        return "stopped"


def last_line(run: Path) -> dict[str, Any] | None:
    """Return the last whole line of metrics.jsonl that can be read. The file is read again if it changed."""
    try:
        path = file_of(run, "metrics.jsonl")
        stat = path.stat()
    except (OSError, UserError):
        return None
    return _last_line(path, stat.st_mtime_ns, stat.st_size)


@lru_cache(maxsize=1024)
def _last_line(path: Path, changed: int, size: int) -> dict[str, Any] | None:
    lines: list[bytes] = []
    try:
        with open(path, "rb") as file:
            for back in _BACK:
                file.seek(max(size - back, 0))
                lines = file.read(back).split(b"\n")[:-1]
                if len(lines) > 1 or back >= size:
                    break
    except OSError:
        return None
    for line in reversed(lines):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict):
            return record
    return None


def _text(run: Path, name: str) -> str | None:
    try:
        return file_of(run, name).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
