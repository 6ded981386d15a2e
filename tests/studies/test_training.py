"""The command that trains: files, log, resume."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file

from esper.config import load_config
from esper.foundation.errors import UserError
from esper.tamiyo.policy.network import TamiyoNetConfig
from studies import training
from studies.setting import PPO

TINY = [
    "--agents",
    "main:2",
    "no_memory",
    "--members",
    "2",
    "--steps",
    "3",
    "--batches",
    "1",
    "--rounds",
    "4",
]


def options(out: Path, *more: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    training.add_options(parser)
    return parser.parse_args([*TINY, "--out", str(out), "--device", "cpu", *more])


@pytest.fixture(autouse=True)
def little_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = training.FAMILIES[-1]
    monkeypatch.setattr(training, "FAMILIES", (tables, replace(tables, name="others")))
    monkeypatch.setattr(training, "TASKS_PER_FAMILY", 2)
    monkeypatch.setattr(training, "PPO", training.PPO.model_copy(update={"epochs": 1, "minibatches": 1}))
    monkeypatch.setattr(training, "POLICY", TamiyoNetConfig(width=8, embedding=2))


def test_agents_are_saved_and_every_round_is_logged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    training.train(options(tmp_path))
    names = ["main-0", "main-1", "no_memory-0"]
    assert sorted(path.name for path in tmp_path.glob("*.safetensors")) == [f"{n}.safetensors" for n in names]
    assert int(load_file(tmp_path / "main-1.safetensors")["updates"]) == 4
    rows = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    assert [(row["round"], row["agent"]) for row in rows] == [(r, n) for r in range(4) for n in names]
    assert [row["family"] for row in rows[::3]] == ["tables", "others", "tables", "others"]
    assert len(capsys.readouterr().out.splitlines()) == 4

    training.train(options(tmp_path, "--resume", "--rounds", "5"))
    assert int(load_file(tmp_path / "main-1.safetensors")["updates"]) == 5
    assert len((tmp_path / "train.jsonl").read_text().splitlines()) == 15


@pytest.mark.parametrize(("seconds", "expected"), [(0, 1), (29, 2), (30, 3), (99, 9)])
def test_it_stops_when_another_round_does_not_fit(
    monkeypatch: pytest.MonkeyPatch, seconds: float, expected: int
) -> None:
    now = 0.0
    monkeypatch.setattr(training.time, "perf_counter", lambda: now)
    timetable = training.Timetable(seconds)
    played = []
    for number in timetable.rounds(first=3, last=100):
        now += 10
        played.append(number)
        assert f"{10 * len(played)} of {seconds} s" in str(timetable)
    assert played == list(range(3, 3 + expected))


@pytest.mark.parametrize("word", ["mian", "main:x"])
def test_an_unknown_agent_is_refused(word: str) -> None:
    with pytest.raises(UserError, match="NAME:COUNT"):
        training.agent_names([word])


def test_the_preset_for_a_gpu_learns_as_the_study_does() -> None:
    assert load_config(preset="gpu").ppo == PPO
