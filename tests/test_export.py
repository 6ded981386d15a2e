"""`esper export`: the network computes the same elsewhere, and its card says what grew."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import esper
from esper import cli
from esper.runs.run_folder import RunFolder
from tests.growing import models
from tests.tiny import GROWING, sets


@pytest.fixture(scope="module")
def population(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What 'esper grow' leaves behind."""
    out = tmp_path_factory.mktemp("export") / "population"
    few = sets(tiny=GROWING)
    assert cli.run(["grow", "--task", "spirals", "-C", "schedule:clone@0", "--out", str(out), *few]) == 0
    return out


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What esper.grow(..., out=) leaves behind."""
    out = tmp_path_factory.mktemp("export") / "own"
    torch.manual_seed(0)
    esper.grow(
        models.small_mlp(), train=models.table(), val=models.table(30), controller="schedule:widen_full@0",
        epochs=3, folds=1, out=out, progress=False,
    )  # fmt: skip
    return out


@pytest.mark.parametrize(("kind", "width"), [("population", 2), ("own", 5)])
def test_the_exported_network_computes_the_same_for_any_batch_size(
    kind: str, width: int, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    run: Path = request.getfixturevalue(kind)
    assert cli.run(["export", str(run), "--onnx", "--pt2", "--out", str(tmp_path)]) == 0
    original = torch.export.load(run / "network.pt2").module()
    copied = torch.export.load(tmp_path / "network.pt2").module()
    session = onnxruntime.InferenceSession(tmp_path / "network.onnx")
    for batch in (1, 7):
        x = torch.randn(batch, width)
        expected = original(x).detach()
        torch.testing.assert_close(copied(x), expected, rtol=0, atol=0)
        (found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
        np.testing.assert_allclose(found, expected.numpy(), rtol=1e-4, atol=1e-5)


def test_the_card_says_what_grew_and_how_to_load_it(population: Path, own: Path) -> None:
    for run in (population, own):
        assert cli.run(["export", str(run), "--pt2"]) == 0
        card, network = (run / "export/README.md").read_text(), RunFolder.read(run).network()
        assert network is not None
        assert network.changes
        assert all(f"- {change}" in card for change in network.changes)
        assert f"| parameters | {network.parameters:,} |" in card
        assert f"{network.validation_accuracy:.4f}" in card
        assert 'torch.export.load("network.pt2")' in card
        assert "onnxruntime" not in card
    assert "6 → 12 wide" in (own / "export/README.md").read_text()


def test_what_cannot_be_exported_is_said_in_one_sentence(
    population: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty, archive = RunFolder.create(tmp_path / "run", config="{}", seed=0), population / "network.pt2"
    empty.close()
    for words, problem in (
        (["export", str(population)], "no format is given; add --onnx or --pt2"),
        (["export", str(empty.path), "--pt2"], "holds no grown network; give a folder of 'esper grow'"),
        (["export", str(empty.path)], "holds no grown network; give a folder of 'esper grow'"),
        (["export", str(tmp_path / "none"), "--pt2"], "there is no run folder at"),
        (["export", str(tmp_path / "none")], "there is no run folder at"),
    ):
        assert cli.run(words) == 2
        assert problem in capsys.readouterr().err
    archive.rename(tmp_path / "hidden")
    for damaged in (b"", b"no archive", (tmp_path / "hidden").read_bytes()[:3000]):
        archive.write_bytes(damaged)
        assert cli.run(["export", str(population), "--pt2"]) == 2
        assert "network.pt2 is damaged, or of another torch" in capsys.readouterr().err
    archive.unlink()
    hidden = tmp_path / "hidden"
    assert cli.run(["export", str(population), "--onnx"]) == 2
    assert "has no network.pt2, because torch.export failed" in capsys.readouterr().err
    hidden.rename(archive)
