"""What the page shows of a run besides its rounds: settings, results and outcome."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from esper.runs.console import interval, learning_in_words, number
from esper.runs.files import file_in
from esper.runs.run_folder import RunFolder, flatten
from esper.runs.schema import COMPARED, Comparison, SavedNetwork, json_values
from esper.utils.errors import UserError
from esper.utils.statistics import clear_of_zero, mean_interval
from esper.watch.reading import last_line

_SIGNED = ("versions.json", "config.yaml", "results.json", "network.md", "growth.json", "trajectories")
Read = TypeVar("Read")


def signature(run: Path) -> str:
    """Return a text that changes whenever `facts` would: the page asks again then."""
    marks = []
    for name in _SIGNED:
        try:
            stat = (run / name).stat()
            marks.append(f"{stat.st_mtime_ns}.{stat.st_size}")
        except OSError:
            marks.append("")
    return "/".join([*marks, state(run)])


def last_round(run: Path) -> dict[str, Any] | None:
    """Return the last line of metrics.jsonl; None where it cannot be read or does not number its round."""
    with suppress(UserError):
        line = last_line(file_in(run, "metrics.jsonl")) or {}
        if all(isinstance(line.get(name), int) for name in ("round", "rounds")):
            return line
    return None


def state(run: Path) -> str:
    """Return "finished", "running" or "stopped"; a folder that cannot be read is stopped."""
    last = last_round(run) or {}
    done, rounds = last.get("round", 0), last.get("rounds", 0)
    with suppress(UserError):
        return RunFolder.read(run).state(done, rounds)
    return "stopped"


def facts(run: Path) -> dict[str, Any]:
    """Return everything but the rounds. What is missing is null; what is damaged is listed in `problems`."""
    problems: list[str] = []

    def tried(read: Callable[[], Read]) -> Read | None:
        try:
            return read()
        except UserError as error:
            problems.append(str(error))
            return None

    folder = tried(lambda: RunFolder.read(run)) or RunFolder(run, {})
    found = {
        "kind": tried(lambda: folder.kind),
        "about": folder.about,
        "command": tried(folder.command_text),
        "config": json_values(flatten(tried(folder.settings) or {})),
        "results": _results(tried(folder.results)),
        "network": tried(lambda: _text(run, "network.md")),
        "growth": json_values(tried(folder.growth)),
        "trajectories": tried(lambda: file_in(run, "trajectories") and folder.trajectories.rounds()) or [],
        "outcome": tried(lambda: outcome(folder)) or _outcome([]),
    }
    for name in ("metrics.jsonl", "events.jsonl"):  # what reads them elsewhere says nothing of links
        tried(lambda name=name: file_in(run, name))  # type: ignore[misc]
    return {**found, "problems": list(dict.fromkeys(problems))}


def _text(run: Path, name: str) -> str | None:
    with suppress(OSError):
        return file_in(run, name).read_text(encoding="utf-8", errors="replace")
    return None


def _results(results: Comparison | None) -> dict[str, Any] | None:
    """Return a comparison as JSON, with the mean and the interval of every quantity of every controller."""
    if results is None:
        return None
    found: dict[str, Any] = json_values(results)
    for entry, controller in zip(found["controllers"], results.controllers, strict=True):
        pairs = {quantity: mean_interval(getattr(controller, quantity)) for quantity in COMPARED}
        entry["figures"] = json_values({name: {"mean": mean, "ci": ci} for name, (mean, ci) in pairs.items()})
    return found


def outcome(folder: RunFolder) -> dict[str, Any]:
    """Return `sentences`, the verdict first, what `grew`, and the `story`; empty while a run is not over."""
    # What counts is the last thing that the run was for: a growth, a network, a comparison, a training.
    growth, network, results = folder.growth(), folder.network(), folder.results()
    grew = [] if network is None else _grew(network, "accuracy" if growth is None else growth.score_name)
    if growth is not None:
        if not growth.finished or not growth.curves:
            return _outcome([])
        grown = growth.curves[0]
        first, last = grown.parameters[0], grown.parameters[-1]
        began = f"; it began with {first:,}" if first != last else ", as many as it began with"
        score = f"{growth.score_name} of {number(grown.score[-1], '.3f')}"
        verdict = f"The model reached a validation {score} with {last:,} parameters{began}."
        story = (_text(folder.path, "network.md") or "").split("```")[0].strip()
        return _outcome([verdict, *map(_sentence, growth.verdicts)], grew, story)
    sentences = []
    if network is not None:
        sentences.append(
            f"The saved network has {number(network.test_accuracy, '.1%')} test accuracy with "
            f"{network.parameters:,} parameters; the same member without growth has "
            f"{number(network.ungrown_test_accuracy, '.1%')} with {network.host_parameters:,}."
        )
    if results is not None:
        sentences += [*comparison_verdicts(results), *map(_sentence, results.remarks)]
    if results is None and folder.kind == "train" and state(folder.path) == "finished":
        sentences.append(learning_in_words(folder.metrics_file))
    return _outcome(sentences, grew)


def _outcome(sentences: list[str], grew: Sequence[str] = (), story: str | None = None) -> dict[str, Any]:
    return {"sentences": sentences, "grew": list(grew), "story": story}


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:].removesuffix(".") + "."


def comparison_verdicts(results: Comparison) -> list[str]:
    """Return how each controller's test accuracy compares with that of the first, the most accurate first.

    A difference counts as clear if all intervals hold at once. A comparison with verdicts has said it all.
    """
    if results.verdicts:
        return list(results.verdicts)
    gaps = sorted((d for d in results.differences if d.quantity == "test_accuracy"), key=lambda d: -d.mean)
    sentences = []
    for gap in gaps:
        clear = clear_of_zero(gap.mean, gap.ci, gap.members, len(gaps))
        word = "not clearly apart from" if not clear else "above" if gap.mean > 0 else "below"
        points = interval(100 * gap.mean, 100 * gap.ci, "+.1f")
        sentences.append(f"{gap.controller} is {word} {gap.baseline}: {points} points of test accuracy.")
    return sentences


def _grew(network: SavedNetwork, score: str) -> list[str]:
    """Return what grew in a network, a line for each."""
    lines = list(network.changes)
    for slot in network.slots:
        if slot.blueprint is not None:
            way = "falls" if slot.contribution >= 0 else "rises"
            points = f"{way} by {abs(slot.contribution):.1f} points if it is removed"
            effect = f": the validation {score} {points}" if math.isfinite(slot.contribution) else ""
            lines.append(f"{slot.blueprint} at {slot.slot}{effect}")
    if not lines and network.parameters == network.host_parameters:
        return ["nothing: the network has the size that it began with"]
    return lines
