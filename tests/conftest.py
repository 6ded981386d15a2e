"""The order of the tests, and what many of them share."""

from __future__ import annotations

import gc
import sys

import pytest

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
