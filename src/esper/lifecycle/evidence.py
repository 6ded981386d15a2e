"""What has been measured about each seed. NaN means that it never was: unmeasured is not zero."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from esper.utils.rows import RowRecord, map_tensors


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
    gradient_ratio: Tensor  # (|g_seed| / |g_host|) · sqrt(P_host / P_seed)

    @staticmethod
    def unmeasured(num_members: int, num_slots: int, device: torch.device | str = "cpu") -> SlotEvidence:
        """Nothing is known of any slot."""
        return SlotEvidence(
            **{
                f.name: torch.full((num_members, num_slots), float("nan"), device=device)
                for f in fields(SlotEvidence)
            }
        )

    def forget(self, where: Tensor) -> SlotEvidence:
        """Unmeasured again where True: a new seed inherits nothing.  # where [N, S]"""
        return map_tensors(lambda value: value.masked_fill(where, float("nan")), self)
