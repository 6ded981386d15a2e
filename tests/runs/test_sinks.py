"""Metrics reach every sink, and a missing package names its extra."""

from __future__ import annotations

import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from esper.config import load_config
from esper.runs.run_folder import RunFolder
from esper.runs.schema import RoundSummary
from esper.runs.sinks import SINKS, make_sinks
from esper.utils.errors import UserError


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path / "run", config="", seed=1)


def test_an_unknown_sink_and_a_missing_package_are_refused(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match="is 'parchment'; it should be 'tensorboard' or 'wandb'"):
        load_config(overrides=["telemetry.sinks=[parchment]"])
    for name in SINKS:
        monkeypatch.setitem(sys.modules, name, None)
        (sink,) = make_sinks([name], folder, {}, 0)
        with pytest.raises(UserError, match=r"needs the package .*esper-lite\[sinks\]"), sink:
            pass


def write_and_go_back(folder: RunFolder, name: str) -> None:
    """Rounds 1 to 4; then, from round 2 on, rounds 3 to 6."""
    for done, rounds in ((0, range(1, 5)), (2, range(3, 7))):
        (sink,) = make_sinks([name], folder, {"seed": 1}, done)
        with sink as write:
            for number in rounds:
                write(RoundSummary(number, 6, 1, 3, 1.0, kl=number / 4, op_shares={"WAIT": 0.5}))
        time.sleep(1.1 if name == "wandb" else 0)  # the library names a folder by the second


@pytest.mark.long
def test_weights_and_biases_has_one_run_and_no_step_twice_after_a_run_went_back(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    protocol = pytest.importorskip("wandb.proto.wandb_internal_pb2", reason="reads what wandb wrote offline")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    write_and_go_back(folder, "wandb")
    points, ids = [], set()
    for file in sorted(folder.path.glob("wandb/offline-run-*/run-*.wandb")):
        for data in offline_records(file.read_bytes()):
            record = protocol.Record.FromString(data)
            if record.HasField("run"):
                ids.add(record.run.run_id)
            values = {".".join(item.nested_key) or item.key: item.value_json for item in record.history.item}
            if "kl" in values:
                points.append((int(values["_step"]), float(values["kl"])))
                assert "value_loss" not in values, "it was not measured"
    assert points == [(number, number / 4) for number in range(1, 7)]
    assert len(ids) == 1


def offline_records(data: bytes) -> Iterator[bytes]:
    """The records of an offline run: a head of 7 bytes, then blocks of 32 KiB as in LevelDB's log."""
    place, record = 7, b""
    while place + 7 <= len(data):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        _, size, kind = struct.unpack_from("<IHB", data, place)
        record += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # whole, or the last piece of one
            yield record
            record = b""


def test_tensorboard_draws_no_step_twice_after_a_run_went_back(folder: RunFolder) -> None:
    reader = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="reads what tensorboard would show"
    )
    write_and_go_back(folder, "tensorboard")
    curves = reader.EventAccumulator(str(folder.path / "tensorboard")).Reload()
    assert [(point.step, point.value) for point in curves.Scalars("kl")] == [(n, n / 4) for n in range(1, 7)]
    assert "op_shares/WAIT" in curves.Tags()["scalars"]
    assert "value_loss" not in curves.Tags()["scalars"]
