"""Metrics reach every sink, and a missing package names its extra."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from esper.errors import UserError
from esper.telemetry.run_folder import RunFolder
from esper.telemetry.schema import RoundSummary
from esper.telemetry.sinks import SINK_NAMES, open_sinks


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path / "run", config="", seed=1)


def test_the_run_folder_is_always_written(folder: RunFolder) -> None:
    (sink,) = open_sinks([], folder, {})
    sink.write(RoundSummary(round=1, rounds=2, members=1, member_epochs=3, seconds=1.0))
    sink.close()
    assert [m.member_epochs for m in folder.metrics()] == [3]


def test_an_unknown_sink_is_refused(folder: RunFolder) -> None:
    with pytest.raises(UserError, match="sink is 'parchment'; allowed are tensorboard, wandb"):
        open_sinks(["parchment"], folder, {})


@pytest.mark.parametrize("name", SINK_NAMES)
def test_a_missing_package_names_the_extra(
    folder: RunFolder, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UserError, match=r"needs the package .*esper-lite\[sinks\]"):
        open_sinks([name], folder, {})
