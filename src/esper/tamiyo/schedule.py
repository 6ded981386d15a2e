"""Growth by the share of the budget that is spent, without any metric: the rule that a learned one must beat.

    Schedule.parse("clone@0.05+clone@0.30x2")

grows every slot by a clone once 5 % of the budget is spent, and by two more, one after the other, at 30 %.
BY_BUDGET is a rule of thumb: how much to grow follows from how long the first host could train.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from esper.lifecycle.actions import GROWTH_BLUEPRINTS, Actions, Blueprint, Head, Op, Style, Tempo
from esper.lifecycle.legality import grows_block
from esper.lifecycle.stages import Stage
from esper.tamiyo.config import Conditions
from esper.tamiyo.controller import Controller, EpisodeInfo
from esper.tamiyo.policy.action_masks import ActionMasks
from esper.tamiyo.policy.features import Observation
from esper.tamiyo.scripted import build_actions, first_legal, planting_details
from esper.utils.errors import UserError

_LINE = re.compile(r"(?P<name>\w+)@(?P<at>[0-9]*\.?[0-9]+)(x(?P<times>\d+))?")


@dataclass(frozen=True)
class ScheduleLine:
    """One line of a schedule; raises UserError for a share outside of 0 to 1 and for no times."""

    at: float  # share of the budget, 0..1
    blueprint: Blueprint
    times: int = 1  # seeds in each of the slots, one after the other
    slots: tuple[int, ...] | None = None  # all of them by default
    updates: tuple[float, float] = (0, math.inf)  # for budgets that pay the first host so many: from, below

    def __post_init__(self) -> None:
        if not 0 <= self.at < 1 or self.times < 1:
            raise UserError(
                f"a line of the schedule grows {self.times} times at {self.at} of the budget; its share lies "
                "from 0 to below 1 and its times are at least 1"
            )


BY_BUDGET = (  # chosen on made tasks; docs/study.md says what it was judged on and what limits that
    ScheduleLine(0.05, Blueprint.WIDEN_FULL, updates=(1536, math.inf)),
    ScheduleLine(0.10, Blueprint.WIDEN_FULL, updates=(384, 1536)),
    ScheduleLine(0.20, Blueprint.CLONE, updates=(1536, math.inf)),
)


class Schedule(Controller):
    """A controller that plants by the share of the budget that is spent and keeps all that it plants.

    It uses no metric, so that its seeds pass their gates unmeasured. A block is
    repeated or widened within the step in which that is due; any other seed takes its ramp.
    """

    uses_metrics = False

    def __init__(self, events: Iterable[ScheduleLine], conditions: Conditions | None = None) -> None:
        """Take lines with rising shares; raise UserError otherwise.

        conditions: under which it is known to do no harm, if it is meant for those only.
        """
        self.conditions, self.events = conditions, list(events)
        if [line.at for line in self.events] != sorted(line.at for line in self.events):
            raise UserError(f"the schedule's shares are {[line.at for line in self.events]}; sort them")
        self._plants = any(line.blueprint not in GROWTH_BLUEPRINTS for line in self.events)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse 'clone@0.1+widen_full@0.3x2', or raise UserError."""
        names = {b.name.lower(): b for b in Blueprint if b is not Blueprint.NOOP}
        lines = []
        for part in text.split("+"):
            match = _LINE.fullmatch(part.strip())
            if match is None or match["name"].lower() not in names:
                raise UserError(
                    f"{part!r} is no line of a schedule; write clone@0.3, or clone@0.3x2 for two in a row; "
                    f"blueprints are {', '.join(names)}"
                )
            blueprint, times = names[match["name"].lower()], int(match["times"] or 1)
            lines.append(ScheduleLine(float(match["at"]), blueprint, times))
        return cls(lines)

    def begin(self, info: EpisodeInfo) -> None:
        """Start an episode in which nothing has been planted yet."""
        self._batches, self._first = info.batches, True
        shape = (len(self.events), info.num_members, info.num_slots)
        self._remaining = torch.zeros(shape, dtype=torch.long, device=info.device)  # seeds still to plant
        for k, line in enumerate(self.events):
            slots = range(info.num_slots) if line.slots is None else line.slots
            if not set(slots) <= set(range(info.num_slots)):
                raise UserError(
                    f"the schedule names slots {list(slots)}; this host has slots 0..{info.num_slots - 1}"
                )
            self._remaining[k, :, list(slots)] = line.times

    def state_dict(self) -> dict[str, Tensor]:
        return {"remaining": self._remaining, "first": torch.tensor(self._first)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self._remaining = state["remaining"].to(self._remaining.device, copy=True)
        self._first = bool(state["first"])

    def decide(self, observation: Observation, masks: ActionMasks, step: int) -> list[Actions]:
        """Return the actions of this step in their order: every slot that is due is planted and advanced."""
        lines, blueprint = self._due(observation)
        lines &= masks.slot_by_op[:, Op.GERMINATE]  # a member that may not plant yet keeps what it owes
        self._remaining -= lines.long()
        due, grows = lines.any(dim=0), grows_block(blueprint)  # [N, S]
        blending = observation.slots.stage == Stage.BLENDING
        orders = [(Op.GERMINATE, due)]
        if self._plants:  # a grown block is active at once; any other seed is advanced to its ramp
            orders += [(Op.ADVANCE, due & ~grows), (Op.ADVANCE, (due & ~grows) | blending)]
        orders.append((Op.FOSSILIZE, (due & grows) | blending))  # a seed whose ramp is over
        # The order of a step's actions is part of the result: slot by slot, germinate before fossilise.
        found = []
        for s in range(observation.num_slots):
            details = planting_details(blueprint[:, s], Style.LINEAR_ADD, Tempo.FAST)
            at = torch.full_like(blueprint[:, s], s)
            for op, where in orders:
                found.append(build_actions(torch.where(where[:, s], int(op), int(Op.WAIT)), at, details))
        return found

    def _due(self, observation: Observation) -> tuple[Tensor, Tensor]:
        """Find the line that is due on each free slot, and its blueprint.  # [lines, N, S], [N, S]"""
        if self._first:  # drop the lines that are meant for other budgets
            self._first, updates = False, observation.steps_left * self._batches
            for k, line in enumerate(self.events):
                least, limit = line.updates
                self._remaining[k] *= ((updates >= least) & (updates < limit)).unsqueeze(1)
        stage = observation.slots.stage
        # At most one line a slot in a step: the earliest that is due takes it.
        free, blueprint = stage == Stage.DORMANT, torch.zeros_like(stage)
        lines = torch.zeros_like(self._remaining, dtype=torch.bool)
        for k, line in enumerate(self.events):
            lines[k] = (observation.progress >= line.at).unsqueeze(1) & (self._remaining[k] > 0) & free
            blueprint = torch.where(lines[k], int(line.blueprint), blueprint)
            free = free & ~lines[k]
        return lines, blueprint


class PacedSchedule(Schedule):
    """As a schedule, at the pace and by the rules of a learned controller, which it can teach.

    One action a step, and only legal ones: a seed is made permanent once it has been measured to be worth
    something. Planting comes first, so that all slots grow early.
    """

    uses_metrics = True

    def skip(self, where: Tensor) -> None:
        """Leave out lines of some members, at the beginning of an episode.  # where [lines, N] bool"""
        self._remaining *= ~where.unsqueeze(2)

    def decide(self, observation: Observation, masks: ActionMasks, step: int) -> Actions:  # type: ignore[override]
        """Return one legal action of each member."""
        lines, wanted = self._due(observation)
        legal = lines.any(dim=0) & masks.blueprint.gather(1, wanted)  # [N, S]
        slot = (legal & masks.slot_by_op[:, Op.GERMINATE]).int().argmax(dim=1, keepdim=True)  # the first
        candidates = {Op.GERMINATE: legal, Op.FOSSILIZE: torch.ones_like(legal)}
        details = planting_details(wanted.gather(1, slot).squeeze(1), Style.LINEAR_ADD, Tempo.FAST)
        actions = first_legal(candidates, masks, details)
        # Only what was planted is struck off: a member that could not act keeps what it owes.
        germinates = (actions[Head.OP] == Op.GERMINATE).unsqueeze(1)
        planted = torch.zeros_like(legal).scatter(1, slot, germinates)
        self._remaining -= (lines & planted).long()
        return actions
