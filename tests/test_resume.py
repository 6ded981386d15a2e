"""Nothing is lost: a run that is killed, stopped or damaged at its end goes on to the same bits."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from esper import cli, training
from esper.config import load_config
from esper.controllers import load_learned
from esper.lifecycle.actions import Actions
from esper.lifecycle.slot_states import SlotStates
from esper.lifecycle.stages import SEED_STAGES, Stage
from esper.runs.checkpoints import CheckpointStore, load_checkpoint, save_checkpoint
from esper.runs.trajectories import TrajectoryFolder
from esper.simic.environment import GrowthEnvironment, StepResult
from esper.training import TrainingRun
from tests.population.worlds import seeds_of
from tests.simic.worlds import make_environment
from tests.tiny import TINY, sets
from tests.waiting import read_line

ROUNDS = 4
SETTINGS = (f"rounds={ROUNDS}", "task=spirals", "telemetry.checkpoint_every=2", "telemetry.trajectories=3")
PATIENCE = 120.0  # seconds that a busy machine may take for a start


def metrics(run: Path) -> list[dict[str, object]]:
    """metrics.jsonl without what the clock on the wall says."""
    file = run / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return [{key: value for key, value in line.items() if key != "seconds"} for line in lines]


def weights(run: Path, name: str = "last") -> dict[str, torch.Tensor]:
    tensors = load_checkpoint(run / "checkpoints" / f"{name}.safetensors").tensors
    return {key: value for key, value in tensors.items() if key != "seconds"}


def assert_same_run(run: Path, other: Path) -> None:
    assert metrics(run) == metrics(other)
    for name in ("events.jsonl", "config.yaml"):
        assert (run / name).read_text() == (other / name).read_text(), name
    mine, theirs = TrajectoryFolder(run), TrajectoryFolder(other)
    assert mine.rounds() == theirs.rounds() != []
    assert all(mine.read_bytes(number) == theirs.read_bytes(number) for number in mine.rounds())
    for name in ("last", "round-000002", "round-000004"):
        mine, theirs = weights(run, name), weights(other, name)
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[key], theirs[key]) for key in mine), name


def play_out(run: TrainingRun) -> None:
    """All rounds that are left, without the report, which takes longer than the rounds."""
    with run.folder:
        run.run()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was never stopped."""
    path = tmp_path_factory.mktemp("runs") / "whole"
    play_out(TrainingRun.start(load_config(overrides=[*TINY, *SETTINGS]), path))
    assert len(metrics(path)) == ROUNDS
    return path


def tear(run: Path) -> None:
    """Lines of a round that no checkpoint knows, and half a line."""
    with open(run / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"round": 99}) + '\n{"round": 1')
    with open(run / "events.jsonl", "ab") as file:
        file.write(b'{"round": 99, "step": 0}\n\x00\x00\n')


def test_after_a_term_signal_and_lines_that_no_checkpoint_knows_a_run_goes_on(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "stopped"
    steps, step = iter(range(1000)), GrowthEnvironment.step

    def signalled(environment: GrowthEnvironment, actions: Actions) -> StepResult:
        if len(metrics(run)) == 1 and next(steps) == 1:  # in the middle of the second round
            os.kill(os.getpid(), signal.SIGTERM)
        return step(environment, actions)

    monkeypatch.setattr(GrowthEnvironment, "step", signalled)
    assert cli.run(["train", "--out", str(run), *sets(*SETTINGS)]) == 128 + signal.SIGTERM
    assert len(metrics(run)) == 2
    assert (
        f"stopped with 2 of {ROUNDS} rounds saved; go on with: esper resume {run}" in capsys.readouterr().out
    )
    assert (run / "report.html").is_file()
    tear(run)  # what a kill may leave; that the writer is killed indeed is held in test_processes.py
    monkeypatch.setattr(GrowthEnvironment, "step", step)
    assert cli.run(["resume", str(run), "--quiet"]) == 0
    assert_same_run(run, whole)
    assert (run / "report.html").read_text().count("api/trajectories ") > 0


def test_a_run_that_was_killed_in_its_first_round_begins_again(whole: Path, tmp_path: Path) -> None:
    path = tmp_path / "young"
    TrainingRun.start(load_config(overrides=[*TINY, *SETTINGS]), path).folder.close()
    (path / "events.jsonl").write_text('{"round": 1, "step": 0, "member": 0, "kind": "germinated"}\n')
    again = TrainingRun.resume(path)
    assert again.trainer.rounds_done == 0
    assert list(again.folder.events_file) == []
    play_out(again)
    assert_same_run(path, whole)


def test_a_budget_in_flops_is_converted_once_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment is built for it."""
    calls, conditions_of = [], training.conditions_of
    monkeypatch.setattr(training, "conditions_of", lambda specs: calls.append(1) or conditions_of(specs))
    play_out(TrainingRun.start(load_config(overrides=[*TINY, "task=spirals"]), tmp_path / "run"))
    assert len(calls) == 1
    assert load_learned(tmp_path / "run/checkpoints/last.safetensors").conditions is not None


def test_a_run_that_was_killed_after_it_went_back_lacks_no_round(whole: Path, tmp_path: Path) -> None:
    path = tmp_path / "back"
    shutil.copytree(whole, path)
    back = TrainingRun.resume(path, checkpoint=path / "checkpoints" / "round-000002.safetensors")
    back.folder.close()  # killed before it has done a round
    assert [file.stem for file in back.store.periodic()] == ["round-000002"], "later ones are given up"
    assert [line["round"] for line in metrics(path)] == [1, 2]
    again = TrainingRun.resume(path)
    assert again.trainer.rounds_done == 2
    play_out(again)
    assert_same_run(path, whole)


def test_a_second_ctrl_c_while_a_round_is_written_does_not_count_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, rounds, save = tmp_path / "run", iter(range(ROUNDS)), CheckpointStore.save

    def interrupted(*given: Any) -> None:
        if next(rounds) == ROUNDS - 1:
            raise KeyboardInterrupt
        save(*given)

    monkeypatch.setattr(CheckpointStore, "save", interrupted)
    cli.run(["train", "--out", str(run), *sets(*SETTINGS)])
    shown = capsys.readouterr()
    assert "the round in flight is not kept" in shown.err
    assert f"stopped with {ROUNDS - 1} of {ROUNDS} rounds saved; go on with: esper resume {run}" in shown.out


def test_ctrl_c_is_answered_and_the_second_one_ends_at_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, calls, step = tmp_path / "run", iter(range(1000)), GrowthEnvironment.step
    before = signal.getsignal(signal.SIGINT)

    def interrupted(environment: GrowthEnvironment, actions: Actions) -> StepResult:
        if next(calls) in (1, 2):
            os.kill(os.getpid(), signal.SIGINT)
        return step(environment, actions)

    monkeypatch.setattr(GrowthEnvironment, "step", interrupted)
    assert cli.run(["train", "--out", str(run), *sets("task=spirals")]) == 130
    out, err = capfd.readouterr()
    loading, first, last = out.splitlines()
    assert "loading PyTorch and spirals" in loading
    assert "training on spirals" in first
    assert last.endswith(f"go on with: esper resume {run}")
    told = f"finishing the round in flight (how long the first takes is not known) to save it in {run}"
    assert err.index(told) < err.index("stopped at once")
    assert "Traceback" not in err
    assert signal.getsignal(signal.SIGINT) is before
    assert TrainingRun.resume(run).trainer.rounds_done == 0


@pytest.mark.parametrize("seconds", [0.05, 0.5])
def test_ctrl_c_while_the_command_is_being_loaded_is_no_traceback(seconds: float, tmp_path: Path) -> None:
    begin = "from esper.__main__ import main; print('begun', flush=True); main()"
    process = subprocess.Popen(
        [sys.executable, "-c", begin, "train", "--out", tmp_path / "run", *sets()],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert read_line(process) == "begun\n"
    time.sleep(seconds)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == -signal.SIGINT
    assert "Traceback" not in err


# ---- a member in the middle of its life -------------------------------------------------------------------

STAGES = [stage for stage in Stage if stage is not Stage.UNKNOWN]


def live_environment(episode: int, empty: bool = False) -> GrowthEnvironment:
    """One member for every stage, its first slot in that stage; or members with nothing in them."""
    environment = make_environment(members=range(len(STAGES)), steps=8)
    slots = SlotStates.empty(len(STAGES), environment.num_slots)
    stage = slots.stage.clone()
    stage[:, 0] = torch.tensor([int(s) for s in STAGES])
    seed = torch.isin(stage, torch.tensor([int(s) for s in SEED_STAGES]))
    heard = torch.where(stage == Stage.BLENDING, 0.5, 1.0)
    alpha = torch.where(seed & (stage >= Stage.BLENDING), heard, 0.0)
    given = slots.replace(
        stage=stage,
        blueprint=torch.where(seed, 10, slots.blueprint),
        style=torch.where(stage == Stage.HOLDING, 3, slots.style),
        alpha=alpha,
        alpha_start=alpha,
        alpha_target=alpha,
    )
    environment.reset(episode, None if empty else given)
    return environment


def test_a_checkpoint_with_a_seed_in_every_stage_goes_on_in_another_environment(tmp_path: Path) -> None:
    environment, other = live_environment(episode=2), live_environment(episode=9)
    wait, before = Actions.wait(len(STAGES)), tmp_path / "before.safetensors"
    environment.step(wait)
    save_checkpoint(before, environment.state_dict(), {}, "test")
    other.load_state_dict(load_checkpoint(before, "test").tensors)
    for _ in range(2):
        environment.step(wait)
        other.step(wait)
    theirs = other.state_dict()
    assert theirs.keys() == environment.state_dict().keys()
    for name, mine in environment.state_dict().items():
        assert torch.equal(mine.nan_to_num(-7.0), theirs[name].nan_to_num(-7.0)), name
    assert bool((seeds_of(other.population).weights != 0).any())
    save_checkpoint(before, live_environment(episode=2, empty=True).state_dict(), {}, "test")
    other.load_state_dict(load_checkpoint(before).tensors)
    assert bool((other.slots.stage == Stage.DORMANT).all())
    assert bool((seeds_of(other.population).weights == 0).all()), "empty slots clear live ones"
