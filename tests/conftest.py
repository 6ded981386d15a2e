"""The order of the tests, and what many of them share."""

from __future__ import annotations

import base64
import gc

import pytest

ONE_PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGP4DwABAQEAsTj2FAAAAABJRU5ErkJggg=="


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes or waits longest begins first, so that no worker waits for it in the end."""
    items.sort(key=lambda item: item.get_closest_marker("first") is None)


def pytest_collection_finish() -> None:
    """What was imported stays: the garbage collector need not look through it again and again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


@pytest.fixture
def blank_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every picture is one pixel: to draw those of a report takes longer than a tiny run.

    That they are drawn is held in tests/runs/test_report.py and by the run folder of test_journeys.py.
    """
    blank = base64.b64decode(ONE_PIXEL)
    for module in ("pictures", "report"):
        monkeypatch.setattr(f"esper.runs.{module}.png_bytes", lambda picture: blank)
