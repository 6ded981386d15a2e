"""buffer.add: one column for all members against one write for each member and field.

The baseline is the shape of the earlier buffer: a tensor for each head's action and log-prob and for every
other field; for each member, each of them written by itself at the step that a Python list remembers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.common import Case, Work
from esper.foundation.rows import tensors_of
from esper.lifecycle.actions import Head
from esper.simic.agent.ppo import PPOAgent
from esper.simic.agent.rollout_buffer import TamiyoRolloutBuffer, Transition
from esper.tamiyo.policy.network import TamiyoNet
from tests.rollouts import Scene, step_of

HORIZON = 25


def by_head(transition: Transition) -> dict[str, Tensor]:
    """The fields of a transition, with one tensor for each head instead of a column."""
    fields = tensors_of(transition)
    for name in ("actions", "log_prob"):
        column = fields.pop(name)
        fields |= {f"{name}.{head.name}": column[:, head] for head in Head}
    return fields


class MemberByMember:
    """Preallocated tensors as well, but a step is added for one member at a time."""

    def __init__(self, members: int, example: Transition) -> None:
        self.tensors = {
            name: torch.zeros(members, HORIZON, *tensor.shape[1:], dtype=tensor.dtype)
            for name, tensor in by_head(example).items()
        }
        self.step_counts = [0] * members

    def add(self, fields: dict[str, Tensor]) -> None:
        for member, step in enumerate(self.step_counts):
            for name, tensor in self.tensors.items():
                tensor[member, step] = fields[name][member]
            self.step_counts[member] = (step + 1) % HORIZON


def prepare(members: int, slots: int, ragged: bool = False) -> Case:
    agent = PPOAgent(TamiyoNet())
    state, no = agent.initial_state(members), torch.zeros(members, dtype=torch.bool)
    step, _ = step_of(agent, Scene.random(members, slots, steps=1), 0, state, no)
    buffer, baseline = TamiyoRolloutBuffer(members, HORIZON, step, state), MemberByMember(members, step)
    active, fields = ~no if ragged else None, by_head(step)

    def ours() -> None:
        if buffer._columns == HORIZON:
            buffer.reset()
        buffer.add(step, active)

    return Case(ours=ours, baseline=lambda: baseline.add(fields))


def prepare_ragged(members: int, slots: int) -> Case:
    return prepare(members, slots, ragged=True)


def prepare_step_counts(members: int, slots: int) -> Case:
    """The mask of stored steps: from the buffer's own tensor, or from a list that becomes one."""
    agent = PPOAgent(TamiyoNet())
    state, no = agent.initial_state(members), torch.zeros(members, dtype=torch.bool)
    step, _ = step_of(agent, Scene.random(members, slots, steps=1), 0, state, no)
    buffer, counts = TamiyoRolloutBuffer(members, HORIZON, step, state), [HORIZON] * members

    def baseline() -> Tensor:
        return torch.arange(HORIZON) < torch.tensor(counts).unsqueeze(1)

    return Case(ours=lambda: buffer.valid_mask, baseline=baseline)


WORKS = (
    Work("step_counts", "the mask of stored steps", prepare_step_counts, slots=(3,)),
    Work("buffer", "one step of every member into the rollout", prepare, slots=(3,)),
    Work("buffer_ragged", "the same with a mask of active members", prepare_ragged, slots=(3,)),
)
