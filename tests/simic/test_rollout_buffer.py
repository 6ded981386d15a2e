"""The rollout buffer against lists of lists."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from esper.simic.agent.gae import GaeInputs, compute_gae
from esper.simic.agent.rollout_buffer import TamiyoRolloutBuffer, Transition
from esper.utils.rows import tensors_of
from tests.operations import count_operations
from tests.simic.scenes import transition


def make_buffer(members: int, horizon: int) -> TamiyoRolloutBuffer:
    return TamiyoRolloutBuffer(members, horizon, transition(members))


def assert_rows(buffer: TamiyoRolloutBuffer, rows: list[list[dict[str, Tensor]]]) -> None:
    """The buffer holds exactly these transitions, and zeros elsewhere."""
    assert buffer.step_counts.tolist() == [len(row) for row in rows]
    stored = tensors_of(buffer.get_batched_sequences().steps)
    for name, tensor in stored.items():
        for n, row in enumerate(rows):
            for t, step in enumerate(row):
                assert torch.equal(tensor[n, t], step[name])
            assert not tensor[n, len(row) :].any(), f"{name} has something beyond the end of row {n}"


def row_of(step: Transition, member: int) -> dict[str, Tensor]:
    return {name: tensor[member].clone() for name, tensor in tensors_of(step).items()}


@settings(deadline=None, max_examples=30)
@given(data=st.data(), members=st.integers(1, 5), horizon=st.integers(1, 6))
def test_add_writes_each_active_rows_own_next_column(data: st.DataObject, members: int, horizon: int) -> None:
    buffer = make_buffer(members, horizon)
    rows: list[list[dict[str, Tensor]]] = [[] for _ in range(members)]
    for seed in range(horizon):
        step = transition(members, seed)
        flags = data.draw(st.none() | st.lists(st.booleans(), min_size=members, max_size=members))
        buffer.add(step, None if flags is None else torch.tensor(flags))
        for n in range(members):
            if flags is None or flags[n]:
                rows[n].append(row_of(step, n))
    assert_rows(buffer, rows)
    buffer.check()
    expected = [[t < len(row) for t in range(horizon)] for row in rows]
    assert buffer.valid_mask.tolist() == expected


@pytest.mark.parametrize("active", [False, True])
def test_operations_of_add_do_not_depend_on_the_members(active: bool) -> None:
    counts = set()
    for members in (2, 16, 512):
        buffer, step = make_buffer(members, 4), transition(members)
        flags = torch.arange(members) % 2 == 0 if active else None
        counts.add(count_operations(lambda b=buffer, s=step, f=flags: b.add(s, f)))
    assert len(counts) == 1
    assert counts.pop() < 100


def test_plans_of_equal_return_weigh_alike() -> None:
    """Both earn 1 after discounting, one of them two steps later; the other member has one plan."""
    gamma, members = 0.5, torch.tensor([7, 7, 3])
    buffer = make_buffer(3, 4)
    for step, reward in enumerate(([1.0, 0.0, 9.0], [0.0, 0.0, 0.0], [0.0, 4.0, 0.0])):
        buffer.add(replace(transition(3, step), reward=torch.tensor(reward)))
    buffer.weigh_rows(members, 0.02, gamma)
    torch.testing.assert_close(buffer.weights, torch.ones(3))


def test_a_step_too_many_is_an_error_at_once_or_leaves_its_row_without_an_end() -> None:
    even, buffer = make_buffer(2, 1), make_buffer(3, 2)
    even.add(transition(2))
    with pytest.raises(ValueError, match="the buffer of 1 steps is full"):
        even.add(transition(2))
    for seed in range(3):
        buffer.add(transition(3, seed), torch.tensor([False, True, False]))
    assert buffer.step_counts.tolist() == [0, 2, 0]
    expected = row_of(transition(3, 1), 1)
    stored = tensors_of(buffer.get_batched_sequences().steps)
    assert all(torch.equal(tensor[1, 1], expected[name]) for name, tensor in stored.items())
    buffer.compute_advantages_and_returns(0.9, 0.9)
    with pytest.raises(ValueError, match=r"row of member 1 ends in neither .* a longer horizon than 2 steps"):
        buffer.check()


def test_get_batched_sequences_are_views_and_end_where_the_longest_row_ends() -> None:
    buffer = make_buffer(4, 10)
    for seed in range(3):
        buffer.add(transition(4, seed))
    sequences = buffer.get_batched_sequences()
    assert sequences.valid.shape == (4, 3)
    sequences.steps.reward[2, 1] = 123.0
    assert buffer.get_batched_sequences().steps.reward[2, 1] == 123.0


def test_reset_leaves_nothing_behind() -> None:
    buffer = make_buffer(3, 4)
    for seed in range(4):
        buffer.add(transition(3, seed, terminated=torch.tensor([True, True, True])))
    buffer.compute_advantages_and_returns(0.9, 0.9)
    buffer.reset()
    assert_rows(buffer, [[], [], []])
    assert not buffer.returns.any()
    buffer.add(transition(3, 9), torch.tensor([False, True, False]))
    assert_rows(buffer, [[], [row_of(transition(3, 9), 1)], []])


def test_advantages_are_those_of_gae_with_the_next_value_of_the_same_row() -> None:
    members, steps = 4, 5
    buffer = make_buffer(members, 8)
    stored = [transition(members, seed) for seed in range(steps)]
    stored[2] = replace(stored[2], truncated=torch.tensor([False, True, False, False]))
    stored[-1] = replace(stored[-1], terminated=torch.tensor([True, True, False, False]))
    for step in stored:
        buffer.add(step)
    bootstrap = torch.tensor([100.0, 100.0, 3.0, -2.0])
    buffer.compute_advantages_and_returns(0.9, 0.8, bootstrap)

    def column(name: str) -> Tensor:
        return torch.stack([getattr(step, name) for step in stored], dim=1)

    values = column("value")
    following = torch.cat((values[:, 1:], bootstrap.unsqueeze(1)), dim=1)
    following[1, 2] = stored[2].bootstrap_value[1]
    ends, counts = (column("terminated"), column("truncated")), torch.full((members,), steps)
    rows = GaeInputs(column("reward"), values, following, *ends, counts)
    advantages, returns = compute_gae(rows, 0.9, 0.8)
    torch.testing.assert_close(buffer.advantages[:, :steps], advantages)
    torch.testing.assert_close(buffer.returns[:, :steps], returns)
    assert not buffer.advantages[:, steps:].any()


def test_a_short_row_bootstraps_after_its_own_last_step() -> None:
    buffer = make_buffer(2, 4)
    for seed, active in enumerate(([True, True], [True, False], [True, False])):
        buffer.add(transition(2, seed), torch.tensor(active))
    buffer.compute_advantages_and_returns(0.5, 0.9, torch.tensor([7.0, 11.0]))
    first = transition(2, 0)
    expected = first.reward[1] + 0.5 * 11.0
    torch.testing.assert_close(buffer.returns[1, 0], expected)


def test_a_row_that_ends_in_neither_needs_a_bootstrap_value() -> None:
    buffer = make_buffer(3, 4)
    buffer.add(transition(3, terminated=torch.tensor([True, True, False])))
    buffer.compute_advantages_and_returns(0.9, 0.9)
    with pytest.raises(ValueError, match="row of member 2 ends in neither"):
        buffer.check()
    other = make_buffer(3, 4)
    other.add(transition(3, truncated=torch.tensor([True, True, False])), torch.tensor([True, True, False]))
    other.compute_advantages_and_returns(0.9, 0.9)
    other.check()  # the third row is empty, and owes nothing
