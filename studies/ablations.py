"""What the lifecycle protects: the same controllers under rules that lack one of its parts.

A change holds for some members of a program and acts between the rules and the training of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from esper.lifecycle.actions import STYLE_CURVE, TEMPO_TICKS, Actions
from esper.lifecycle.alpha import advance_alpha, retarget
from esper.lifecycle.engine import ActionOutcome, TickOutcome
from esper.lifecycle.evidence import SlotEvidence
from esper.lifecycle.slot_states import AlphaMode, SlotStates
from esper.lifecycle.stages import Stage
from esper.population.optimiser import RowWeights
from esper.simic.environment import GrowthEnvironment
from esper.simic.steps import EnvironmentSpec


@dataclass(frozen=True)
class Moment:
    """The slots before an action and after the tick that followed it."""

    before: SlotStates
    after: SlotStates
    germinated: Tensor  # [N, S] bool
    hosts: RowWeights  # N rows


Change = Callable[[Moment, Tensor], SlotStates]  # the moment and its members [N, 1] → the slots to train


def fresh_optimiser(moment: Moment, members: Tensor) -> SlotStates:
    """The host's optimiser forgets everything whenever one of its seeds begins to blend."""
    begins = (moment.before.stage == Stage.TRAINING) & (moment.after.stage == Stage.BLENDING)
    forgets = (begins & members).any(dim=1)  # [N]
    for moments in (moment.hosts.first, moment.hosts.second, moment.hosts.steps):
        moments.masked_fill_(forgets.view(-1, *[1] * (moments.ndim - 1)), 0.0)
    return moment.after


def no_ramp(moment: Moment, members: Tensor) -> SlotStates:
    """A seed that is to be heard more is heard in full at once."""
    after = moment.after
    rising = members & (after.alpha_mode == AlphaMode.UP)
    return retarget(after, rising, after.alpha_target, torch.zeros_like(after.tempo), after.alpha_curve)


def no_isolation(moment: Moment, members: Tensor) -> SlotStates:
    """A seed begins to blend at its birth, by its own ramp, and trains with its host from then on."""
    after, born = moment.after, moment.germinated & members
    blending = after.replace(stage=after.stage.masked_fill(born, int(Stage.BLENDING)))
    ticks = torch.tensor(list(TEMPO_TICKS.values()), device=after.device)[after.tempo]
    curve = torch.tensor([int(c) for c in STYLE_CURVE.values()], device=after.device)[after.style]
    ramped = advance_alpha(retarget(blending, born, after.alpha_target, ticks, curve)).tensors()
    return SlotStates(**{n: torch.where(born, ramped[n], old) for n, old in after.tensors().items()})


CHANGES: dict[str, Change] = {
    "fresh optimiser": fresh_optimiser,
    "no ramp": no_ramp,
    "no isolation": no_isolation,
}


class AblatedEnvironment(GrowthEnvironment):
    """An environment in which some members live under a change of the rules."""

    def __init__(self, spec: EnvironmentSpec, changed: Mapping[str, Tensor]):
        """changed: the members of each change, by its name.  # each [N] bool"""
        super().__init__(spec)
        self.changed = {name: members.to(self.device).unsqueeze(1) for name, members in changed.items()}

    def _grow(
        self, actions: Sequence[Actions], active: Tensor
    ) -> tuple[ActionOutcome, TickOutcome, SlotEvidence]:
        before = self.slots
        outcome, ticked, evidence = super()._grow(actions, active)
        states = ticked.states
        for name, members in self.changed.items():
            moment = Moment(before, states, outcome.germinated, self.population.hosts)
            states = CHANGES[name](moment, members)
        return outcome, replace(ticked, states=states), evidence
