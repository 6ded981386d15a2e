"""What happened in one episode, step by step and member by member, as arrays on the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from esper.lifecycle.actions import Head, Op
from esper.lifecycle.gates import Gate
from esper.lifecycle.slot_states import SlotStates
from esper.utils.rows import refill, under_prefix, with_prefix

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
_ONCE = ("seed_parameters", "gate_parameters", "members")  # arrays of a record that have no axis of steps
# What a step of a finished member leads to, beside the slots that it ended with; 0, which is WAIT, elsewhere.
_AT_REST = {"succeeded": 1, "refused_by": int(Gate.NONE), "training_loss": np.nan, "measured_loss": np.nan}


@dataclass(frozen=True)
class EpisodeRecord:
    """One episode of N members with S slots over T steps, on the host.

    Arrays of T + 1 rows hold what was seen before each decision and, last, at the end; arrays of T rows hold
    what each decision led to. `stage`, `alpha` and `blueprint` are those right after the action was applied.
    """

    episode: int
    gamma: float
    slot_ids: tuple[str, ...]
    host_parameters: int
    seed_parameters: Ints  # [S, blueprints]
    gate_parameters: Ints  # [S] of a seed's gate, if its style has one
    members: Ints  # [N] global ids
    # seen, T + 1
    accuracy: Floats  # [T + 1, N] validation, 0..1
    loss: Floats  # [T + 1, N]
    parameters: Ints  # [T + 1, N]
    potential: Floats  # [T + 1, N] Φ
    spent: Doubles  # [T + 1, N] training FLOPs since the episode began
    seen_stage: Ints  # [T + 1, N, S]
    seen_blueprint: Ints  # [T + 1, N, S]
    seen_style: Ints  # [T + 1, N, S]
    seen_age: Ints  # [T + 1, N, S]
    contribution: Floats  # [T + 1, N, S] points, NaN = unmeasured
    health: Floats  # [T + 1, N, S]
    shadow_gain: Floats  # [T + 1, N, S]
    # done, T
    choices: Ints  # [T, N, heads] as asked for
    executed_op: Ints  # [T, N] WAIT where the action failed
    succeeded: Bools  # [T, N]
    refused_by: Ints  # [T, N] a Gate, −1 where none refused
    reward: Floats  # [T, N]
    panicked: Bools  # [T, N]
    training_loss: Floats  # [T, N]
    measured_loss: Floats  # [T, N] of the validation, before the governor took anything back
    stage: Ints  # [T, N, S]
    alpha: Floats  # [T, N, S]
    blueprint: Ints  # [T, N, S]
    style: Ints  # [T, N, S]
    ticked_stage: Ints  # [T, N, S] after the tick
    germinated: Bools  # [T, N, S]
    pruned: Bools  # [T, N, S] seeds that ended by an action or at the end of a ramp
    rolled_back: Bools  # [T, N, S] seeds that the governor ended
    # the end
    final_slots: SlotStates  # on the host

    def some_members(self, span: slice) -> EpisodeRecord:
        """The same episode of some of its members."""
        arrays: dict[str, Any] = {name: value[:, span] for name, value in self._by_step().items()}
        slots = self.final_slots[span]
        return replace(self, members=self.members[span], final_slots=slots, **arrays)

    @staticmethod
    def joined(records: Sequence[EpisodeRecord], which: Ints) -> EpisodeRecord:
        """Each member's column of the record that `which` [N] names; all are of the same members."""
        rows = np.arange(len(which))
        arrays: dict[str, Any] = {
            name: np.stack([vars(record)[name] for record in records])[which, :, rows].swapaxes(0, 1)
            for name in records[0]._by_step()
        }
        slots = [record.final_slots.tensors() for record in records]
        ended = {name: torch.stack([s[name] for s in slots])[which, rows] for name in slots[0]}
        return replace(records[0], final_slots=SlotStates(**ended), **arrays)

    def tensors(self) -> dict[str, Tensor]:
        """All that differs between records of one episode, by name: for `side_by_side`."""
        arrays = {**self._by_step(), "members": self.members}
        slots = with_prefix("final_slots", self.final_slots.tensors())
        return {name: torch.from_numpy(value) for name, value in arrays.items()} | slots

    def side_by_side(self, parts: Sequence[Mapping[str, Tensor]]) -> EpisodeRecord:
        """One record of the members of several that were played apart, from what `tensors` gave for each.

        Where a part ended before the longest one, its members are at rest until the end.
        """
        records = [self._of(part) for part in parts]
        steps = max(record.num_steps for record in records)
        longest = [vars(record._lengthened(steps)) for record in records]
        arrays: dict[str, Any] = {
            name: np.concatenate([each[name] for each in longest], axis=1) for name in self._by_step()
        }
        ended = [record.final_slots.tensors() for record in records]
        slots = {name: torch.cat([each[name] for each in ended]) for name in ended[0]}
        members = np.concatenate([record.members for record in records])
        return replace(self, members=members, final_slots=SlotStates(**slots), **arrays)

    def _by_step(self) -> dict[str, NDArray[Any]]:
        """The arrays that have an axis of steps, and behind it one of members."""
        return {n: v for n, v in vars(self).items() if isinstance(v, np.ndarray) and n not in _ONCE}

    def _of(self, tensors: Mapping[str, Tensor]) -> EpisodeRecord:
        """The same episode of other members."""
        slots = refill(self.final_slots, under_prefix("final_slots", tensors))
        arrays: dict[str, Any] = {name: tensors[name].numpy() for name in (*self._by_step(), "members")}
        return replace(self, final_slots=slots, **arrays)

    def _lengthened(self, steps: int) -> EpisodeRecord:
        """The same record with members that stay as they ended until there were that many steps."""
        more = steps - self.num_steps
        if not more:
            return self
        resting = {
            "stage": self.seen_stage[-1],
            "ticked_stage": self.seen_stage[-1],
            "blueprint": self.seen_blueprint[-1],
            "style": self.seen_style[-1],
            "alpha": self.final_slots.alpha.numpy(),
        }
        arrays: dict[str, Any] = {}
        for name, value in self._by_step().items():
            led_to = resting.get(name, np.full_like(value[-1], _AT_REST.get(name, 0)))
            still = led_to if len(value) == self.num_steps else value[-1]  # else it is what was seen
            arrays[name] = np.concatenate([value, np.stack([still] * more)])
        return replace(self, **arrays)

    @property
    def num_steps(self) -> int:
        """Decisions of the episode."""
        return len(self.reward)

    @property
    def num_members(self) -> int:
        """Networks in the record."""
        return len(self.members)

    @property
    def returns(self) -> Doubles:
        """Σ γ^t r_t of each member: what the learner maximises.  # [N]"""
        discount = np.power(self.gamma, np.arange(self.num_steps, dtype=np.float64))
        return np.asarray(discount @ self.reward, dtype=np.float64)

    def refusal_rates(self) -> dict[str, float]:
        """The share of each op's requests that failed, by op name.

        WAIT cannot fail and is left out, like any op that nobody asked for.
        """
        asked = self.choices[:, :, Head.OP]
        wanted = [op for op in Op if op is not Op.WAIT and (asked == op).any()]
        return {op.name: float((~self.succeeded[asked == op]).mean()) for op in wanted}

    @property
    def flops(self) -> Doubles:
        """Training FLOPs of the whole episode.  # [N]"""
        return np.asarray(self.spent[-1], dtype=np.float64)

    @property
    def member_epochs(self) -> int:
        """Epochs of all members together."""
        return self.num_steps * self.num_members

    @property
    def parameter_ratio(self) -> Doubles:
        """Parameters over the host's own.  # [T + 1, N]"""
        return np.asarray(self.parameters / self.host_parameters, dtype=np.float64)
