"""The records in the files of a run; `run_folder` lists the files.

Numbers are plain Python floats. A number that was never measured, or is not finite, is `null` in a file
and NaN in a record. Intervals are half-widths at 95 %: the mean lies within `mean ± ci`. Accuracy is a
fraction 0..1; contribution is in percentage points.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Annotated, Any, Literal, TypeVar, cast

from pydantic import BeforeValidator, TypeAdapter, ValidationError
from pydantic_core import to_json as to_json_bytes

from esper.utils.errors import UserError
from esper.utils.statistics import paired_interval

NAN = float("nan")
Number = Annotated[float, BeforeValidator(lambda value: NAN if value is None else value)]  # null reads as NaN
Record = TypeVar("Record")
_adapter = cache(TypeAdapter)  # to make one takes longer than many checks
EventKind = Literal[
    "germinated", "stage_changed", "gate_refused", "fossilised", "pruned", "rolled_back", "rate_changed"
]


@dataclass(frozen=True)
class RoundSummary:
    """One round: every member plays one episode, then the controller is updated once."""

    round: int  # 1, 2, ... rounds
    rounds: int  # how many were asked for
    members: int
    member_epochs: int  # since the run began, all members together
    seconds: Number  # wall time since the run began, time before a resume included
    return_mean: Number = NAN  # of the members' episode returns
    return_ci: Number = NAN
    accuracy_mean: Number = NAN  # validation accuracy at the end of the episode
    accuracy_ci: Number = NAN
    parameter_ratio_mean: Number = NAN  # parameters / host parameters at the end
    parameter_ratio_ci: Number = NAN
    op_shares: Mapping[str, Number] = field(default_factory=dict)  # executed op → share of the steps
    op_shares_by_step: Sequence[Sequence[Number]] = ()  # [T][ops], in the order of op_shares
    head_entropy: Mapping[str, Number] = field(default_factory=dict)  # head → 0..1
    policy_loss: Number = NAN
    value_loss: Number = NAN
    entropy: Number = NAN
    kl: Number = NAN
    clip_fraction: Number = NAN
    explained_variance: Number = NAN
    gradient_norm: Number = NAN
    learning_rate: Number = NAN
    extra: Mapping[str, Number] = field(default_factory=dict)  # other curves, by name
    anomalies: Sequence[str] = ()  # one sentence each: rollbacks, returns or gradients that are not finite

    @property
    def member_epochs_per_second(self) -> float:
        """Member-epochs per second since the run began."""
        return self.member_epochs / self.seconds if self.seconds > 0 else NAN

    @property
    def seconds_left(self) -> float:
        """Wall time of the rounds that are left, at the mean pace so far."""
        return self.seconds / self.round * (self.rounds - self.round) if self.round > 0 else NAN

    def scalars(self) -> dict[str, Number]:
        """Return every finite number under one flat name: `op_shares/WAIT`, `kl`, ..."""
        flat: dict[str, Number] = {}
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, Mapping):
                flat.update({f"{f.name}/{key}": float(v) for key, v in value.items()})
            elif isinstance(value, (int, float)):
                flat[f.name] = float(value)
        return {name: value for name, value in flat.items() if math.isfinite(value)}


@dataclass(frozen=True)
class Event:
    """One thing that happened to one member, as one line of events.jsonl.

    `numbers` holds what the decision rested on and what it led to: `contribution` (points), `parameters`
    (of the seed), `age`, `health`, `shadow_gain`, `loss`, ...
    """

    round: int
    step: int
    member: int
    kind: EventKind
    slot: str | None = None
    blueprint: str | None = None
    stage_from: str | None = None
    stage_to: str | None = None
    gate: str | None = None
    numbers: Mapping[str, Number] = field(default_factory=dict)
    rate: str | None = None  # DOUBLE, HALVE or DECAY; `numbers` has the rate as times that of the recipe


@dataclass(frozen=True)
class CurvePoint:
    """Where the networks of an arm stood, on the mean over members."""

    flops: Number  # spent by then
    accuracy: Number  # on validation data
    parameters: Number
    loss: Number = NAN  # on validation data
    seconds: Number = NAN  # of computing, since it began


@dataclass(frozen=True)
class ControllerResult:
    """What one controller reached. Position i of every list is the same member in every controller."""

    name: str
    members: Sequence[int]  # global ids; equal across controllers, so that differences are paired
    test_accuracy: Sequence[Number]
    parameters: Sequence[Number]
    member_epochs: Sequence[Number]
    flops: Sequence[Number]
    potential: Sequence[Number] = ()  # Φ: accuracy less the rent of parameters, or nothing
    curve: Sequence[CurvePoint] = ()  # means over members on the way, or nothing
    test_loss: Sequence[Number] = ()  # of language models, or nothing; less is better
    seconds: Sequence[Number] = ()  # of computing for each member, or nothing


@dataclass(frozen=True)
class PairedDifference:
    """How far `controller` lies above `baseline` in one quantity, member by member."""

    controller: str
    baseline: str
    quantity: str
    mean: Number
    ci: Number
    members: int


@dataclass(frozen=True)
class Comparison:
    """Controllers on equal footing: same initial weights, same data order, same members."""

    task: str
    host: str
    controllers: Sequence[ControllerResult]
    differences: Sequence[PairedDifference]  # `paired_differences(controllers)`
    remarks: Sequence[str] = ()  # on arms that did not do what was asked for, one sentence each
    verdicts: Sequence[str] = ()  # what came out, where more is asked than which arm is more accurate


COMPARED = ("test_loss", "test_accuracy", "parameters", "potential", "flops", "seconds")


def paired_differences(controllers: Sequence[ControllerResult]) -> list[PairedDifference]:
    """Compare every controller with the first, which has the same members, in all quantities of both."""
    found = []
    for other in controllers[1:]:
        baseline = controllers[0]
        for quantity in COMPARED:
            values, base = getattr(other, quantity), getattr(baseline, quantity)
            if values and base:
                gap = paired_interval(values, base)
                found.append(PairedDifference(other.name, baseline.name, quantity, *gap, len(other.members)))
    return found


@dataclass(frozen=True)
class SavedSlot:
    """What a slot of a saved network holds; `blueprint` and what follows are None where it is empty."""

    slot: str
    stage: str
    blueprint: str | None = None
    style: str | None = None
    alpha: Number = NAN
    contribution: Number = NAN  # points of validation accuracy; NaN if it was never measured


@dataclass(frozen=True)
class SavedNetwork:
    """The network that `esper grow` or `esper.grow(out=)` wrote: of several, the best on validation data."""

    task: str
    host: str
    controller: str
    member: int
    members: int  # how many it is the best of
    steps: int
    host_parameters: int
    parameters: int
    validation_accuracy: Number
    test_accuracy: Number
    ungrown_test_accuracy: Number = NAN  # of the same member without growth; NaN if it was not trained
    slots: Sequence[SavedSlot] = ()
    changes: Sequence[str] = ()  # how it differs from its host, in words, what was folded into it included


@dataclass(frozen=True)
class Curve:
    """One training of a model, seen before the first epoch and after each; last, as it ended."""

    name: str  # "grown", or what it is measured against
    score: Sequence[Number]  # [epochs + 1] of validation
    parameters: Sequence[int]  # [epochs + 1]
    flops: Sequence[Number]  # [epochs + 1] of training, since it began


@dataclass(frozen=True)
class Growth:
    """A model of somebody's own that grows by `esper.grow`."""

    model: str  # its class
    controller: str
    score_name: str
    epochs: int  # that were asked for
    finished: bool
    curves: Sequence[Curve]  # the grown one first
    verdicts: Sequence[str] = ()  # what the other curves say about it, a sentence each


def json_values(value: Any) -> Any:
    """Return a record as JSON values: tuples are lists, keys are strings, what is not finite is null."""
    return json.loads(to_json(value))


def to_json(record: Any) -> str:
    """Return one line of strict JSON; arrays and scalars of numpy are taken too."""
    return to_json_bytes(record, inf_nan_mode="null", fallback=lambda value: value.tolist()).decode()


def from_json(kind: type[Record], data: Any, where: str) -> Record:
    """Return a record from JSON values or a line of JSON. A null number is NaN; unknown keys are ignored.

    Raises UserError that names `where` and the first field that does not fit.
    """
    try:
        adapter = _adapter(cast(Any, kind))
        # A line as bytes is parsed and checked in one pass, four times as fast as json.loads and a check.
        return (adapter.validate_json if isinstance(data, bytes) else adapter.validate_python)(data)
    except (ValidationError, RecursionError) as error:
        problem = error.errors()[0] if isinstance(error, ValidationError) else {"loc": (), "msg": "too deep"}
        at = ".".join(map(str, problem["loc"])) or "the record"
        raise UserError(f"{where} does not hold a {kind.__name__}: {at}: {problem['msg']}") from None
