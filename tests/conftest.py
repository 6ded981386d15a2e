"""The order of the tests."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes longest begins first, so that no worker waits for it in the end."""
    items.sort(key=lambda item: item.get_closest_marker("first") is None)
