"""The records of a run, and the files that hold them.

    metrics.jsonl   one `RoundSummary` per line
    events.jsonl    one `Event` per line (see `events`)
    film.json       one `FilmReel`: what happened in the slots of a few members of the latest round
    results.json    one `Comparison`: controllers on equal footing, member by member

Numbers are plain Python floats. A number that was never measured, or is not finite, is `null` in a file
and NaN in a record. Intervals are half-widths at 95 %: the mean lies within `mean ± ci`. Accuracy is a
fraction 0..1; contribution is in percentage points.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, TypeVar

from esper.errors import UserError

NAN = float("nan")
Record = TypeVar("Record")


@dataclass(frozen=True)
class RoundSummary:
    """One round: every member lived one episode, and the controller was improved once."""

    round: int  # 1, 2, ... rounds
    rounds: int  # how many were asked for
    members: int
    member_epochs: int  # since the run began, all members together
    seconds: float  # wall time since the run began, time before a resume included
    return_mean: float = NAN  # of the members' episode returns
    return_ci: float = NAN
    accuracy_mean: float = NAN  # validation accuracy at the end of the episode
    accuracy_ci: float = NAN
    parameter_ratio_mean: float = NAN  # parameters / host parameters at the end
    parameter_ratio_ci: float = NAN
    op_shares: Mapping[str, float] = field(default_factory=dict)  # executed op → share of the steps
    op_shares_by_step: Sequence[Sequence[float]] = ()  # [T][ops], in the order of op_shares
    head_entropy: Mapping[str, float] = field(default_factory=dict)  # head → 0..1
    policy_loss: float = NAN
    value_loss: float = NAN
    entropy: float = NAN
    kl: float = NAN
    clip_fraction: float = NAN
    explained_variance: float = NAN
    gradient_norm: float = NAN
    learning_rate: float = NAN
    extra: Mapping[str, float] = field(default_factory=dict)  # anything else worth a curve, by name
    anomalies: Sequence[str] = ()  # one sentence each: rollbacks, non-finite losses, early stops

    @property
    def member_epochs_per_second(self) -> float:
        return self.member_epochs / self.seconds if self.seconds > 0 else NAN

    @property
    def seconds_left(self) -> float:
        return self.seconds / self.round * (self.rounds - self.round) if self.round > 0 else NAN

    def scalars(self) -> dict[str, float]:
        """Every number under one flat name, for sinks that draw curves: `op_shares/WAIT`, `kl`, ..."""
        flat: dict[str, float] = {}
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, Mapping):
                flat.update({f"{f.name}/{key}": float(v) for key, v in value.items()})
            elif isinstance(value, (int, float)):
                flat[f.name] = float(value)
        return {name: value for name, value in flat.items() if math.isfinite(value)}


@dataclass(frozen=True)
class Film:
    """The life of one member's slots. Row t is the state right after the action of step t was applied."""

    member: int
    title: str  # what the viewer should know it by: "best", "typical", "worst", ...
    slots: Sequence[str]  # [S] slot ids
    stage: Sequence[Sequence[int]]  # [T][S]
    alpha: Sequence[Sequence[float]]  # [T][S]
    blueprint: Sequence[Sequence[int]]  # [T][S], -1 where there is no seed
    op: Sequence[int]  # [T] the op that was asked for
    op_slot: Sequence[int]  # [T] the slot it was asked for
    succeeded: Sequence[bool]  # [T] False: illegal, or refused by a gate
    accuracy: Sequence[float] = ()  # [T] validation accuracy, or nothing
    parameter_ratio: Sequence[float] = ()  # [T] parameters / host parameters, or nothing

    @property
    def steps(self) -> int:
        return len(self.op)


@dataclass(frozen=True)
class FilmReel:
    """A few films and the names of the numbers in them."""

    stage_names: Mapping[int, str]
    op_names: Mapping[int, str]
    blueprint_names: Mapping[int, str]
    films: Sequence[Film]
    round: int = 0  # the round that was filmed; 0 outside a training run


@dataclass(frozen=True)
class ControllerResult:
    """What one controller reached. Position i of every list is the same member in every controller."""

    name: str
    members: Sequence[int]  # global ids; equal across controllers, so that differences are paired
    test_accuracy: Sequence[float]
    parameters: Sequence[float]
    member_epochs: Sequence[float]
    flops: Sequence[float]


@dataclass(frozen=True)
class PairedDifference:
    """How far `controller` lies above `baseline` in one quantity, member by member."""

    controller: str
    baseline: str
    quantity: str
    mean: float
    ci: float
    members: int


@dataclass(frozen=True)
class Comparison:
    """Controllers on equal footing: same initial weights, same data order, same members."""

    task: str
    host: str
    controllers: Sequence[ControllerResult]
    differences: Sequence[PairedDifference]  # `statistics.paired_differences(controllers)`


def plain(value: Any) -> Any:
    """A record as JSON values: tuples are lists, keys are strings, what is not finite is null."""
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(v) for key, v in value.items()}
    if isinstance(value, (str, bool)) or value is None:
        return value
    if isinstance(value, Sequence):
        return [plain(v) for v in value]
    if hasattr(value, "tolist"):  # arrays and numpy scalars
        return plain(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value


def to_json(record: Any) -> str:
    """One line of strict JSON."""
    return json.dumps(plain(record), ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _numbers(value: Any) -> Any:
    """The inverse of `plain` for numbers: null is NaN again."""
    if value is None:
        return NAN
    if isinstance(value, list):
        return [_numbers(v) for v in value]
    if isinstance(value, dict):
        return {key: _numbers(v) for key, v in value.items()}
    return value


def _read(kind: type[Record], data: Any, where: str) -> dict[str, Any]:
    """The known fields of a record; keys that a later version added are left out."""
    if not isinstance(data, dict):
        raise UserError(f"{where} holds {type(data).__name__} where a {kind.__name__} was expected")
    known = [f.name for f in fields(kind)]  # type: ignore[arg-type]
    return {name: _numbers(data[name]) for name in known if name in data}


def _build(kind: type[Record], values: dict[str, Any], where: str) -> Record:
    try:
        return kind(**values)
    except TypeError as error:
        raise UserError(f"{where} is not a whole {kind.__name__}: {error}") from None


def round_summary_from(data: Any, where: str = "metrics.jsonl") -> RoundSummary:
    return _build(RoundSummary, _read(RoundSummary, data, where), where)


def film_reel_from(data: Any, where: str = "film.json") -> FilmReel:
    values = _read(FilmReel, data, where)
    names = ("stage_names", "op_names", "blueprint_names")
    try:
        values |= {name: {int(k): str(v) for k, v in values[name].items()} for name in names}
        values["films"] = [_build(Film, _read(Film, film, where), where) for film in values["films"]]
    except (KeyError, AttributeError, TypeError, ValueError) as error:
        raise UserError(f"{where} is not a whole FilmReel: {error}") from None
    return _build(FilmReel, values, where)


def comparison_from(data: Any, where: str = "results.json") -> Comparison:
    values = _read(Comparison, data, where)
    parts: tuple[tuple[str, type[Any]], ...] = (
        ("controllers", ControllerResult),
        ("differences", PairedDifference),
    )
    for name, kind in parts:
        rows = values.get(name, [])
        if not isinstance(rows, list):
            raise UserError(f"{where} holds no list of {name}")
        values[name] = [_build(kind, _read(kind, row, where), where) for row in rows]
    return _build(Comparison, values, where)
