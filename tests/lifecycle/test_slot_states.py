"""Slots, stages and actions: constructors and tables agree with the rules and refuse the rest."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from esper.lifecycle.actions import Actions, Head, Op
from esper.lifecycle.slot_states import SlotEvidence, SlotStates
from esper.lifecycle.stages import Stage
from esper.tamiyo.policy.action_masks import SlotMaskState, compute_batch_masks
from tests.scenes import random_states
from tests.slots import SlotRecord, actions_of, states_from_records


def test_empty_is_dormant_and_enabled() -> None:
    states = SlotStates.empty(3, 2)
    assert (states.num_members, states.num_slots) == (3, 2)
    assert bool((states.stage == Stage.DORMANT).all())
    assert bool(states.enabled.all())
    assert bool((states.blueprint == -1).all())
    states.check()


def test_every_field_of_an_empty_slot_has_its_default() -> None:
    states = SlotStates.empty(1, 1)
    for field in dataclasses.fields(SlotRecord):
        found = getattr(states, field.name).item()
        assert found == field.default, field.name
        assert type(found).__name__ == field.type, field.name


def test_indexing_keeps_two_dimensions() -> None:
    states = random_states(np.random.default_rng(0), 6, 3)
    for members, rows in ((2, [2]), (-1, [5]), (slice(1, 3), [1, 2]), (torch.tensor([4, 0]), [4, 0])):
        picked = states[members]
        assert picked.stage.shape == (len(rows), 3)
        assert torch.equal(picked.age, states.age[rows])


def test_a_seed_needs_a_blueprint_and_a_member_an_enabled_slot() -> None:
    with pytest.raises(ValueError, match=r"member 0, slot 0 is in stage 3 with blueprint -1"):
        states_from_records([[SlotRecord(stage=Stage.TRAINING)]])
    with pytest.raises(ValueError, match="member 1 has no enabled slot"):
        states_from_records([[None, None], [SlotRecord(enabled=False)] * 2])


def test_evidence_forgets_where_told() -> None:
    good = SlotEvidence.unmeasured(2, 2).tensors()
    where = torch.tensor([[True, False], [False, False]])
    forgot = SlotEvidence(**{n: torch.ones(2, 2) for n in good}).forget(where)
    assert all(torch.equal(t.isnan(), where) for t in forgot.tensors().values())


@pytest.mark.parametrize("value", [5, 11, 99, -1])
def test_unknown_stages_are_refused_at_every_entrance(value: int) -> None:
    doors = {
        "SlotMaskState": lambda: compute_batch_masks([[SlotMaskState(stage=value)]]),
        "SlotStates": lambda: SlotStates.empty(2, 2).replace(stage=torch.full((2, 2), value)).check(),
    }
    for door in doors.values():
        with pytest.raises(ValueError, match=rf"is {value}; allowed are UNKNOWN 0, .* \(5 is retired\)"):
            door()


def test_actions_check_their_shape() -> None:
    assert Actions.wait(3)[Head.OP].tolist() == [0, 0, 0]
    assert actions_of([{Head.OP: Op.PRUNE, Head.SLOT: 2}]).choices.tolist() == [[2, 0, 0, 0, 0, 0, 0, 3]]
    assert len(actions_of([])) == 0
    for shape in ((3,), (3, 7), (2, 3, 8)):
        with pytest.raises(ValueError, match=r"give \[members, 8\]"):
            Actions(torch.zeros(shape, dtype=torch.long))
    with pytest.raises(ValueError, match=r"actions are of torch.float32; expected torch.int64"):
        Actions(torch.zeros(3, 8))
