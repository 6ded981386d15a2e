"""The run folder: whole or not at all, mended after a crash, and clear about what is wrong."""

from __future__ import annotations

import errno
import json
import os
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from esper.runs import files
from esper.runs.files import JsonLines
from esper.runs.run_folder import RunFolder
from esper.runs.schema import Comparison, ControllerResult, Event, RoundSummary
from esper.utils.errors import UserError


def make(path: Path) -> RunFolder:
    return RunFolder.create(path, config="seed: 3\n", seed=3, command=["esper", "train", "--out", "a b"])


def summary(number: int) -> RoundSummary:
    return RoundSummary(round=number, rounds=9, members=4, member_epochs=100 * number, seconds=2.0 * number)


def event(number: int) -> Event:
    return Event(round=number, step=4, member=1, kind="pruned", slot="r0c1", numbers={"contribution": -2.5})


def results() -> Comparison:
    reached = ControllerResult("static", [2], [0.9], [10.0], [3.0], [1e6], potential=[0.8], curve=[])
    return Comparison("digits", "cnn", [reached], [], remarks=["none"])


def test_a_new_folder_holds_what_made_the_run(tmp_path: Path) -> None:
    with make(tmp_path / "run") as folder:
        assert folder.about["seed"] == 3
    again = RunFolder.read(tmp_path / "run")
    assert again.config_text() == "seed: 3\n"
    assert again.command_text() == "esper train --out 'a b'"
    assert again.about["versions"]["python"].startswith("3.")
    assert again.checkpoints_path.is_dir()
    assert not list(tmp_path.rglob("*.tmp"))


def test_records_come_back_as_they_were_written(tmp_path: Path) -> None:
    with make(tmp_path / "run") as folder:
        folder.append_metrics(summary(1))
        folder.append_events([event(1), event(1)])
        folder.write(results())
        assert folder.metrics()[0].round == 1
        assert folder.metrics()[0].seconds == 2.0
        assert folder.metrics()[0].kl != folder.metrics()[0].kl, "unmeasured is NaN, not 0"
        assert folder.events() == [event(1), event(1)]
        assert folder.results() == results()
        assert folder.growth() is None
    assert json.loads((tmp_path / "run/metrics.jsonl").read_text())["kl"] is None


def test_a_half_written_last_line_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with make(path) as folder:
        folder.append_metrics(summary(1))
        folder.append_metrics(summary(2))
    with open(path / "metrics.jsonl", "ab") as file:
        file.write(b'{"round":3,"roun')
    assert [m.round for m in RunFolder.read(path).metrics()] == [1, 2]
    with RunFolder.open(path) as folder:
        folder.append_metrics(summary(3))
        assert [m.round for m in folder.metrics()] == [1, 2, 3]


@settings(deadline=None, max_examples=60)
@given(cut=st.integers(0, 400))
def test_any_cut_of_the_file_leaves_its_whole_lines(
    tmp_path_factory: pytest.TempPathFactory, cut: int
) -> None:
    path = tmp_path_factory.mktemp("cut") / "lines.jsonl"
    lines = JsonLines(path)
    lines.append([{"round": n, "text": "é" * n} for n in range(12)])
    whole = path.read_bytes()
    path.write_bytes(whole[:cut])
    lines.mend()
    assert len(list(lines)) == whole[:cut].count(b"\n")
    assert path.read_bytes() == b"".join(whole.splitlines(keepends=True)[: whole[:cut].count(b"\n")])


def test_resuming_forgets_later_rounds(tmp_path: Path) -> None:
    with make(tmp_path / "run") as folder:
        for number in (1, 2, 3):
            folder.append_events([event(number)])
            folder.append_metrics(summary(number))
        folder.truncate_after(2)
        assert [m.round for m in folder.metrics()] == [1, 2]
        assert [e.round for e in folder.events()] == [1, 2]


def test_a_damaged_line_in_the_middle_is_named(tmp_path: Path) -> None:
    with make(tmp_path / "run") as folder:
        (tmp_path / "run/metrics.jsonl").write_text('{"round":1}\n{"rou\n{"round":3}\n')
        with pytest.raises(UserError, match=r"metrics\.jsonl is damaged in line 2"):
            list(folder.metrics_file)


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    first = make(tmp_path / "run")
    with pytest.raises(UserError, match="another process is writing"):
        RunFolder.open(tmp_path / "run")
    first.close()
    RunFolder.open(tmp_path / "run").close()


@pytest.mark.parametrize(
    ("prepare", "says"),
    [
        (lambda p: None, "there is no run folder"),
        (lambda p: p.mkdir(), "has no versions.json"),
        (lambda p: (p.mkdir(), (p / "versions.json").write_text("{}")), "was not written by esper"),
        (lambda p: (p.mkdir(), (p / "versions.json").write_text('{"a":')), "is not JSON"),
        (
            lambda p: (
                p.mkdir(),
                (p / "versions.json").write_text('{"format":"esper-run","format_version":9,"seed":1}'),
            ),
            "run format 9; this esper reads 1",
        ),
    ],
)
def test_a_foreign_folder_is_refused(tmp_path: Path, prepare: object, says: str) -> None:
    prepare(tmp_path / "run")  # type: ignore[operator]
    with pytest.raises(UserError, match=says):
        RunFolder.open(tmp_path / "run")


def test_a_folder_in_use_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(UserError, match="exists and is not an empty folder"):
        make(tmp_path)
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


@pytest.mark.parametrize(
    "left",
    [
        [],
        ["checkpoints/"],
        ["checkpoints/", ".lock", ".versions.json.77.tmp"],
        ["checkpoints/", ".lock", "versions.json"],
        ["checkpoints/", ".lock", "versions.json", "command.txt", ".config.yaml.77.tmp"],
    ],
)
def test_a_run_that_was_killed_before_it_began_blocks_nothing(tmp_path: Path, left: list[str]) -> None:
    make(tmp_path / "whole").close()
    run = tmp_path / "run"
    run.mkdir()
    for name in left:
        if name.endswith("/"):
            (run / name).mkdir()
        else:
            source = tmp_path / "whole" / name
            (run / name).write_bytes(source.read_bytes() if source.exists() else b"half")
    with make(run) as folder:
        assert folder.config_text() == "seed: 3\n"


@pytest.mark.parametrize(
    "name", ["command.txt", "config.yaml", "versions.json", "checkpoints/a", "notes.tmp"]
)
def test_a_file_of_somebody_else_is_never_taken_for_a_beginning(tmp_path: Path, name: str) -> None:
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    (run / name).write_text("{}")
    with pytest.raises(UserError, match="exists and is not an empty folder; choose another folder"):
        make(run)
    assert (run / name).read_text() == "{}"


def test_what_a_killed_writer_left_half_written_is_removed_once_the_run_goes_on(tmp_path: Path) -> None:
    make(run := tmp_path / "run").close()
    (run / "lanes").mkdir()
    killed = [".config.yaml.7.tmp", "checkpoints/.last.safetensors.77.tmp", "lanes/.000001.safetensors.7.tmp"]
    others = ["notes.tmp", ".notes.tmp", "lanes/000001.safetensors", ".config.yaml.7.tmp~"]
    for name in killed + others:
        (run / name).write_bytes(b"half")
    RunFolder.read(run)
    assert all((run / name).exists() for name in killed), "to look changes nothing"
    RunFolder.open(run).close()
    assert [name for name in killed if (run / name).exists()] == []
    assert all((run / name).exists() for name in others)


def test_a_folder_is_in_use_while_it_is_open(tmp_path: Path) -> None:
    with make(tmp_path / "run") as folder:
        assert folder.in_use
        assert RunFolder.read(tmp_path / "run").in_use
    assert not folder.in_use
    assert not RunFolder.read(tmp_path / "run").in_use


def test_an_unwritable_place_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot create .*: a part of the path is a file"):
        make(tmp_path / "file" / "run")


def test_a_full_disk_is_one_sentence_and_keeps_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "results.json"
    files.write_atomically(path, b"old")

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(UserError, match=r"cannot write .*results\.json: the disk is full"):
        files.write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert not list(tmp_path.glob(".*"))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_while_appending_is_one_sentence() -> None:
    with pytest.raises(UserError, match="cannot write /dev/full: the disk is full; free some space"):
        JsonLines(Path("/dev/full")).append([{"round": 1}])


def test_a_failed_append_leaves_no_half_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = JsonLines(tmp_path / "lines.jsonl")
    lines.append([{"round": 1}])

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match="the disk is full"):
        lines.append([{"round": 2}])
    assert [line["round"] for line in lines] == [1]


def test_a_thousand_damaged_folders_are_told_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every file of a run cut, flipped, or replaced by noise: records, or our one sentence."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)  # a thousand folders need not reach the disk
    with make(tmp_path / "run") as folder:
        folder.append_metrics(summary(1))
        folder.append_metrics(summary(2))
        folder.append_events([event(1)])
        folder.write(results())
    names = ("metrics.jsonl", "events.jsonl", "results.json", "versions.json", "config.yaml")
    whole = {name: (tmp_path / "run" / name).read_bytes() for name in names}
    draw = random.Random(0)
    told = 0
    for i in range(1000):
        name = names[i % len(names)]
        data = bytearray(whole[name])
        at = draw.randrange(len(data))
        data[at : at + draw.randrange(1, 5)] = draw.choice(
            [b"", b"\xff", b"null", b"9", b"[]", draw.randbytes(3)]
        )
        (tmp_path / "run" / name).write_bytes(data)
        try:
            with RunFolder.open(tmp_path / "run") as opened:
                opened.truncate_after(1)
                assert all(m.round <= 1 for m in opened.metrics())
                opened.events()
                opened.results()
                opened.config_text()
        except UserError as error:
            told += "\n" not in str(error)
        for other, data_before in whole.items():
            (tmp_path / "run" / other).write_bytes(data_before)
    assert 300 < told < 1000
