"""Slots as structs of arrays: their ids, their states, and what was measured of their seeds."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import IntEnum

import torch
from torch import Tensor

from esper.lifecycle.actions import Tempo
from esper.lifecycle.stages import SEED_STAGES, Stage
from esper.utils.rows import RowRecord


@dataclass(frozen=True)
class SlotConfig:
    """Ordered slot ids of the form `r{row}c{col}`."""

    slot_ids: tuple[str, ...]

    @classmethod
    def grid(cls, rows: int, cols: int) -> SlotConfig:
        """Return a full grid, row by row."""
        return cls(tuple(f"r{r}c{c}" for r in range(rows) for c in range(cols)))

    @property
    def num_slots(self) -> int:
        return len(self.slot_ids)


NO_BLUEPRINT = -1


class AlphaMode(IntEnum):
    """Whether alpha rests or moves."""

    HOLD = 0
    UP = 1
    DOWN = 2


# What a slot holds without a seed: 0, or False, but for these.
BLANK_SLOT = {
    "stage": int(Stage.DORMANT),
    "blueprint": NO_BLUEPRINT,
    "tempo": int(Tempo.STANDARD),
    "enabled": True,
}
_FLOATS = ("alpha", "alpha_start", "alpha_target")
_FLAGS = ("prune_pending", "enabled")


@dataclass(frozen=True)
class SlotStates(RowRecord):
    """The slots of N members. Every field is [N, S]; integers are int64, alphas float32.

    States are values: the rules return new ones and never write into the old.
    """

    stage: Tensor
    blueprint: Tensor  # -1 where there is no seed
    style: Tensor
    tempo: Tensor
    alpha: Tensor
    alpha_start: Tensor
    alpha_target: Tensor
    alpha_mode: Tensor
    alpha_curve: Tensor
    alpha_steps_total: Tensor
    alpha_steps_done: Tensor
    age: Tensor  # ticks since germination
    epochs_in_stage: Tensor  # ticks since the stage was entered
    prune_pending: Tensor  # a ramp to 0 that ends in PRUNED
    room: Tensor  # how many fossils can still become part of the host; 0: a fossil keeps its slot
    enabled: Tensor

    @staticmethod
    def empty(num_members: int, num_slots: int, device: torch.device | str = "cpu") -> SlotStates:
        """Return N members whose slots are all DORMANT and enabled."""

        def blank(name: str) -> Tensor:
            dtype = torch.float32 if name in _FLOATS else torch.bool if name in _FLAGS else torch.long
            return torch.full((num_members, num_slots), BLANK_SLOT.get(name, 0), dtype=dtype, device=device)

        return SlotStates(**{field.name: blank(field.name) for field in fields(SlotStates)})

    @property
    def num_members(self) -> int:
        return self.stage.shape[0]

    @property
    def num_slots(self) -> int:
        return self.stage.shape[1]

    @property
    def device(self) -> torch.device:
        return self.stage.device

    def check(self) -> None:
        """Refuse stages that no rule can produce. Reads the tensors back: for entrances, not for steps."""
        known = torch.tensor([int(s) for s in Stage], device=self.device)
        bad = self.stage[~torch.isin(self.stage, known)]
        if bad.numel():
            names = ", ".join(f"{s.name} {s.value}" for s in Stage)
            raise ValueError(f"stage is {int(bad[0])}; allowed are {names} (5 is retired)")
        seeds = torch.isin(self.stage, torch.tensor([int(s) for s in SEED_STAGES], device=self.device))
        # A stage with a seed and a blueprint come together or not at all.
        odd = (seeds != (self.blueprint != NO_BLUEPRINT)).nonzero().tolist()
        if odd:
            member, slot = odd[0]
            stage, blueprint = int(self.stage[member, slot]), int(self.blueprint[member, slot])
            raise ValueError(f"member {member}, slot {slot} is in stage {stage} with blueprint {blueprint}")
        shut = (~self.enabled.any(dim=1)).nonzero().flatten().tolist()
        if shut:
            raise ValueError(f"member {shut[0]} has no enabled slot; every member needs at least one")


@dataclass(frozen=True)
class SlotEvidence(RowRecord):
    """Measurements of every slot, each [N, S] float32, NaN where there is none."""

    contribution: Tensor  # validation accuracy lost without the seed, in percentage points
    contribution_velocity: Tensor  # moving average of its change per tick, points
    contribution_age: Tensor  # ticks since it was measured
    interaction: Tensor  # never measured; a column of the features that stored controllers were trained with
    shadow_gain: Tensor  # validation accuracy gained if an isolated seed were adopted now, points
    gradient_norm: Tensor
    gradient_health: Tensor  # 0..1
    previous_health: Tensor  # the health before the latest one
    vanishing: Tensor  # share of the seed's tensors whose gradient vanishes
    exploding: Tensor  # share whose gradient explodes or is not finite

    @staticmethod
    def unmeasured(num_members: int, num_slots: int, device: torch.device | str = "cpu") -> SlotEvidence:
        """Return evidence without any measurement."""
        shape = len(fields(SlotEvidence)), num_members, num_slots
        return SlotEvidence(*torch.full(shape, float("nan"), device=device))

    def forget(self, where: Tensor) -> SlotEvidence:
        """Forget the measurements where True: a new seed inherits nothing.  # where [N, S]"""
        return SlotEvidence(*torch.stack([*self.tensors().values()]).masked_fill(where, float("nan")))
