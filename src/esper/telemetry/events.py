"""What happened to a slot, with the numbers behind it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from esper.telemetry.schema import Number

EventKind = Literal["germinated", "stage_changed", "gate_refused", "fossilised", "pruned", "rolled_back"]
EVENT_KINDS: tuple[str, ...] = get_args(EventKind)


@dataclass(frozen=True)
class Event:
    """One thing that happened to one member, as one line of events.jsonl.

    `numbers` holds what the decision rested on and what it led to: `contribution` (points), `parameters`
    (of the seed), `age`, `health`, `shadow_gain`, `loss`, ... The report reads the first three.
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

    def __post_init__(self) -> None:
        if self.kind not in EVENT_KINDS:
            raise ValueError(f"event kind is {self.kind!r}; allowed are {', '.join(EVENT_KINDS)}")
