"""What each blueprint earned, read from the events of a run."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from esper.runs.schema import NAN, Event


@dataclass(frozen=True)
class BlueprintEarnings:
    """The seeds of one blueprint: how many were planted and what became of them."""

    blueprint: str
    planted: int
    kept: int
    taken_out: int
    contributions: list[float]  # of kept seeds, percentage points
    parameters: list[float]  # of the same seeds

    @property
    def fates(self) -> dict[str, int]:
        """What became of the seeds, and how many."""
        unfinished = max(self.planted - self.kept - self.taken_out, 0)
        return {"kept": self.kept, "taken out": self.taken_out, "unfinished": unfinished}


def blueprint_ledger(events: Iterable[Event]) -> list[BlueprintEarnings]:
    """One entry per blueprint, the most planted first. A rollback's seeds count as taken out."""
    by_kind: dict[str, dict[str, list[Event]]] = {}
    for event in events:
        if event.blueprint:
            by_kind.setdefault(event.blueprint, {}).setdefault(event.kind, []).append(event)
    entries = []
    for blueprint, kinds in by_kind.items():
        kept = kinds.get("fossilised", [])
        measured = [event for event in kept if math.isfinite(event.numbers.get("contribution", NAN))]
        entries.append(
            BlueprintEarnings(
                blueprint=blueprint,
                planted=len(kinds.get("germinated", [])),
                kept=len(kept),
                taken_out=len(kinds.get("pruned", [])) + len(kinds.get("rolled_back", [])),
                contributions=[event.numbers["contribution"] for event in measured],
                parameters=[event.numbers.get("parameters", NAN) for event in measured],
            )
        )
    return sorted(entries, key=lambda entry: (-entry.planted, entry.blueprint))
