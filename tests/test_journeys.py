"""Journeys: what a person types, from the first look to a grown network in hand."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
import torch

from esper import cli
from esper.config import HostConfig, load_config, preset_names
from esper.population.hosts import HOST_PRESETS
from esper.runs.run_folder import RunFolder
from esper.tasks.task import TestSplit
from esper.training import TrainingRun
from tests.tiny import TINY, sets

ROOT = Path(__file__).parent.parent
SMALL = ("rounds=1", "members=2", "episode.steps=3")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What 'esper train' leaves behind."""
    run = tmp_path_factory.mktemp("journeys") / "trained"
    assert (
        cli.run(["train", "--task", "spirals", "--out", str(run), *sets("reward.control_variate=true")]) == 0
    )
    return run


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """Grows by one whenever a test split is read, which final reports alone may do."""
    reads: list[None] = []
    read = TestSplit.read
    monkeypatch.setattr(TestSplit, "read", lambda split: (reads.append(None), read(split))[1])
    return reads


def test_a_run_folder_is_whole(trained: Path) -> None:
    names = {path.name for path in trained.iterdir()}
    files = {"config.yaml", "versions.json", "command.txt", "metrics.jsonl", "events.jsonl"}
    assert names >= files | {"report.html", "checkpoints"}
    assert [path.name for path in (trained / "checkpoints").iterdir()] == ["last.safetensors"]
    folder = RunFolder.read(trained)
    assert [line["round"] for line in folder.metrics_file] == [1, 2]
    assert all("above_twin" in line["extra"] for line in folder.metrics_file)
    assert folder.trajectories.rounds() == [1, 2]
    page = folder.report_path.read_text()
    assert page.count("api/trajectories ") == 2
    assert not re.search(r"(src|href)=\"http", page), "the page needs nothing from elsewhere"


def test_training_never_looks_at_the_test_split(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], opened: list[None]
) -> None:
    run = tmp_path / "run"
    assert cli.run(["train", "--task", "spirals", "--out", str(run), *sets(*SMALL)]) == 0
    assert f"wrote {run}" in capsys.readouterr().out
    for command in ("resume", "report"):
        assert cli.run([command, str(run)]) == 0
    assert opened == []


def test_growing_with_a_trained_controller(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "grown"
    assert cli.run(["grow", "-C", f"{trained}:greedy", "-n", "3", "-o", str(out)]) == 0
    output = capsys.readouterr().out
    grew = "What grew: nothing" not in output
    assert f"# A network {'grown' if grew else 'trained'} on spirals" in output
    assert RunFolder.read(out).trajectories.rounds() == [0]
    assert RunFolder.read(out).results() is not None
    saved = RunFolder.read(out).network()  # what its files hold: tests/growing/test_grown_network.py
    assert saved is not None
    assert f"test accuracy without growth | {saved.ungrown_test_accuracy:.2%}" in output


def test_comparing_on_equal_footing(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], opened: list[None]
) -> None:
    out = tmp_path / "compared"
    names = f"static,random:0.5,{trained},fixed:hidden=9"
    code = cli.run(["compare", "-C", names, "-n", "3", "-o", str(out)])
    output = capsys.readouterr().out
    assert code == 0
    assert len(opened) == 4, "once for each arm"
    results = RunFolder.read(out).results()
    assert results is not None
    arms = [result.name for result in results.controllers]
    assert arms == names.split(",")
    assert all(list(r.members) == [0, 1, 2] for r in results.controllers)
    assert {d.quantity for d in results.differences} == {"test_accuracy", "parameters", "potential", "flops"}
    assert len(set(results.controllers[0].parameters)) == 1, "static never grows"
    for word in ("fixed:hidden=9", "± ", "GFLOPs", "report.html"):
        assert word in output
    assert RunFolder.read(out).trajectories.rounds() == [1, 2, 3, 4], "the trajectories of every controller"


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_runs(name: str, tmp_path: Path) -> None:
    settings = load_config(preset=name, overrides=[*TINY, *SMALL, "device=cpu"])
    run = TrainingRun.start(settings, tmp_path / name)
    with run.folder:
        run.run()
    assert len(list(run.folder.metrics_file)) == 1


def test_a_task_brings_its_preset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from esper.commands.common import new_folder, resolve_settings

    assert resolve_settings(None, None, None, task="letter") == load_config(preset="letter")
    assert resolve_settings(None, None, ["members=3"], task="spirals") == load_config(
        overrides=["task=spirals", "members=3"]
    )
    assert resolve_settings(None, "demo", None, task="letter").task == "letter"
    monkeypatch.chdir(tmp_path)
    first = new_folder("train", "digits")
    first.mkdir(parents=True)
    assert new_folder("train", "digits") != first


def test_the_host_takes_every_option_that_hosts_have() -> None:
    options = {
        name for make in HOST_PRESETS.values() for name in list(inspect.signature(make).parameters)[2:]
    }
    assert set(HostConfig.model_fields) - {"preset"} == options


@pytest.mark.gpu
def test_the_same_journey_on_a_gpu(tmp_path: Path) -> None:
    run, out = tmp_path / "run", tmp_path / "grown"
    settings = load_config(preset="gpu", overrides=[*TINY, "telemetry.checkpoint_every=1"])
    made = TrainingRun.start(settings, run)
    with made.folder:
        made.run()
    again = TrainingRun.resume(run, checkpoint=run / "checkpoints" / "round-000001.safetensors")
    with again.folder:
        again.run()
    assert [line["round"] for line in again.folder.metrics_file] == [1, 2]
    assert cli.run(["grow", "-C", str(run), "-n", "2", "-o", str(out), "--quiet"]) == 0
    assert torch.export.load(str(out / "network.pt2")).module()(torch.randn(3, 1, 8, 8)).shape == (3, 10)
    assert cli.run(["compare", "-C", f"static,{run}", "-n", "2", "-o", str(tmp_path / "c"), "--quiet"]) == 0
