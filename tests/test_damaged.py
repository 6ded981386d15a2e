"""Bad input of any kind is one clear sentence and exit code 2, never a traceback."""

from __future__ import annotations

import errno
import os
import random
import shutil
import string
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from esper import cli
from esper.builders import agent_schema
from esper.config import RunConfig, load_config
from esper.runs.checkpoints import load_checkpoint, save_checkpoint
from esper.training import TrainingRun
from esper.utils.errors import UserError
from esper.utils.settings import dump
from tests.tiny import GROWING, TINY, sets

Say = Callable[..., str]
RESNET = ("--task", "digits", "--set", "host.preset=resnet")
SPIRALS = ("--task", "spirals")
STEPS = ("--set", "episode.clock=steps")
FLAT = ("--set", "population.schedule=flat")
MODULES = {  # of tasks
    "wrong_syntax": "x = 1\ndef task(:\n",
    "wrong_value": 'def task(seed):\n    raise ValueError("boom")\n',
    "wrong_silent": "def task(seed):\n    raise RuntimeError\n",
    "wrong_type": "def task(seed):\n    return seed\n",
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of one round."""
    path = tmp_path_factory.mktemp("runs") / "whole"
    made = TrainingRun.start(load_config(overrides=[*TINY, "rounds=1", "task=spirals"]), path)
    with made.folder:
        made.run()
    return path


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]) -> Say:
    """Run a command that must be refused, and return its one sentence."""

    def refused(*arguments: str | Path) -> str:
        code = cli.run([str(argument) for argument in arguments])
        output = capsys.readouterr()
        assert code == 2, output
        assert output.err.startswith("esper: ")
        assert output.err.count("\n") == 1
        assert "Traceback" not in output.err
        return output.err

    return refused


def last(run: Path) -> Path:
    return run / "checkpoints" / "last.safetensors"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["train", "--preset", "fancy"], "preset is 'fancy'; allowed are compute, demo"),
        (["train", "--task", "imagenet"], "task is 'imagenet'; allowed are digits"),
        (["train", "--device", "tpu"], "device is 'tpu'; allowed are auto, cpu"),
        (["train", "--device", "cuda:99"], "device is 'cuda:99', and this torch sees"),
        (["train", "--set", "members=0"], "members is 0; it should be greater than or equal to 1"),
        (["train", "--task", "spirals", "--set", "host.kernel=3"], "the resmlp host has no option 'kernel'"),
        (
            ["train", "--set", "seed=10000000000000000000000"],
            "seed is 10000000000000000000000; it should be",
        ),
        (["train", "--config", "nowhere.yaml"], "cannot read nowhere.yaml: no such file"),
        (["grow", "--controller", "tamyo"], "controller is 'tamyo'; did you mean 'tamiyo'?"),
        (
            ["grow", "--controller", "json:none"],
            "controller is 'json:none', and json has no function none; give",
        ),
        (
            ["grow", "--controller", "heuristc:1"],
            "No module named 'heuristc'; give FILE.py:FUNCTION or MODULE",
        ),
        (
            ["grow", "--controller", "heuristc:1"],
            "takes no arguments; allowed are tamiyo, tamiyo:greedy, rates",
        ),
        (["grow", "--controller", "into"], "controller is 'into'; that is for a model of your own"),
        (
            ["grow", "--controller", "builtins:dict"],
            "controller dict lacks begin and decide; allowed are tamiyo",
        ),
        (["grow", "--controller", "static:3"], "static takes nothing after a colon"),
        (["grow", "--controller", "random:2"], "after the colon: a germination rate, as in random:0.1"),
        (["grow", "--members", "0"], "Invalid value for '--members'"),
        (["resume", "nowhere"], "there is no run folder at nowhere"),
        (["trai"], "No such command 'trai'"),
        (["config", "--set", "ppo.gama=1"], "ppo.gama is not a setting; did you mean 'gamma'?"),
        # more than a machine or an input has room for
        (["train", "-s", "threads=100000"], "threads is 100000; it should be less than"),
        (["train", *RESNET, "-s", "host.stages=16"], "an input of 8 × 8 can be halved for at most 4"),
        (["train", *RESNET, "-s", "host.kernel=99"], "kernel is 99, and the input is 8 × 8; give at most 8"),
        (
            ["train", "-s", "host.width=65536", "-s", "host.hidden=65536"],
            "parameters, and 16 members take at least ",
        ),
        # settings that are right each and wrong together
        (["train", "-s", "episode.flops=1"], "the smallest budget of a member is 1 FLOPs, and one step of"),
        (["train", "-s", "budgets=[1e-9]"], "and one step of its host costs"),
        (
            ["train", "-s", "budgets=[1, 2]", *STEPS],
            "budgets: a budget, which episode.clock=steps",
        ),
        (
            ["train", "-s", "episode.flops=1e9", *STEPS],
            "episode.flops: a budget, which",
        ),
        (["train", *SPIRALS, "-s", "episode.flops=1e12"], " and a learner keeps "),
        (["grow", "-s", "budgets=[1, 2]"], "[1.0, 2.0]; those are for 'esper train' alone: set budgets=[1]"),
        (["train", "-s", "budgets=[0]"], "budgets[0] is 0; it should be greater than 0"),
        (["train", "-s", "lifecycle.block_blueprints=[]"], "block_blueprints is []; the list should have at"),
        (["train", *FLAT, "-s", "population.warmup=0.7"], "warmup is 0.7 and decay is 0.4"),
        (["train", *SPIRALS, "-s", "population.batch_size=5000"], "is 5000, and spirals has 1000 samples"),
        (
            ["train", "-p", "demo", "-t", "text"],
            "the resmlp host takes numbers, which text does not have; leave",
        ),
        (
            ["grow", *SPIRALS, "-s", "host.preset=gpt"],
            "the gpt host takes tokens, which spirals does not have",
        ),
        # arms and controllers
        (["compare", "-C", "static,fixed:hidden=0"], "'fixed:hidden=0', and hidden is 0; it should be"),
        (["compare", "-C", "static,fixed:colour=3"], "'fixed:colour=3', and colour is not a setting"),
        (["compare", "-C", "static,fixed:width=4+width=5"], "options of the host, each once"),
        (["compare", "-C", "static,fixed:heads=3"], "the resnet host has no option 'heads'"),
        (["compare", "-C", "static,,tamiyo"], "--controllers is 'static,,tamiyo'; give one comma"),
        (["compare", "-C", "static,static"], "names static more than once"),
        (
            ["grow", "-C", "schedule:clone@0.1x1000"],
            "1,000 seeds in a slot, more than population.folds=4 allows; ask for less, or set popul",
        ),
        (
            ["compare", "-C", "static,schedule:clone@0.1+clone@0.3+clone@0.5", "-s", "population.folds=1"],
            "asks for 3 seeds in a slot, more than population.folds=1 allows",
        ),
        (
            ["grow", "-C", "schedule:clone@0+mlp@0.1"],
            "plants mlp, which fits none of its slots; this host takes clone, widen_half, widen_full",
        ),
        (["grow", "-C", "schedule:norm@0.1"], "plants norm, which fits none of its slots"),
        (
            ["grow", "-C", "schedule:widen_full@0.1+clone@0.2+widen_half@0.3"],
            "blocks of 2.5 times their units, more than population.widest=2 allows; ask for less, or set",
        ),
        (["grow", "-s", "rounds=7"], "--set is 'rounds=7'; rounds is for 'esper train' alone, leave it out"),
        (["compare", "-p", "compute", "-s", "ppo.clip=0.3"], "ppo is for 'esper train' alone"),
        # the user's own modules
        (["train", "-t", "wrong_syntax:task"], "wrong_syntax.py, line 2;"),
        (["train", "-t", "wrong_value:task"], "ValueError: boom at "),
        (["train", "-t", "wrong_silent:task"], "and it could not be called: RuntimeError at "),
        (["train", "-t", "nowhere.py:task"], "the file nowhere.py does not exist; give FILE.py:FUNCTION"),
        (["train", "-t", "missing_module:task"], "No module named 'missing_module'"),
        (["train", "-t", "wrong_type:task"], "returned int"),
        # options that are settings
        (["train", "--rounds", "5"], "there is no option --rounds, but a setting: use --set rounds=5; see"),
        (["compare", "--batch-size", "8"], "use --set population.batch_size=8; see 'esper compare --help'"),
        (["train", "--width", "8"], "use --set host.width=8 or --set policy.width=8"),
        (["train", "--ot", "runs/x"], "No such option: --ot (Possible options: --out"),
    ],
)
def test_unknown_names_and_bad_values(
    arguments: list[str], says: str, say: Say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in MODULES.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    before = time.process_time()
    assert says in say(*arguments)
    assert time.process_time() - before < 10.0, "CPU seconds: the wall clock of a shared machine is noise"
    assert {path.name for path in tmp_path.iterdir()} <= {f"{m}.py" for m in MODULES} | {"__pycache__"}


def test_a_place_that_cannot_be_written_to(run: Path, tmp_path: Path, say: Say) -> None:
    (tmp_path / "file").write_text("in the way")
    tiny = sets("task=spirals")
    assert "not a directory" in say("train", "--out", tmp_path / "file" / "run", *tiny)
    assert "is not an empty folder" in say("train", "--out", run, *tiny)
    for command in ("compare", "grow"):
        few = sets("task=spirals", tiny=GROWING)
        assert "is not an empty folder" in say(command, "-C", "static", "--members", "2", "--out", run, *few)


def test_a_full_disk_stops_the_run_and_room_lets_it_go_on(
    tmp_path: Path, say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, sync = tmp_path / "run", os.fsync

    def full(handle: int) -> None:
        if (path / "trajectories").exists():
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(handle)

    monkeypatch.setattr(os, "fsync", full)
    output = say("train", "--quiet", "--out", path, *sets("task=spirals"))
    assert "no space left on device" in output
    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr("esper.watch.report.write_report", lambda folder: folder.report_path)
    assert cli.run(["resume", str(path), "--quiet"]) == 0
    assert len((path / "metrics.jsonl").read_text().splitlines()) == 2


def test_foreign_and_damaged_checkpoints(run: Path, tmp_path: Path, say: Say) -> None:
    foreign = tmp_path / "foreign.safetensors"
    save_file({"weight": torch.zeros(3)}, foreign)
    assert "is no checkpoint of esper" in say("grow", "-C", foreign)
    foreign.write_bytes(last(run).read_bytes()[:-9])  # more damages: tests/runs/test_checkpoints.py
    assert "foreign.safetensors is damaged" in say("grow", "-C", foreign)
    whole = load_checkpoint(last(run))
    strange = tmp_path / "strange.safetensors"
    save_checkpoint(strange, whole.tensors, whole.record, "another schema")
    assert "was made for schema 'another schema'" in say("compare", "-C", f"static,{strange}")
    save_checkpoint(strange, whole.tensors, {}, agent_schema())
    assert "holds no settings of a run" in say("grow", "-C", strange)
    save_checkpoint(strange, {"agent.policy.x": torch.zeros(2)}, whole.record, agent_schema())
    assert "does not hold the agent that its settings describe" in say("grow", "-C", strange)
    wider = {**whole.record, "config": {**whole.record["config"], "members": 5}}
    save_checkpoint(strange, whole.tensors, wider, agent_schema())
    assert "belongs to a run with other settings" in say("resume", run, "--checkpoint", strange)
    newer = {**whole.record, "config": {**whole.record["config"], "policy": {"colour": "blue"}}}
    save_checkpoint(strange, whole.tensors, newer, agent_schema())
    assert "was written by another version of esper: policy.colour is not a setting" in say(
        "grow", "-C", strange
    )


def test_a_config_of_another_schema(run: Path, tmp_path: Path, say: Say) -> None:
    copy = Path(shutil.copytree(run, tmp_path / "copy"))
    with open(copy / "config.yaml", "a") as file:
        file.write("colour: blue\n")
    for arguments in (["resume", copy], ["compare", "-C", f"static,{copy}"]):
        assert "config.yaml was written by another version of esper, or is damaged: colour" in say(*arguments)
    (copy / "config.yaml").write_text("just a text")
    assert "config.yaml is damaged: it holds no settings" in say("resume", copy)
    (copy / "config.yaml").unlink()
    assert "no such file or directory" in say("resume", copy)
    (copy / "versions.json").write_text('{"format": "esper-run", "format_version": 99, "seed": 0}')
    assert "has run format 99, not 1" in say("resume", copy)


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (MemoryError(), "there is not enough memory: lower members"),
        (torch.OutOfMemoryError("CUDA out of memory"), "there is not enough memory: lower members"),
        (RuntimeError("can't allocate memory: 9 bytes"), "there is not enough memory: lower members"),
        (ValueError("boom"), f"ValueError: boom at {__file__}, line "),
        (OSError(), f"esper: OSError at {__file__}, line "),
    ],
)
def test_too_little_memory_and_errors_of_the_users_own_code_are_told(
    error: Exception, says: str, say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr("esper.training.make_trainer", fail)
    output = say("train")
    assert says in output
    assert "line " not in says or f"line {fail.__code__.co_firstlineno + 1}\n" in output


def test_a_run_without_a_finished_round_has_no_controller(run: Path, tmp_path: Path, say: Say) -> None:
    copy = Path(shutil.copytree(run, tmp_path / "copy"))
    last(copy).unlink()
    assert "or has finished no round" in say("grow", "-C", copy)


MANY = [pytest.param(60, id="sixty"), pytest.param(1000, id="a thousand", marks=pytest.mark.long)]


@pytest.mark.parametrize("times", MANY)
def test_damaged_settings(
    times: int, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Noise and scratched settings, as a file for 'train' and as config.yaml of a run for 'resume'."""

    def reached(*_: object) -> None:
        raise UserError("these settings are valid")

    monkeypatch.setattr("esper.training.make_trainer", reached)
    copy = Path(shutil.copytree(run, tmp_path / "copy"))
    draw, whole = random.Random(2), dump(RunConfig())
    letters = string.printable + "é\x00:-[]{}&*!|>'\"%@`"
    valid = 0
    for i in range(times):
        text = list(whole) if i % 3 else draw.choices(letters, k=draw.randrange(80))
        for _ in range(draw.randrange(1, 4)):
            at = draw.randrange(len(text) + 1)
            text[at : at + draw.randrange(3)] = draw.choices(letters, k=draw.randrange(3))
        file = copy / "config.yaml" if i % 2 else tmp_path / "settings.yaml"
        file.write_text("".join(text), encoding="utf-8")
        code = cli.run(["resume", str(copy)] if i % 2 else ["train", "--config", str(file)])
        output = capsys.readouterr().err
        assert code == 2
        assert output.count("\n") == 1
        valid += "these settings are valid" in output
    assert 0 < valid < 0.8 * times
