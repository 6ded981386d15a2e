"""The command line: quick to answer, one sentence for a mistake, a traceback only for a bug."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from esper import __version__, cli

COMMANDS = ("schema", "blueprints", "tasks", "doctor", "config")


def test_help_takes_less_than_a_second_and_no_torch() -> None:
    probe = "import sys; from esper.cli import run; run(['--help']); print('torch' in sys.modules)"
    before = os.times()
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    after = os.times()
    spent = after.children_user + after.children_system - before.children_user - before.children_system
    assert done.stdout.strip().endswith("False")
    assert all(command in done.stdout for command in COMMANDS)
    assert spent < 1.0, "CPU seconds: the wall clock of a shared machine is noise"


def test_a_typo_is_answered_before_torch_is_loaded() -> None:
    commands = ("train", "grow", "compare", "demo", "config show")
    typos = [["runs", "nowhere"], *([*command.split(), "--set", "ppo.gama=1"] for command in commands)]
    probe = f"import sys; from esper.cli import run; [print(run(t), 'torch' in sys.modules) for t in {typos}]"
    told = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert told.stdout.splitlines() == ["2 False"] * len(typos), told.stderr


@pytest.mark.parametrize("command", [[], ["config"]])
def test_the_bare_command_shows_its_help(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(command) == 0
    told = capsys.readouterr()
    assert f"Usage: {' '.join(['esper', *command])}" in told.out
    assert told.err == ""


@pytest.mark.parametrize(
    "command", [name for name in typer.main.get_group(cli.app).commands if name != "config"]
)
def test_every_help_page_has_an_example_that_names_its_command(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run([command, "--help"]) == 0
    assert f"Example: esper {command}" in capsys.readouterr().out


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["--version"]) == 0
    assert capsys.readouterr().out.startswith("esper 0.")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["trai"], "No such command 'trai'"),
        (["compare", "--member", "3"], "No such option: --member"),
        (["compare", "--members", "many"], "--members"),
        (["compare", "--members", "0"], "--members is 0; allowed are 1 to 1000000"),
        (["blueprints", "--topology", "rnn"], "topology is 'rnn'; allowed are cnn, transformer, mlp"),
        (["blueprints", "--width", "0"], "--width is 0; allowed are 1 to"),
        (["config", "validate", "nowhere.yaml"], "cannot read nowhere.yaml"),
        (["config", "show", "--set", "ppo.gama=1"], "ppo.gama is not a setting; did you mean 'gamma'?"),
        (["config", "show", "--preset", "fancy"], "preset is 'fancy'; allowed are"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(arguments) == 2
    written = capsys.readouterr()
    assert written.out == ""
    assert says in written.err
    assert written.err.startswith("esper: ")
    assert written.err.count("\n") == 1


def test_debug_shows_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ESPER_DEBUG", "1")
    with pytest.raises(ValueError, match="--members is 0"):
        cli.run(["compare", "--members", "0"])


def test_a_bug_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    from esper import tasks

    def broken(*_: object) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(tasks, "task_table", broken)
    with pytest.raises(KeyError, match="a bug"):
        cli.run(["tasks"])


def test_schema_shows_every_column(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from esper.tamiyo.policy.features import COLUMNS, schema_hash

    monkeypatch.setenv("COLUMNS", "200")
    assert cli.run(["schema"]) == 0
    shown = capsys.readouterr().out
    assert [c.name for c in COLUMNS if c.name not in shown] == []
    assert schema_hash()[:16] in shown


def test_blueprints_and_tasks_are_listed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from esper.lifecycle.actions import TOPOLOGY_BLUEPRINTS
    from esper.tasks import task_names

    monkeypatch.setenv("COLUMNS", "200")
    assert cli.run(["blueprints", "--topology", "mlp"]) == 0
    shown = capsys.readouterr().out
    assert [b.name for b in TOPOLOGY_BLUEPRINTS["mlp"] if b.name not in shown] == []
    assert "CONV_HEAVY" not in shown
    assert cli.run(["tasks"]) == 0
    shown = capsys.readouterr().out
    assert [name for name in task_names() if name not in shown] == []


def test_doctor_shows_versions_devices_and_extras(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["doctor"]) == 0
    shown = capsys.readouterr().out
    for subject in ("python", "torch", "CPU threads", "device", "extra gym", "extra sinks"):
        assert subject in shown


def test_config_show_can_be_read_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["config", "show", "--preset", "demo", "--set", "members=3"]) == 0
    file = tmp_path / "run.yaml"
    file.write_text(capsys.readouterr().out)
    assert cli.run(["config", "validate", str(file)]) == 0
    assert cli.run(["config", "show", "--config", str(file)]) == 0
    assert file.read_text() in capsys.readouterr().out


def test_config_explains_every_key(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from esper.config import RunConfig
    from esper.utils.settings import keys_of

    monkeypatch.setenv("COLUMNS", "200")
    assert cli.run(["config", "show", "--explain"]) == 0
    shown = capsys.readouterr().out
    assert [key.path for key in keys_of(RunConfig) if key.path not in shown] == []
    assert cli.run(["config", "presets"]) == 0
    assert "demo" in capsys.readouterr().out


def test_the_package_runs_as_a_module() -> None:
    told = subprocess.run([sys.executable, "-m", "esper", "--version"], capture_output=True, text=True)
    assert (told.returncode, told.stdout) == (0, f"esper {__version__}\n")
