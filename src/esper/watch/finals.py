"""The final figures of several runs, and how far each lies from the first."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from esper.foundation.errors import UserError
from esper.foundation.statistics import mean_interval
from esper.telemetry.lanes import LanesFolder
from esper.telemetry.schema import NAN
from esper.watch.facts import last_line, settings_of

QUANTITIES = ("return", "accuracy", "parameter_ratio")
_SAME = ("seed", "task", "task_seed")  # settings that make member i of two runs the same member


@dataclass(frozen=True)
class Figure:
    """A mean with its 95 % half-width."""

    mean: float
    ci: float


@dataclass(frozen=True)
class Final:
    """Where a run stands: its last round, and that round's figures."""

    name: str
    round: int
    figures: Mapping[str, Figure]
    rows: Mapping[str, NDArray[np.float64]]  # quantity → [N], where the round's lanes are on disk
    members: tuple[int, ...]
    origin: tuple[Any, ...]  # runs of equal origin have the same members


@dataclass(frozen=True)
class Difference:
    """How far `name` lies above `baseline`."""

    name: str
    baseline: str
    quantity: str
    mean: float
    ci: float
    paired: bool  # member by member; else the two intervals are combined as independent


def final_of(name: str, run: Path) -> Final | None:
    """The final figures of a run, or None where no round was finished."""
    last = last_line(run / "metrics.jsonl")
    if last is None or not isinstance(last.get("round"), int):
        return None
    try:
        config = settings_of(run / "config.yaml")
    except UserError:
        config = {}
    number = int(last["round"])
    rows, members = _rows(LanesFolder(run / "lanes"), number)
    figures = {q: Figure(_number(last.get(f"{q}_mean")), _number(last.get(f"{q}_ci"))) for q in QUANTITIES}
    origin = (number, *(config.get(key) for key in _SAME), *_host(config))
    return Final(name, number, figures, rows, members, origin)


def differences(finals: Sequence[Final]) -> list[Difference]:
    """Every run against the first one, in every quantity that both have."""
    return [
        _difference(final, finals[0], quantity)
        for final in finals[1:]
        for quantity in QUANTITIES
        if math.isfinite(final.figures[quantity].mean - finals[0].figures[quantity].mean)
    ]


def _difference(final: Final, base: Final, quantity: str) -> Difference:
    paired = final.origin == base.origin and final.members == base.members
    if paired and quantity in final.rows and quantity in base.rows:
        mean, ci = mean_interval((final.rows[quantity] - base.rows[quantity]).tolist())
        return Difference(final.name, base.name, quantity, mean, ci, True)
    mine, other = final.figures[quantity], base.figures[quantity]
    return Difference(
        final.name, base.name, quantity, mine.mean - other.mean, math.hypot(mine.ci, other.ci), False
    )


def _rows(lanes: LanesFolder, number: int) -> tuple[dict[str, NDArray[np.float64]], tuple[int, ...]]:
    if number not in lanes.rounds():
        return {}, ()
    try:
        columns = lanes.columns(number)
        parameters = columns["parameters"].astype(np.float64)
        rows = {
            "return": columns["returns"].astype(np.float64),
            "accuracy": columns["accuracy"][-1].astype(np.float64),
            "parameter_ratio": parameters[-1] / parameters[0],
        }
        return rows, tuple(columns["members"].tolist())
    except (UserError, KeyError, IndexError):
        return {}, ()


def _host(config: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return sorted((key, value) for key, value in config.items() if key.startswith("host."))


def _number(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) else NAN
