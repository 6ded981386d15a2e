"""The runs under a folder in one line each, read from their files without loading anything heavy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from esper.runs.run_folder import RunFolder
from esper.runs.schema import Comparison, Growth, RoundSummary
from esper.utils.errors import UserError
from esper.utils.settings import parse_yaml

TRAINING_KINDS = ("train", "demo")


@dataclass(frozen=True)
class RunLine:
    """One run: where it is, what it is, how far it came, and its last figures (accuracy in percent)."""

    path: str
    kind: str = ""
    task: str = ""
    state: str = ""
    figures: Mapping[str, float] = field(default_factory=dict)


def list_runs(folder: Path) -> list[RunLine]:
    """Every run folder in `folder`, or `folder` itself if it is one, in the order of their names.

    A folder that cannot be read is listed with the reason as its state; UserError if there is no folder.
    """
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}; begin a run with 'esper train', or say where runs are")
    places = [folder] if (folder / "versions.json").exists() else sorted(folder.iterdir())
    return [describe(place) for place in places if (place / "versions.json").is_file()]


def describe(path: Path) -> RunLine:
    """One run folder as a line."""
    try:
        folder = RunFolder.read(path)
        if not (path / "config.yaml").exists():
            return RunLine(str(path), folder.kind, state="never began")
        settings = parse_yaml(folder.config_text(), str(path / "config.yaml"))
        settings = settings if isinstance(settings, dict) else {}
        rounds, results = folder.metrics(), folder.results()
        growth = folder.growth() if folder.from_python else None
        state = _growing(folder, growth) if folder.from_python else _state(folder, rounds, results, settings)
        figures = _figures(rounds, results) if growth is None else _scores(growth)
        return RunLine(str(path), folder.kind, str(settings.get("task", "")), state, figures)
    except (UserError, TypeError, ValueError) as error:
        return RunLine(str(path), state=f"cannot be read: {error}")


def _growing(folder: RunFolder, growth: Growth | None) -> str:
    """How far an `esper.grow` came."""
    if growth is not None and growth.finished and not folder.in_use:
        return "finished"
    done = len(growth.curves[0].score) - 1 if growth is not None and growth.curves else 0
    of = f" of {growth.epochs}" if growth is not None else ""
    return f"{'running' if folder.in_use else 'stopped'} in epoch {done + 1}{of}"


def _scores(growth: Growth) -> dict[str, float]:
    return {f"{curve.name} {growth.score_name}": curve.score[-1] for curve in growth.curves}


def _state(
    folder: RunFolder, rounds: list[RoundSummary], results: Comparison | None, settings: Mapping[str, Any]
) -> str:
    asked_for = int(settings.get("rounds", 0))
    done = max((summary.round for summary in rounds), default=0)
    trains = folder.kind in TRAINING_KINDS
    progress = f" in round {done + 1} of {asked_for}" if trains and done < asked_for else ""
    if folder.in_use:
        return f"running{progress}"
    finished = (done >= asked_for or not trains) and (folder.kind == "train" or results is not None)
    return "finished" if finished else f"stopped{progress}"


def _figures(rounds: list[RoundSummary], results: Comparison | None) -> dict[str, float]:
    if results is not None:
        return {f"{r.name} %": 100 * float(np.nanmean(r.test_accuracy)) for r in results.controllers}
    if not rounds:
        return {}
    last = rounds[-1]
    figures = {"return": last.return_mean, "validation %": 100 * last.accuracy_mean}
    return figures | {"above twin": last.extra["above_twin"]} if "above_twin" in last.extra else figures
