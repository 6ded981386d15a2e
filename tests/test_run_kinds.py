"""A run folder knows what made it: each kind goes on in its own way, and none is erased by another."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from esper import cli
from esper.config import load_config
from esper.runs.run_folder import Kind, RunFolder
from esper.training import TrainingRun
from esper.utils.errors import UserError
from esper.utils.settings import dump
from tests.tiny import GROWING, TINY, sets

SETTINGS = load_config(overrides=[*TINY, "task=spirals", "members=2"])
REQUESTS: dict[Kind, dict[str, object]] = {
    "compare": {"controllers": "static,random:0.5"},
    "grow": {"controller": "heuristic"},
}


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports and archives take longer than the runs, and have tests of their own."""

    def write(folder: RunFolder) -> Path:
        folder.report_path.write_text("a report")
        return folder.report_path

    monkeypatch.setattr("esper.watch.report.write_report", write)
    monkeypatch.setattr("esper.grown_network.save_archive", lambda model, sample, path: path.touch())


def interrupted(path: Path, kind: Kind) -> Path:
    """What a comparison or a growth leaves behind if it is killed before its end."""
    RunFolder.create(
        path, config=dump(SETTINGS), seed=0, kind=kind, request=REQUESTS[kind], command=["esper", kind]
    ).close()
    return path


def files(path: Path) -> dict[str, bytes]:
    return {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file()}


def test_an_interrupted_comparison_is_done_again_as_it_was_asked_for(tmp_path: Path) -> None:
    path, whole = interrupted(tmp_path / "again", "compare"), tmp_path / "whole"
    assert cli.run(["resume", str(path)]) == 0
    few = sets(tiny=GROWING)
    arguments = ["-C", "static,random:0.5", "-n", "2", "--task", "spirals", "--out", str(whole), *few]
    assert cli.run(["compare", *arguments, "--set", "members=2"]) == 0
    for name in ("results.json", "trajectories/000002.safetensors"):
        assert (path / name).read_bytes() == (whole / name).read_bytes()


@pytest.mark.parametrize("kind", ["compare", "grow"])
def test_nothing_is_trained_in_a_folder_of_another_kind(
    tmp_path: Path, kind: Kind, capsys: pytest.CaptureFixture[str]
) -> None:
    path = interrupted(tmp_path / "run", kind)
    before = files(path)
    with pytest.raises(UserError, match=f"holds a run of 'esper {kind}', which trains nothing"):
        TrainingRun.resume(path)
    assert cli.run(["resume", str(path), "--set", "rounds=9"]) == 2
    assert "--set is for runs that train" in capsys.readouterr().err
    assert cli.run(["train", "--out", str(path), *sets("task=spirals")]) == 2
    assert f"holds a run of 'esper {kind}'; choose another folder" in capsys.readouterr().err
    assert files(path) == before


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("kinds") / "trained"
    run = TrainingRun.start(SETTINGS, path)
    with run.folder:
        run.run()
    return path


@pytest.mark.parametrize("command", [["resume"], ["train", "--resume", "--out"]])
def test_a_run_is_extended_to_the_bits_of_one_that_was_longer_from_the_start(
    command: list[str], trained: Path, tmp_path: Path
) -> None:
    longer, path = tmp_path / "longer", Path(shutil.copytree(trained, tmp_path / "run"))
    run = TrainingRun.start(SETTINGS.model_copy(update={"rounds": 3}), longer)
    with run.folder:
        run.run()
    assert cli.run([*command, str(path), "--quiet", "--set", "rounds=3"]) == 0
    for name in ("events.jsonl", "config.yaml"):
        assert (path / name).read_bytes() == (longer / name).read_bytes(), name
    assert [line["round"] for line in RunFolder.read(path).metrics_file] == [1, 2, 3]
    if command == ["resume"]:
        assert len(RunFolder.read(path).command_text().splitlines()) == 2, "both command lines are kept"


def test_metrics_that_were_deleted_are_missed(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = Path(shutil.copytree(trained, tmp_path / "run"))
    (path / "metrics.jsonl").unlink()
    assert cli.run(["resume", str(path), "--set", "rounds=3"]) == 0
    assert "metrics.jsonl lacks 2 rounds of the 2 that are done" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["resume"], ["train", "--resume", "--out"]])
@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("rounds=1", "rounds is 1, and 2 are done; give at least that"),
        ("members=5", "was begun with 2, which stays as it is; give the same"),
        ("ppo.gamma=0.5", "ppo.gamma is 0.5, and"),
        ("round=9", "round is not a setting; did you mean 'rounds'?"),
    ],
)
def test_other_settings_of_a_run_that_has_begun_stay(
    command: list[str], trained: Path, override: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = files(trained)
    assert cli.run([*command, str(trained), "--set", override]) == 2
    assert says in capsys.readouterr().err
    assert files(trained) == before


@pytest.mark.parametrize("kind", ["compare", "grow"])
def test_an_interrupted_run_is_done_again_and_one_that_was_killed_before_its_report_gets_it(
    kind: Kind, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = interrupted(tmp_path / "run", kind)

    def killed(folder: RunFolder) -> Path:
        raise RuntimeError("killed")

    with monkeypatch.context() as patch:
        patch.setattr("esper.watch.report.write_report", killed)
        with pytest.raises(RuntimeError, match="killed"):
            cli.run(["resume", str(path), "--quiet"])
    before = files(path)
    assert "report.html" not in before
    assert "metrics.jsonl" not in before, "nothing was trained"
    assert ("network.pt2" in before) == (kind == "grow")
    results = RunFolder.read(path).results()
    assert results is not None
    arms = ["static", "heuristic" if kind == "grow" else "random:0.5"]
    assert [result.name for result in results.controllers] == arms, "growth beside no growth"
    capsys.readouterr()
    assert cli.run(["resume", str(path)]) == 0
    assert f"wrote {path / 'report.html'}" in capsys.readouterr().out
    assert cli.run(["resume", str(path)]) == 0
    assert "is finished" in capsys.readouterr().out
    assert files(path) == before | {"report.html": b"a report"}
