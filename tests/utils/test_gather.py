"""Shards are the same whoever holds them, and what is gathered comes in their order."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from esper.utils.errors import UserError
from esper.utils.gather import (
    Gather,
    any_process,
    broadcast,
    even_ranges,
    gather_pieces,
    held_shards,
)
from tests.shards import PlayedProcess, _Meeting, on_processes


@given(st.integers(1, 40), st.integers(1, 12), st.integers(1, 12))
def test_every_member_is_held_once_and_shards_do_not_depend_on_processes(
    members: int, shards: int, size: int
) -> None:
    processes = [PlayedProcess(rank, _Meeting(size)) for rank in range(size)]
    if members < shards or shards < size:
        with pytest.raises(UserError, match=r"members is|shards is"):
            held_shards(members, shards, processes[0])
        return
    held = [held_shards(members, shards, process) for process in processes]
    assert all(held), "no process is idle"
    ranges = [shard for each in held for shard in each]
    assert ranges == held_shards(members, shards, Gather())
    assert [member for shard in ranges for member in shard] == list(range(members))
    assert max(map(len, ranges)) - min(map(len, ranges)) <= 1


@pytest.mark.parametrize("size", [1, 2, 3])
def test_pieces_come_back_in_the_order_of_the_shards_with_every_bit(size: int) -> None:
    odd = torch.tensor([float("nan"), -0.0, float("inf"), 1e-45])

    def work(gather: Gather) -> list[tuple[list[int], torch.Tensor, torch.Tensor]]:
        mine = even_ranges(5, size)[gather.rank]
        pieces = [{"ids": torch.arange(k), "odd": odd[: k % 5], "on": torch.tensor([k == 2])} for k in mine]
        return [(p["ids"].tolist(), p["odd"], p["on"]) for p in gather_pieces(gather, pieces)]

    for output in on_processes(size, work):
        assert [ids for ids, _, _ in output] == [list(range(k)) for k in range(5)]
        assert [bool(on) for _, _, on in output] == [False, False, True, False, False]
        for k, (_, given_odd, _) in enumerate(output):
            assert given_odd.view(torch.int32).tolist() == odd[: k % 5].view(torch.int32).tolist()


def test_all_processes_decide_alike() -> None:
    assert on_processes(3, lambda g: any_process(g, g.rank == 2)) == [True] * 3
    assert on_processes(3, lambda g: any_process(g, False)) == [False] * 3
    assert on_processes(3, lambda g: broadcast(g, f"of {g.rank}")) == ["of 0"] * 3
