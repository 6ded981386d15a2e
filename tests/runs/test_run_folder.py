"""The run folder: whole or not at all, mended after a crash, and clear about what is wrong."""

from __future__ import annotations

import errno
import os
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import esper
from esper.runs import files
from esper.runs.files import JsonLines
from esper.runs.run_folder import RunFolder
from esper.runs.schema import Comparison, ControllerResult, Event, RoundSummary, from_json
from esper.utils.errors import UserError


def make(path: Path) -> RunFolder:
    return RunFolder.create(path, config="seed: 3\n", seed=3, command=["esper", "train", "--out", "a b"])


def summary(number: int) -> RoundSummary:
    return RoundSummary(round=number, rounds=9, members=4, member_epochs=100 * number, seconds=2.0 * number)


def event(number: int) -> Event:
    return Event(round=number, step=4, member=1, kind="pruned", slot="r0c1", numbers={"contribution": -2.5})


def results() -> Comparison:
    measured = {"potential": [0.8], "curve": [], "test_loss": [1.5], "seconds": [2.0]}
    reached = ControllerResult("static", [2], [0.9], [10.0], [3.0], [1e6], **measured)  # type: ignore[arg-type]
    return Comparison("digits", "cnn", [reached], [], remarks=["none"], verdicts=["level"])


def test_a_folder_holds_what_made_the_run_and_its_records(tmp_path: Path) -> None:
    with make(tmp_path / "run") as folder:
        folder.metrics_file.append(summary(1))
        folder.events_file.append(event(1), event(1))
        folder.write(results())
    again = RunFolder.read(tmp_path / "run")
    assert again.about["seed"] == 3
    assert again.settings() == {"seed": 3}
    assert again.command_text() == "esper train --out 'a b'"
    assert again.about["versions"]["python"].startswith("3.")
    (line,) = again.metrics_file
    assert (line["seconds"], line["kl"]) == (2.0, None), "unmeasured is not 0"
    assert [from_json(Event, line, "") for line in again.events_file] == [event(1), event(1)]
    assert again.results() == results()
    assert again.growth() is None
    assert not list(tmp_path.rglob("*.tmp"))


@settings(deadline=None, max_examples=60)
@given(cut=st.integers(0, 400))
def test_any_cut_of_the_file_leaves_its_whole_lines(
    tmp_path_factory: pytest.TempPathFactory, cut: int
) -> None:
    path = tmp_path_factory.mktemp("cut") / "lines.jsonl"
    lines = JsonLines(path)
    lines.append(*[{"round": n, "text": "é" * n} for n in range(12)])
    whole = path.read_bytes()
    path.write_bytes(whole[:cut])
    lines.repair()
    assert len(list(lines)) == whole[:cut].count(b"\n")
    assert path.read_bytes() == b"".join(whole.splitlines(keepends=True)[: whole[:cut].count(b"\n")])


def test_a_damaged_line_in_the_middle_is_named(tmp_path: Path) -> None:
    with make(tmp_path / "run") as folder:
        (tmp_path / "run/metrics.jsonl").write_text('{"round":1}\n{"rou\n{"round":3}\n')
        with pytest.raises(UserError, match=r"metrics\.jsonl is damaged: line 2"):
            list(folder.metrics_file)


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    with make(tmp_path / "run") as first:
        assert first.in_use
        assert RunFolder.read(tmp_path / "run").in_use
        with pytest.raises(UserError, match="another process writes"):
            RunFolder.open(tmp_path / "run")
    assert not RunFolder.read(tmp_path / "run").in_use
    RunFolder.open(tmp_path / "run").close()


def test_a_page_that_asks_who_writes_keeps_nobody_from_writing(tmp_path: Path) -> None:
    make(tmp_path / "run").close()
    asked = RunFolder.read(tmp_path / "run")
    with ThreadPoolExecutor() as pool:
        done = pool.submit(lambda: [RunFolder.open(tmp_path / "run").close() for _ in range(50)])
        while not done.done():
            assert asked.in_use in (True, False)
        assert len(done.result()) == 50


@pytest.mark.parametrize(
    ("versions", "says"),
    [
        (None, "has no versions.json"),
        ("{}", "was not written by esper"),
        ('{"a":', "is not JSON"),
        ('{"format":"esper-run","format_version":9,"seed":1}', "run format 9, not 1"),
        ('{"format":"esper-run","format_version":1,"seed":1,"request":null}', "was not written by esper"),
        ('{"format":"esper-run","format_version":1,"seed":1,"versions":[]}', "was not written by esper"),
    ],
)
def test_a_foreign_folder_is_refused(tmp_path: Path, versions: str | None, says: str) -> None:
    with pytest.raises(UserError, match="there is no run folder"):
        RunFolder.open(tmp_path / "run")
    (tmp_path / "run").mkdir()
    if versions is not None:
        (tmp_path / "run" / "versions.json").write_text(versions)
    with pytest.raises(UserError, match=says):
        RunFolder.open(tmp_path / "run")


@pytest.mark.parametrize("name", ["thesis.tex", "config.yaml", "checkpoints/a"])
def test_a_run_begins_in_an_empty_folder_or_one_that_was_killed_before_it_began(
    tmp_path: Path, name: str
) -> None:
    make(run := tmp_path / "run").close()
    (run / "config.yaml").rename(run / ".config.yaml.77.tmp")
    make(run).close()
    (run / "config.yaml").unlink()
    (run / name).write_text("{}")
    with pytest.raises(UserError, match="exists and is not an empty folder"):
        make(run)
    assert (run / name).read_text() == "{}"


def test_what_a_killed_writer_left_half_written_is_removed_once_the_run_goes_on(tmp_path: Path) -> None:
    make(run := tmp_path / "run").close()
    (run / "trajectories").mkdir()
    killed = [".config.yaml.7.tmp", "checkpoints/.last.safetensors.77.tmp", "trajectories/.000001.x.7.tmp"]
    others = ["notes.tmp", ".notes.tmp", "trajectories/000001.safetensors", ".config.yaml.7.tmp~"]
    for name in killed + others:
        (run / name).write_bytes(b"half")
    RunFolder.read(run)
    assert all((run / name).exists() for name in killed), "to look changes nothing"
    RunFolder.open(run).close()
    assert [name for name in killed if (run / name).exists()] == []
    assert all((run / name).exists() for name in others)


def test_a_run_is_resumed_with_the_same_settings_and_from_its_checkpoint(tmp_path: Path) -> None:
    with make(tmp_path / "run") as folder:
        last = folder.checkpoints_path / "last.safetensors"
        folder.metrics_file.append(summary(1))
        folder.report_path.write_text("a page that 'esper report' wrote in the first round")
        folder.check_checkpoint(last)  # a first round in flight may be lost
        folder.metrics_file.append(summary(2))
        with pytest.raises(UserError, match=r"last.safetensors is missing: to go on would erase them"):
            folder.check_checkpoint(last)
        last.write_bytes(b"")
        folder.check_checkpoint(last)
        before = {"seed": 3, "rounds": 2, "ppo": {"clip": 0.2}}
        folder.check_settings(before, before | {"rounds": 9}, ["rounds"])
        with pytest.raises(UserError, match=r"ppo.clip is 0.1, and .* was begun with 0.2"):
            folder.check_settings(before, before | {"ppo": {"clip": 0.1}}, ["rounds"])


def test_a_full_disk_is_one_sentence_and_keeps_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot create .*: not a directory"):
        make(tmp_path / "file" / "run")
    path, lines = tmp_path / "results.json", JsonLines(tmp_path / "lines.jsonl")
    files.write_atomically(path, b"old")

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(UserError, match=r"cannot write .*results\.json: no space left"):
        files.write_atomically(path, b"new")
    with pytest.raises(UserError, match="no space left"):
        lines.append({"round": 2})
    assert path.read_bytes() == b"old"
    assert not list(tmp_path.glob(".*"))


def test_damaged_folders_are_told_in_one_sentence(tmp_path: Path) -> None:
    """Every file of a run cut, flipped, or replaced by noise: records, or our one sentence."""
    with make(tmp_path / "run") as folder:
        folder.metrics_file.append(summary(1))
        folder.metrics_file.append(summary(2))
        folder.events_file.append(event(1))
        folder.write(results())
    names = ("metrics.jsonl", "events.jsonl", "results.json", "versions.json", "config.yaml")
    whole = {name: (tmp_path / "run" / name).read_bytes() for name in names}
    draw = random.Random(0)
    told = 0
    for i in range(250):
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
                assert all(line["round"] <= 1 for line in opened.metrics_file)
                list(opened.events_file)
                opened.results()
                opened.settings()
        except UserError as error:
            told += "\n" not in str(error)
        for other, data_before in whole.items():
            (tmp_path / "run" / other).write_bytes(data_before)
    assert 75 < told < 250


def test_the_folder_names_the_version_that_runs(tmp_path: Path) -> None:
    make(tmp_path / "run").close()
    assert RunFolder.read(tmp_path / "run").about["versions"]["esper-lite"] == esper.__version__
