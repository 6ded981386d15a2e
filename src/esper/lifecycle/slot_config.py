"""Which slots a host has, and in which order. The order is part of every checkpoint."""

from __future__ import annotations

import re
from dataclasses import dataclass

_SLOT_ID = re.compile(r"r(\d+)c(\d+)")


@dataclass(frozen=True)
class SlotConfig:
    """Ordered slot ids of the form `r{row}c{col}`."""

    slot_ids: tuple[str, ...]

    def __post_init__(self) -> None:
        if not self.slot_ids:
            raise ValueError("slot_ids is empty; give at least one id such as 'r0c0'")
        for slot_id in self.slot_ids:
            if not _SLOT_ID.fullmatch(slot_id):
                raise ValueError(f"slot id is {slot_id!r}; expected r<row>c<col>, for example 'r0c1'")
        doubles = sorted({s for s in self.slot_ids if self.slot_ids.count(s) > 1})
        if doubles:
            raise ValueError(f"slot ids must differ; given more than once: {', '.join(doubles)}")

    @classmethod
    def grid(cls, rows: int, cols: int) -> SlotConfig:
        """A full grid, row by row."""
        if rows < 1 or cols < 1:
            raise ValueError(f"a grid of {rows} x {cols} has no slots; rows and cols must be at least 1")
        return cls(tuple(f"r{r}c{c}" for r in range(rows) for c in range(cols)))

    @property
    def num_slots(self) -> int:
        """How many slots the host has."""
        return len(self.slot_ids)
