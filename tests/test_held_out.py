"""The test split is opened by final reports alone, whatever command is given."""

from __future__ import annotations

from pathlib import Path

import pytest

from esper import cli
from esper.tasks.task import Split, TestSplit
from tests.tiny import sets


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one whenever a test split is read."""
    reads: list[int] = []
    read = TestSplit.read

    def counted(split: TestSplit) -> Split:
        reads.append(1)
        return read(split)

    monkeypatch.setattr(TestSplit, "read", counted)
    return reads


def test_training_going_on_and_reporting_never_open_it(opened: list[int], tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    for words in (["train", "--task", "spirals", "--out", run, *sets()], ["resume", run], ["report", run]):
        assert cli.run(words) == 0
    assert opened == []


def test_a_comparison_opens_it_once_for_each_arm(opened: list[int], tmp_path: Path) -> None:
    arms = "static,random,heuristic"
    out = str(tmp_path / "compared")
    words = ["compare", "--task", "spirals", "--controllers", arms, "--out", out, "--members", "2"]
    assert cli.run([*words, *sets()]) == 0
    assert len(opened) == len(arms.split(","))
