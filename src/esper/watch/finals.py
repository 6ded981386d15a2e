"""The final figures of several runs, and how far each lies from the first."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from esper.runs.schema import NAN, Growth
from esper.utils.errors import UserError
from esper.utils.statistics import mean_interval, proportion_half
from esper.watch.facts import growth_of, last_line, read_run, settings_of
from esper.watch.library import lanes_of

QUANTITIES = ("return", "accuracy", "parameter_ratio")
# Settings that make member i of two runs the same member; those of a growth from Python are behind them.
_SAME = ("seed", "task", "task_seed", "model.parameters", "train", "val")
PAIRED = "member by member"
UNPAIRED = "unpaired: other members"
BY_SAMPLES = "one model each: chance of the validation samples, not of another seed"
ALONE = "one model each: no interval"


Read = TypeVar("Read")


@dataclass(frozen=True)
class Figure:
    """A mean with its 95 % half-width."""

    mean: float
    ci: float


@dataclass(frozen=True)
class Final:
    """Where a run stands: its last round, and that round's figures; of a growth, the last epoch's."""

    name: str
    round: int
    figures: Mapping[str, Figure]
    rows: Mapping[str, NDArray[np.float64]]  # quantity → [N], where the round's lanes are on disk
    members: tuple[int, ...]
    origin: tuple[Any, ...]  # runs of equal origin have the same members
    score: str = "accuracy"  # what the figure `accuracy` is


@dataclass(frozen=True)
class Difference:
    """How far `name` lies above `baseline`."""

    name: str
    baseline: str
    quantity: str
    mean: float
    ci: float
    basis: str  # of the interval, in words


def final_figures(runs: Mapping[str, Path]) -> dict[str, Any]:
    """Return the final figures of some runs, and the differences of each from the first."""
    finals = [final for name, run in runs.items() if (final := final_of(name, run)) is not None]
    shown = ("name", "round", "score", "figures")
    rows = [{name: getattr(final, name) for name in shown} for final in finals]
    return {"rows": rows, "differences": differences(finals)}


def final_of(name: str, run: Path) -> Final | None:
    """The final figures of a run, or None where no round was finished."""
    last = last_line(run)
    if last is None or not isinstance(last.get("round"), int):
        return None
    config = _tried(lambda: settings_of(run)) or {}
    growth = _tried(lambda: growth_of(read_run(run)))
    number = int(last["round"])
    rows, members = _rows(run, number if growth is None else 0)
    figures = {q: Figure(_number(last.get(f"{q}_mean")), _number(last.get(f"{q}_ci"))) for q in QUANTITIES}
    host = sorted((key, value) for key, value in config.items() if key.startswith("host."))
    same = (*(config.get(key) for key in _SAME), *host)
    if growth is None:
        return Final(name, number, figures, rows, members, (number, *same))
    rows = {quantity: rows[quantity] for quantity in rows if quantity != "return"}  # it was paid nothing
    figures |= {quantity: _figure(quantity, values, growth) for quantity, values in rows.items()}
    return Final(name, number, figures, rows, members, same, growth.score_name)


def _figure(quantity: str, rows: NDArray[np.float64], growth: Growth) -> Figure:
    """Of the members of a growth; of a single one, by the samples that its accuracy is a share of."""
    mean, ci = mean_interval(rows.tolist())
    if len(rows) == 1 and quantity == growth.score_name == "accuracy":
        ci = proportion_half(mean, growth.validation_samples)
    return Figure(mean, ci)


def differences(finals: Sequence[Final]) -> list[Difference]:
    """Every run against the first one, in every quantity that both have."""
    return [
        _difference(final, finals[0], quantity)
        for final in finals[1:]
        for quantity in QUANTITIES
        if quantity != "accuracy" or final.score == finals[0].score
        if math.isfinite(final.figures[quantity].mean - finals[0].figures[quantity].mean)
    ]


def _difference(final: Final, base: Final, quantity: str) -> Difference:
    paired = final.origin == base.origin and final.members == base.members and len(base.members) > 1
    called = final.score if quantity == "accuracy" else quantity
    if paired and quantity in final.rows and quantity in base.rows:
        mean, ci = mean_interval((final.rows[quantity] - base.rows[quantity]).tolist())
        return Difference(final.name, base.name, called, mean, ci, PAIRED)
    mine, other = final.figures[quantity], base.figures[quantity]
    ci = math.hypot(mine.ci, other.ci)
    single = len(final.members) == 1 or len(base.members) == 1
    basis = UNPAIRED if not single else BY_SAMPLES if math.isfinite(ci) else ALONE
    return Difference(final.name, base.name, called, mine.mean - other.mean, ci, basis)


def _rows(run: Path, number: int) -> tuple[dict[str, NDArray[np.float64]], tuple[int, ...]]:
    try:
        columns = lanes_of(run, number).columns(number)
        parameters = columns["parameters"].astype(np.float64)
        rows = {
            "return": columns["returns"].astype(np.float64),
            "accuracy": columns["accuracy"][-1].astype(np.float64),
            "parameter_ratio": parameters[-1] / parameters[0],
        }
        return rows, tuple(columns["members"].tolist())
    except (UserError, KeyError, IndexError):
        return {}, ()


def _tried(read: Callable[[], Read]) -> Read | None:
    try:
        return read()
    except UserError:
        return None


def _number(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) else NAN
