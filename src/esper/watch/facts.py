"""What the page is told of a run besides its rounds: what it is, its settings and its results."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import yaml

from esper.runs.console import interval, learning_in_words, number
from esper.runs.run_folder import RunFolder
from esper.runs.run_list import TRAINING_KINDS
from esper.runs.schema import (
    COMPARED,
    Comparison,
    Growth,
    SavedNetwork,
    differences_from_growers,
    json_values,
)
from esper.utils.errors import UserError
from esper.utils.statistics import clear_of_zero, mean_interval
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
        "outcome": tried(lambda: outcome(folder)) or NO_OUTCOME,
        "lanes": tried(lambda: file_of(run, "lanes") and folder.lanes.rounds()) or [],
        "problems": list(dict.fromkeys(problems)),
    }


NO_OUTCOME: dict[str, Any] = {"sentences": [], "grew": [], "story": None}


def outcome(folder: RunFolder) -> dict[str, Any]:
    """Return what came of a run: `sentences`, the verdict first; what `grew`; the `story` of a growth.

    Nothing is said of a run that is still going on.
    """
    for name in ("growth.json", "network.json", "results.json", "metrics.jsonl"):
        file_of(folder.path, name)
    growth, network, results = folder.growth(), folder.network(), folder.results()
    if growth is not None:
        if not growth.finished or not growth.curves:
            return NO_OUTCOME
        sentences = [_growth_verdict(growth), *map(_sentence, growth.verdicts)]
    else:
        sentences = [] if network is None else [_network_verdict(network)]
        if results is not None:
            sentences += [*comparison_verdicts(results), *map(_sentence, results.remarks)]
        last = last_line(folder.path)
        if last is not None and folder.kind in TRAINING_KINDS and state(folder.path, last) == "finished":
            sentences.append(learning_in_words(folder.metrics()))
    score = "accuracy" if growth is None else growth.score_name
    story = None if growth is None else (_text(folder.path, "network.md") or "").split("```")[0].strip()
    return {"sentences": sentences, "grew": [] if network is None else _grew(network, score), "story": story}


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:].removesuffix(".") + "."


def _growth_verdict(growth: Growth) -> str:
    grown = growth.curves[0]
    first, last = grown.parameters[0], grown.parameters[-1]
    began = f"; it began with {first:,}" if first != last else ", as many as it began with"
    score = f"{growth.score_name} of {number(grown.score[-1], '.3f')}"
    return f"The grown model reached a validation {score} with {last:,} parameters{began}."


def _network_verdict(network: SavedNetwork) -> str:
    return (
        f"The saved network has {number(network.test_accuracy, '.1%')} test accuracy with "
        f"{network.parameters:,} parameters; the same member without growth has "
        f"{number(network.ungrown_test_accuracy, '.1%')} with {network.host_parameters:,}."
    )


def comparison_verdicts(results: Comparison) -> list[str]:
    """Return how each controller's test accuracy compares with that of the first, the most accurate first.

    A difference counts as clear if all intervals hold at once.
    """
    gaps = sorted((d for d in results.differences if d.quantity == "test_accuracy"), key=lambda d: -d.mean)
    sentences = []
    for gap in gaps:
        clear = clear_of_zero(gap.mean, gap.ci, gap.members, len(gaps))
        word = "not clearly apart from" if not clear else "above" if gap.mean > 0 else "below"
        points = interval(100 * gap.mean, 100 * gap.ci, "+.1f")
        sentences.append(f"{gap.controller} is {word} {gap.baseline}: {points} points of test accuracy.")
    return sentences


def _grew(network: SavedNetwork, score: str) -> list[str]:
    """Return what grew in a network, a line for each, or why there is nothing to tell."""
    lines = list(network.changes)
    for slot in network.slots:
        if slot.blueprint is None:
            continue
        line = f"{slot.blueprint} at {slot.slot}"
        if math.isfinite(slot.contribution):
            way = "falls" if slot.contribution >= 0 else "rises"
            line += f": the validation {score} {way} by {abs(slot.contribution):.1f} points if it is removed"
        lines.append(line)
    if not lines and network.parameters == network.host_parameters:
        return ["nothing: the network has the size that it began with"]
    return lines


def _results(results: Comparison | None) -> dict[str, Any] | None:
    """A comparison as JSON, with the mean and the interval of every quantity of every controller."""
    if results is None:
        return None
    found: dict[str, Any] = json_values(results)
    found["differences"] += json_values(differences_from_growers(results.controllers))
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
