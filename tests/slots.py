"""Slot states from plain Python, a record for each slot of each member."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from esper.lifecycle.actions import Actions, AlphaCurve, Head, Style, Tempo
from esper.lifecycle.slot_states import NO_BLUEPRINT, AlphaMode, SlotStates
from esper.lifecycle.stages import Stage
from esper.population.data import MemberData


def actions_of(rows: Sequence[dict[Head, int]], device: torch.device | str = "cpu") -> Actions:
    """Build actions from rows; heads that are not named are 0: `actions_of([{Head.OP: Op.WAIT}])`."""
    choices = [[int(row.get(head, 0)) for head in Head] for row in rows]
    return Actions(torch.tensor(choices, dtype=torch.long, device=device).reshape(len(rows), len(Head)))


def shared_data(inputs: Tensor, targets: Tensor, num_members: int) -> MemberData:
    """Give one task to all members."""
    task_of = torch.zeros(num_members, dtype=torch.long, device=inputs.device)
    return MemberData(inputs[None], targets[None], task_of)


@dataclass(frozen=True)
class SlotRecord:
    """One slot of one member."""

    stage: int = Stage.DORMANT
    blueprint: int = NO_BLUEPRINT
    style: int = Style.LINEAR_ADD
    tempo: int = Tempo.STANDARD
    alpha: float = 0.0
    alpha_start: float = 0.0
    alpha_target: float = 0.0
    alpha_mode: int = AlphaMode.HOLD
    alpha_curve: int = AlphaCurve.LINEAR
    alpha_steps_total: int = 0
    alpha_steps_done: int = 0
    age: int = 0
    epochs_in_stage: int = 0
    prune_pending: bool = False
    room: int = 0
    enabled: bool = True


def states_from_records(rows: Sequence[Sequence[SlotRecord | None]]) -> SlotStates:
    """Build states from a row of records for each member; None is an empty slot."""
    blank = SlotStates.empty(len(rows), len(rows[0]))
    filled = [[record or SlotRecord() for record in row] for row in rows]
    values = {name: [[getattr(r, name) for r in row] for row in filled] for name in blank.tensors()}
    states = SlotStates(
        **{name: torch.tensor(values[name], dtype=like.dtype) for name, like in blank.tensors().items()}
    )
    states.check()
    return states
