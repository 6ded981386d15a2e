"""No command or example of the pages that grows networks is behind plain training (`make long`)."""

from __future__ import annotations

import importlib
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from esper.runs.run_folder import RunFolder
from tests.waiting import HOUR

ROOT = Path(__file__).parent.parent
PAGES = [page.read_text(encoding="utf-8") for page in (ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")))]
UNGROWN = ("static", "fixed:", "half of the layers")
EXAMPLES = ("grow_adapters", "grow_mlp")  # main() returns its gain over a run without growth
COMMAND = re.compile(r"^    (?:\S*\besper|\S*python -m esper) (grow|compare)\b([^#\n]*)", re.M)
COMMANDS = list(
    dict.fromkeys(f"{name}{rest}".strip() for page in PAGES for name, rest in COMMAND.findall(page))
)


@pytest.mark.long
@pytest.mark.parametrize("command", COMMANDS)
def test_no_arm_that_grows_is_behind_static(command: str, tmp_path: Path) -> None:
    kept = re.sub(r"(--out|-o|--members|-n) \S+", "", command)
    arguments = [*shlex.split(kept), "--out", str(tmp_path / "run"), "--members", "4"]
    done = subprocess.run(
        [sys.executable, "-m", "esper", *arguments], capture_output=True, text=True, cwd=ROOT, timeout=HOUR
    )
    assert done.returncode == 0, done.stderr
    results = RunFolder.read(tmp_path / "run").results()
    assert results is not None
    assert results.controllers[0].name == "static"
    gaps = [d for d in results.differences if d.quantity == "test_accuracy"]
    assert [d for d in gaps if not d.controller.startswith(UNGROWN) and d.mean + d.ci < 0] == []


@pytest.mark.long
@pytest.mark.parametrize("name", EXAMPLES)
def test_no_example_is_behind_what_it_is_compared_with(name: str) -> None:
    mean, half = importlib.import_module(f"examples.{name}").main()
    assert mean + half >= 0
