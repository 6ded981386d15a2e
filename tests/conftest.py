"""The order of the tests, and what many of them share."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:  # before torch is imported: threads of several workers spin
    os.environ.setdefault("OMP_NUM_THREADS", "1")

MANY = 100  # modules: so many more make the collections that some libraries ask for dear
frozen_modules = 0


def freeze() -> None:
    """What was imported stays: the garbage collector need not look through it again and again."""
    global frozen_modules
    frozen_modules = len(sys.modules)
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes or waits longest begins first, so that no worker waits for it in the end."""
    items.sort(key=lambda item: item.get_closest_marker("first") is None)


def pytest_collection_finish() -> None:
    gc.collect()
    freeze()
    gc.set_threshold(50_000, 20, 50)


def pytest_runtest_teardown() -> None:
    if len(sys.modules) > frozen_modules + MANY:
        freeze()


@pytest.fixture(scope="session", autouse=True)
def no_wait_for_the_disk() -> Iterator[None]:
    """Thousands of small files need not reach it, 4 ms each; other processes that tests start do wait."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", os.fstat)  # which fails for a closed file too
        yield
