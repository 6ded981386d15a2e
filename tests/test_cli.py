"""The command line: quick to answer, one sentence for a mistake, a traceback only for a bug."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from esper import cli
from tests.waiting import MINUTE

COMMANDS = ("controllers", "tasks", "doctor", "config")


def test_help_is_quick_and_loads_no_torch() -> None:
    probe = "import sys; from esper.cli import run; run(['--help']); print('torch' in sys.modules)"
    before = os.times()
    done = subprocess.run(
        [sys.executable, "-c", probe], capture_output=True, text=True, check=True, timeout=MINUTE
    )
    after = os.times()
    spent = after.children_user + after.children_system - before.children_user - before.children_system
    assert done.stdout.strip().endswith("False")
    assert all(command in done.stdout for command in COMMANDS)
    assert spent < 1.3, "CPU seconds: half of one where nothing else runs"


@pytest.mark.parametrize("command", typer.main.get_group(cli.app).commands)
def test_every_help_page_has_an_example_that_names_its_command(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run([command, "--help"]) == 0
    assert f"Example: esper {command}" in capsys.readouterr().out


def test_help_names_every_controller() -> None:
    from esper.commands.common import CONTROLLER_HELP
    from esper.controllers import CONTROLLER_NAMES

    named = re.findall(r"\w+", CONTROLLER_HELP.partition(" (")[0])
    assert sorted(named) == sorted((*CONTROLLER_NAMES, "and"))


def test_an_extra_lacks_every_package_that_it_asks_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from esper.runs import run_folder

    monkeypatch.setattr(run_folder, "version_of", lambda package: None if package == "onnxscript" else "1")
    assert cli.run(["doctor"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "extra onnx without onnxscript: pip install 'esper-lite[onnx]'" in shown
    assert "extra gym gymnasium" in shown
    assert "extra dev" not in shown


def test_a_bug_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    from esper import tasks

    def broken(*_: object) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(tasks, "task_table", broken)
    with pytest.raises(KeyError, match="a bug"):
        cli.run(["tasks"])


def test_config_explains_every_key_and_can_be_read_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from esper.config import load_config

    assert cli.run(["config", "--preset", "demo", "--set", "members=3"]) == 0
    file = tmp_path / "run.yaml"
    file.write_text(capsys.readouterr().out)
    assert load_config(file) == load_config(preset="demo", overrides=["members=3"])
    assert all("  # " in line for line in file.read_text().splitlines())
