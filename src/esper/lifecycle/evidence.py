"""What has been measured about each seed. NaN means that it never was: unmeasured is not zero."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class SlotEvidence:
    """Measurements of every slot, each [N, S] float32, NaN where there is none."""

    contribution: Tensor  # validation accuracy lost without the seed, in percentage points
    contribution_velocity: Tensor  # moving average of its change per tick, points
    contribution_age: Tensor  # ticks since it was measured
    interaction: Tensor  # contribution in company minus contribution alone, points
    shadow_gain: Tensor  # validation accuracy gained if an isolated seed were adopted now, points
    gradient_norm: Tensor
    gradient_health: Tensor  # 0..1
    previous_health: Tensor  # the health before the latest one
    vanishing: Tensor  # share of the seed's tensors whose gradient vanishes
    exploding: Tensor  # share whose gradient explodes or is not finite
    gradient_ratio: Tensor  # (|g_seed| / |g_host|) · sqrt(P_host / P_seed)

    @staticmethod
    def unmeasured(num_members: int, num_slots: int, device: torch.device | str = "cpu") -> SlotEvidence:
        return SlotEvidence(
            **{
                f.name: torch.full((num_members, num_slots), float("nan"), device=device)
                for f in fields(SlotEvidence)
            }
        )

    def replace(self, **changes: Tensor) -> SlotEvidence:
        return replace(self, **changes)

    def forget(self, where: Tensor) -> SlotEvidence:
        """Unmeasured again where True: a new seed inherits nothing.  # where [N, S]"""
        return SlotEvidence(
            **{name: value.masked_fill(where, float("nan")) for name, value in self.tensors().items()}
        )

    def tensors(self) -> dict[str, Tensor]:
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @staticmethod
    def from_tensors(tensors: Mapping[str, Tensor]) -> SlotEvidence:
        """The inverse of `tensors`, checked: this is where a stranger's file comes in."""
        names = {f.name for f in fields(SlotEvidence)}
        missing, unknown = sorted(names - set(tensors)), sorted(set(tensors) - names)
        if missing or unknown:
            raise ValueError(f"evidence lacks {missing or 'nothing'} and has unknown {unknown or 'nothing'}")
        shapes = {name: tuple(t.shape) for name, t in tensors.items()}
        if len(set(shapes.values())) != 1 or len(next(iter(shapes.values()))) != 2:
            raise ValueError(f"evidence must share one shape [members, slots]; given {shapes}")
        bad_dtype = {n: str(t.dtype) for n, t in tensors.items() if t.dtype != torch.float32}
        if bad_dtype:
            raise ValueError(f"evidence has wrong types {bad_dtype}; expected torch.float32")
        return SlotEvidence(**dict(tensors))
