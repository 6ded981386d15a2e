"""How processes meet, over a store that remembers earlier ones."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from esper.utils.devices import own_device
from esper.utils.errors import LostProcessError
from esper.utils.gather import agree_on_prefix


def meet(store: dist.Store, size: int, timeout: float = 30.0) -> set[str]:
    with ThreadPoolExecutor(size) as pool:
        return set(pool.map(lambda rank: agree_on_prefix(store, rank, size, timeout), range(size)))


def test_every_start_has_a_name_of_its_own_whatever_is_left_of_earlier_ones() -> None:
    store = dist.HashStore()
    names = [meet(store, size) for size in (3, 3, 2, 4)]
    assert [len(name) for name in names] == [1, 1, 1, 1]
    assert len(set.union(*names)) == 4


def test_who_does_not_come_is_named() -> None:
    store = dist.HashStore()
    meet(store, 2)  # leaves the word of a process 1 that is gone
    with pytest.raises(LostProcessError, match=r"process 1 did not come within 0\.1 s"):
        agree_on_prefix(store, 0, 2, 0.1)
    with pytest.raises(LostProcessError, match="process 0 did not come in time"):
        agree_on_prefix(store, 1, 2, 0.1)


def test_each_process_of_a_machine_has_a_gpu_of_its_own_as_long_as_there_are_enough(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    current: list[torch.device] = []
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.set_device", current.append)
    given = {}
    for rank in range(3):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        given[rank] = [str(own_device(name)) for name in ("auto", "cuda", "cpu:0", "cuda:0")]
    assert given == {
        0: ["cuda", "cuda", "cpu:0", "cuda:0"],
        1: ["cuda:1", "cuda:1", "cpu:0", "cuda:0"],
        2: ["cuda:0", "cuda:0", "cpu:0", "cuda:0"],
    }
    assert {str(device) for device in current} == {"cuda:0", "cuda:1"}
