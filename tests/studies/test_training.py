"""The command that trains: files, log, resume."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from safetensors.torch import load_file

from esper.builders import make_specs
from esper.config import RunConfig, load_config
from esper.foundation.errors import UserError
from esper.foundation.gather import Alone
from studies import training, variants
from studies.distribution import FAMILIES, make_tasks
from studies.setting import CONFIG, RECIPE, Setting
from tests.shards import on_processes

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
    monkeypatch.setattr(training, "make_tasks", partial(make_tasks, count=2))
    small = {"ppo": {"epochs": 1, "minibatches": 1}, "policy": {"width": 8, "embedding": 2}}

    def config_of(name: str) -> RunConfig:
        whole = variants.config_of(name)
        return whole.model_copy(
            update={part: getattr(whole, part).model_copy(update=change) for part, change in small.items()}
        )

    monkeypatch.setattr(training, "config_of", config_of)


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


def test_processes_that_share_the_members_train_the_same_agents(tmp_path: Path) -> None:
    def files(folder: Path) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}

    short = ("--shards", "2", "--rounds", "2")
    training.train(options(tmp_path / "alone", *short))
    on_processes(2, lambda gather: training.train(options(tmp_path / "shared", *short), gather))
    assert files(tmp_path / "shared") == files(tmp_path / "alone")
    assert len((tmp_path / "shared" / "train.jsonl").read_text().splitlines()) == 6


@pytest.mark.parametrize(("seconds", "expected"), [(0, 1), (29, 2), (30, 3), (99, 9)])
def test_it_stops_when_another_round_does_not_fit(
    monkeypatch: pytest.MonkeyPatch, seconds: float, expected: int
) -> None:
    now = 0.0
    monkeypatch.setattr(training.time, "perf_counter", lambda: now)
    timetable = training.Timetable(seconds)
    played = []
    for number in timetable.rounds(first=3, last=100, gather=Alone()):
        now += 10
        played.append(number)
        assert f"{10 * len(played)} of {seconds} s" in str(timetable)
    assert played == list(range(3, 3 + expected))


@pytest.mark.parametrize("word", ["mian", "main:x"])
def test_an_unknown_agent_is_refused(word: str) -> None:
    with pytest.raises(UserError, match="NAME:COUNT"):
        training.agent_names([word])


def test_the_preset_for_a_gpu_learns_as_the_study_does() -> None:
    assert load_config(preset="gpu").ppo == CONFIG.ppo


def test_a_variant_differs_from_the_recipe_by_its_own_settings() -> None:
    main = variants.config_of("main-0")
    assert main == CONFIG
    for name, overrides in variants.KNOWN.items():
        other = variants.config_of(f"{name}-3")
        assert other == load_config(RECIPE, overrides=[*overrides, "seed=3"])
        assert (other.model_copy(update={"seed": 0}) == main) == (name == "main")
        for part in ("episode", "governor", "lifecycle", "population", "policy"):
            assert getattr(other, part) == getattr(main, part), "one world for all"


def test_the_recipe_trains_on_the_families_of_the_study() -> None:
    """`esper train -c studies/tamiyo.yaml` meets the tasks, members and rules of the study's training."""
    config = CONFIG.model_copy(update={"members": 2, "device": "cpu"})
    for spec, family in zip(make_specs(config), FAMILIES, strict=True):
        world = training.world_of(family, Setting(graphs=True), 2)
        assert [t.name for t in spec.variants] == [t.name for t in make_tasks(family)]
        for name in ("gamma", "episode", "reward", "governor", "lifecycle", "population"):
            assert getattr(spec, name) == getattr(world, name), name
    assert CONFIG.learner.patience == 1.0
