"""Metrics reach every sink, and a missing package names its extra."""

from __future__ import annotations

import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from esper.runs.run_folder import RunFolder
from esper.runs.schema import RoundSummary
from esper.runs.sinks import SINK_NAMES, open_sinks
from esper.utils.errors import UserError


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path / "run", config="", seed=1)


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


class Recorder:
    """Stands in for the packages, and remembers what it was told."""

    def __init__(self, **options: object) -> None:
        self.options = options
        self.curves: list[tuple[str, float, int]] = []
        self.closed = False

    def add_scalar(self, name: str, value: float, global_step: int) -> None:
        self.curves.append((name, value, global_step))

    def log(self, values: dict[str, float], step: int) -> None:
        self.curves += [(name, value, step) for name, value in values.items()]

    def close(self) -> None:
        self.closed = True

    finish = close


def test_sinks_get_every_finite_number(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Recorder] = []

    def make(**options: object) -> Recorder:
        made.append(Recorder(**options))
        return made[-1]

    monkeypatch.setitem(sys.modules, "tensorboard", ModuleType("tensorboard"))
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=make))
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=make))
    summary = RoundSummary(
        round=4, rounds=9, members=1, member_epochs=3, seconds=1.0, op_shares={"WAIT": 0.5}
    )
    for sink in open_sinks(["tensorboard", "wandb"], folder, {"seed": 1}):
        sink.write(summary)
        sink.close()
    assert len(made) == 2
    for recorder in made:
        assert ("op_shares/WAIT", 0.5, 4) in recorder.curves
        assert "kl" not in {name for name, _, _ in recorder.curves}
        assert recorder.closed
    assert made[1].options["config"] == {"seed": 1}


def test_weights_and_biases_has_one_run_and_no_step_twice_after_a_run_went_back(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    protocol = pytest.importorskip("wandb.proto.wandb_internal_pb2", reason="reads what wandb wrote offline")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    for done, rounds in ((0, range(1, 5)), (2, range(3, 7))):  # the second time from round 2
        (sink,) = open_sinks(["wandb"], folder, {"seed": 1}, done)
        for number in rounds:
            sink.write(
                RoundSummary(round=number, rounds=6, members=1, member_epochs=3, seconds=1.0, kl=number / 4)
            )
        sink.close()
        time.sleep(1.1)  # the library names a folder by the second in which it was made
    points, ids = [], set()
    for file in sorted(folder.path.glob("wandb/offline-run-*/run-*.wandb")):
        for data in offline_records(file.read_bytes()):
            record = protocol.Record.FromString(data)
            if record.HasField("run"):
                ids.add(record.run.run_id)
            values = {".".join(item.nested_key) or item.key: item.value_json for item in record.history.item}
            if "kl" in values:
                points.append((int(values["_step"]), float(values["kl"])))
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


def test_no_step_is_drawn_twice_after_a_run_went_back(folder: RunFolder) -> None:
    reader = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="reads what tensorboard would show"
    )
    for done, rounds in (
        (0, range(1, 5)),
        (2, range(3, 7)),
    ):  # the second time from round 2
        (sink,) = open_sinks(["tensorboard"], folder, {}, done)
        for number in rounds:
            value = number + 10.0 * done
            sink.write(
                RoundSummary(
                    round=number, rounds=6, members=1, member_epochs=3, seconds=1.0, return_mean=value
                )
            )
        sink.close()
    curves = reader.EventAccumulator(str(folder.path / "tensorboard")).Reload()
    points = [(point.step, point.value) for point in curves.Scalars("return_mean")]
    assert points == [(1, 1.0), (2, 2.0), (3, 23.0), (4, 24.0), (5, 25.0), (6, 26.0)]
