"""How processes meet, over a store that remembers earlier ones."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from esper.foundation.errors import LostProcessError
from esper.foundation.processes import agree_on_name


def meet(store: dist.Store, size: int, patience: float = 30.0) -> set[str]:
    with ThreadPoolExecutor(size) as pool:
        return set(pool.map(lambda rank: agree_on_name(store, rank, size, patience), range(size)))


def test_every_start_has_a_name_of_its_own_whatever_is_left_of_earlier_ones() -> None:
    store = dist.HashStore()
    names = [meet(store, size) for size in (3, 3, 2, 4)]
    assert [len(name) for name in names] == [1, 1, 1, 1]
    assert len(set.union(*names)) == 4


def test_who_does_not_come_is_named() -> None:
    store = dist.HashStore()
    meet(store, 2)  # leaves the word of a process 1 that is gone
    with pytest.raises(LostProcessError, match=r"process 1 did not come within 0\.1 s"):
        agree_on_name(store, 0, 2, 0.1)
    with pytest.raises(LostProcessError, match="process 0 did not come in time"):
        agree_on_name(store, 1, 2, 0.1)
