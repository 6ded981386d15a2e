"""Runs that several processes share: the same bits on any number of them, whatever happens to one."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from esper import cli
from esper.config import load_config
from esper.training import TrainingRun
from esper.utils.errors import LostProcessError, ReportedElsewhereError, UserError
from esper.utils.gather import Gather, all_or_none
from tests.shards import on_processes
from tests.test_resume import ROUNDS, SETTINGS, assert_same_run, metrics, play_out
from tests.tiny import TINY, sets
from tests.waiting import run_group

PATIENCE = 300.0  # seconds that a busy machine may take for a run and its second start
SHARDED = (*SETTINGS, "members=4", "shards=3", "episode.steps=2", "reward.control_variate=true")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of one process that nobody disturbs."""
    path = tmp_path_factory.mktemp("runs") / "alone"
    play_out(TrainingRun.start(load_config(overrides=[*TINY, *SHARDED]), path))
    return path


def assert_undisturbed(run: Path, alone: Path) -> None:
    assert len(metrics(run)) == ROUNDS
    assert_same_run(run, alone)
    assert (run / "report.html").is_file()
    assert not list(run.rglob("*.tmp")), "nothing is half-written"


@pytest.mark.first
@pytest.mark.skipif(sys.platform != "linux", reason="forks")
def test_killed_started_again_and_at_another_number_a_run_has_the_bits_of_one_process(
    alone: Path, tmp_path: Path
) -> None:
    """Two processes, the one that writes killed, both started again; then three, from a checkpoint of two.

    In the end one of the three hangs, which the others tell as a sentence.
    """
    run, kept = tmp_path / "shared", tmp_path / "kept"
    older = run / "checkpoints" / "round-000002.safetensors"
    command = [sys.executable, "-m", "tests.together", run, kept, older, *sets(*SHARDED)]
    done = run_group(command, PATIENCE, {})
    out = done.stdout
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        assert f"process {rank} ended after 1 restarts" in out
    assert re.search(r"^[01] rounds lost", out, re.M), "at most the one in flight"
    assert_undisturbed(kept, alone)
    assert_undisturbed(run, alone)
    late = "another process did not come within 0.5 s: look whether it hangs"
    assert f"process 0 of 3, after 2 rounds: {late}" in out
    assert out.count(" of 3, after 2 rounds: another process ") == 2


# ---- the same without processes --------------------------------------------------------------------------


def test_what_fails_in_one_process_fails_in_all_and_the_first_tells() -> None:
    def work(gather: Gather) -> str:
        def fail() -> None:
            if gather.rank == 1:
                raise OSError("no disk")

        with pytest.raises(UserError, match=r"process 1 on .*: no disk") as caught:
            all_or_none(gather, fail)
        return type(caught.value).__name__

    assert on_processes(3, work) == ["UserError", "ReportedElsewhereError", "ReportedElsewhereError"]


def test_one_process_writes_and_all_stop_when_one_is_asked_to(tmp_path: Path) -> None:
    class Asked:
        """A stop that comes to one process, after its first look."""

        def __init__(self, rank: int) -> None:
            self.rank, self.uses_metrics = rank, 0

        @property
        def requested(self) -> bool:
            self.uses_metrics += 1
            return self.rank == 1 and self.uses_metrics > 1

    settings = load_config(overrides=[*TINY, "task=spirals", "rounds=3", "members=4"])
    path = tmp_path / "run"

    def work(gather: Gather) -> tuple[int, bool, int | None]:
        run = TrainingRun.start(settings, path, gather=gather)
        run.run(Asked(gather.rank))  # type: ignore[arg-type]
        if run.writes:
            run.folder.close()
        return run.trainer.rounds_done, run.writes, run.config.shards

    assert on_processes(2, work) == [(1, True, 2), (1, False, 2)]
    assert len(metrics(path)) == 1
    with pytest.raises(UserError, match="shards is 2 and there are 3 processes"):
        on_processes(3, lambda gather: TrainingRun.resume(path, gather=gather))
    assert TrainingRun.resume(path).trainer.rounds_done == 1


@pytest.mark.parametrize(
    ("error", "notes", "rank", "code", "output"),
    [
        (UserError("bad"), [], 0, 2, "esper: bad"),
        (UserError("bad"), [], 1, 2, ""),
        (ReportedElsewhereError("bad"), [], 0, 2, ""),
        (
            TypeError("odd\nthing"),
            ["members 2 to 3, round 1, step 4"],
            1,
            1,
            "members 2 to 3, round 1, step 4: ",
        ),
        (ValueError("odd"), ["round 1"], 1, 1, "round 1: ValueError: odd at "),
        (LostProcessError("gone"), [], 1, 1, ": gone"),
    ],
)
def test_a_process_that_fails_says_where_in_one_line(
    error: Exception,
    notes: list[str],
    rank: int,
    code: int,
    output: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for note in notes:
        error.add_note(note)

    def fail(*_: object) -> None:
        raise error

    for name, value in {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr("esper.commands.common.resolve_settings", fail)
    waited: list[float] = []
    monkeypatch.setattr("time.sleep", waited.append)
    assert cli.run(["train"]) == code
    assert waited == ([] if output else [cli.REPORT_SECONDS]), "wait until another has reported"
    said = capsys.readouterr().err
    assert output in said
    assert said.count("\n") == (output != "")
    if code == 1:
        assert said.startswith(f"esper: process {rank} of 2 on ")


def test_a_command_for_one_process_is_refused_in_several(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert cli.run(["tasks"]) == 2
    assert "torchrun started 2 processes, and 'esper tasks' is for one" in capsys.readouterr().err


def test_a_run_that_may_be_started_again_needs_a_folder_with_a_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["train", "--task", "spirals", "--resume"]) == 2
    assert "give --out FOLDER" in capsys.readouterr().err
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    assert cli.run(["train", "--task", "spirals"]) == 2
    assert "give --out FOLDER" in capsys.readouterr().err
