"""The end of a growth: every seed is kept at full strength or taken out, by one stated test.

The validation data are dealt into 20 blocks. On each block the score of the network is measured with and
without a seed, all others being there at full strength. A seed earns its place if the mean of the differences
is above 0 at 99 % by a one-sided t test. The seed that is furthest from passing is taken out first and the
others are measured again, until all that are left pass. From the second on, a seed also stays if it and those
that were taken out before it are shown in the same way to help together: several losses that are each within
the noise can add up to one that is not. The 1 % is divided by the number of these tests: one for each seed
that was planted in that network, and one more for each that lives at the end, but for the first. What cannot
be shown to help is taken out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from scipy.special import stdtrit
from torch import Tensor

from esper.lifecycle.slot_states import SlotStates
from esper.lifecycle.stages import Stage
from esper.simic.bodies import BlockScores

LEVEL = 0.01  # the chance, for a whole network, that a useless seed stays
BLOCKS = 20  # into which the validation data are dealt


Measure = Callable[[Tensor], BlockScores]  # of networks with the seeds of a mask  # kept [N, S] bool


@dataclass(frozen=True)
class Decision:
    """Which seeds stay, and the evidence: points of score, NaN where no seed was."""

    kept: Tensor  # [N, S] bool
    worth: Tensor  # [N, S] mean gain over the blocks when it was last measured
    surely: Tensor  # [N, S] the lower bound of the gain, alone or together; above 0 where a seed stays


def decide_seeds(measure: Measure, alive: Tensor, planted: Tensor) -> Decision:
    """Decide every living seed.  # alive [N, S] bool, planted [N] how many seeds each network has had"""
    kept, level = alive.clone(), LEVEL / (planted + alive.sum(dim=1) - 1).clamp(min=1)
    worth, surely = (torch.full(alive.shape, float("nan"), device=alive.device) for _ in range(2))
    all_alive: Tensor | None = None  # [blocks, N] the score with every seed
    while bool(kept.any()):
        scores = measure(kept)
        all_alive = scores.whole if all_alive is None else all_alive
        together = (all_alive - scores.whole).unsqueeze(2) + scores.worth  # [blocks, N, S]
        mean, low = lower_bounds(scores.worth, level)
        low = torch.maximum(low, lower_bounds(together, level)[1])
        worth, surely = torch.where(kept, mean, worth), torch.where(kept, low, surely)
        worst = low.nan_to_num(-torch.inf).masked_fill(~kept, torch.inf).min(dim=1, keepdim=True)
        out = torch.zeros_like(kept).scatter(1, worst.indices, worst.values <= 0)
        if not bool(out.any()):
            break
        kept = kept & ~out
    return Decision(kept, worth, surely)


def lower_bounds(gains: Tensor, level: Tensor) -> tuple[Tensor, Tensor]:
    """The mean over blocks and its one-sided lower bound.  # gains [B, N, S], level [N] → [N, S], [N, S]

    Fewer than two blocks show nothing: the bound is NaN.
    """
    blocks = gains.shape[0]
    mean = gains.mean(dim=0)
    if blocks < 2:
        return mean, torch.full_like(mean, float("nan"))
    quantile = torch.from_numpy(stdtrit(blocks - 1, 1.0 - level.cpu().double().numpy())).to(mean)
    return mean, mean - quantile.unsqueeze(1) * gains.std(dim=0) / blocks**0.5


def at_full_strength(slots: SlotStates, kept: Tensor) -> SlotStates:
    """The kept seeds as fossils at full strength, and no others.  # kept [N, S] bool"""
    blank = SlotStates.empty(slots.num_members, slots.num_slots, slots.device)
    full = torch.where(kept, 1.0, blank.alpha)
    return blank.replace(
        stage=blank.stage.masked_fill(kept, int(Stage.FOSSILIZED)),
        blueprint=torch.where(kept, slots.blueprint, blank.blueprint),
        style=torch.where(kept, slots.style, blank.style),
        tempo=torch.where(kept, slots.tempo, blank.tempo),
        alpha=full,
        alpha_start=full,
        alpha_target=full,
        room=slots.room,
        enabled=slots.enabled,
    )
