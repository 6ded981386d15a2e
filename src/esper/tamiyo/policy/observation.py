"""What Tamiyo is shown at a decision step, for all members at once."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from esper.lifecycle.evidence import SlotEvidence
from esper.lifecycle.slot_states import SlotStates
from esper.utils.rows import RowRecord

HISTORY_LENGTH = 5


@dataclass(frozen=True)
class Observation(RowRecord):
    """One decision step of N members. NaN stands for what has not been measured."""

    progress: Tensor  # [N] float: share of the budget that is spent, 0..1
    step_cost: Tensor  # [N] float: training FLOPs of a step now over those of the bare host, at least 1
    steps_left: Tensor  # [N] float: how many steps the rest of the budget pays for at this cost
    val_loss: Tensor  # [N] float
    val_accuracy: Tensor  # [N] float: a fraction, 0..1
    loss_history: Tensor  # [N, 5] float: the last losses, oldest first
    accuracy_history: Tensor  # [N, 5] float: the last accuracies, oldest first
    parameter_ratio: Tensor  # [N] float: all parameters over the host's own, at least 1
    last_succeeded: Tensor  # [N] bool
    last_op: Tensor  # [N] int64: -1 before the first action
    slots: SlotStates
    evidence: SlotEvidence

    def __post_init__(self) -> None:
        members, slots = self.slots.stage.shape
        for name, value in vars(self).items():
            shape = (members, HISTORY_LENGTH) if name.endswith("_history") else (members,)
            if isinstance(value, Tensor) and value.shape != shape:
                given = tuple(value.shape)
                raise ValueError(f"{name} has shape {given}; expected {shape} for {members} members")
        if self.evidence.contribution.shape != (members, slots):
            raise ValueError(
                f"evidence has shape {tuple(self.evidence.contribution.shape)}; expected {(members, slots)}, "
                "one value per slot of the states"
            )

    @property
    def num_members(self) -> int:
        """N."""
        return self.slots.num_members

    @property
    def num_slots(self) -> int:
        """S."""
        return self.slots.num_slots
