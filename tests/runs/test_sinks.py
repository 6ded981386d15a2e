"""Metrics reach TensorBoard once each, and a missing package names its extra."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from esper.runs.run_folder import RunFolder
from esper.runs.schema import RoundSummary
from esper.runs.sinks import tensorboard_sink
from esper.utils.errors import UserError


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path / "run", config="", seed=1)


def test_tensorboard_draws_no_step_twice_after_a_run_went_back(folder: RunFolder) -> None:
    reader = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="reads what tensorboard would show"
    )
    for done, rounds in ((0, range(1, 5)), (2, range(3, 7))):
        with tensorboard_sink(folder, done) as write:
            for number in rounds:
                write(RoundSummary(number, 6, 1, 3, 1.0, kl=number / 4, op_shares={"WAIT": 0.5}))
    curves = reader.EventAccumulator(str(folder.path / "tensorboard")).Reload()
    assert [(point.step, point.value) for point in curves.Scalars("kl")] == [(n, n / 4) for n in range(1, 7)]
    assert "op_shares/WAIT" in curves.Tags()["scalars"]
    assert "value_loss" not in curves.Tags()["scalars"]


def test_a_missing_package_names_its_extra(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    needs = pytest.raises(UserError, match=r"needs the package tensorboard.*esper-lite\[sinks\]")
    with needs, tensorboard_sink(folder, 0):
        pass
