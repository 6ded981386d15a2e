"""`esper.grow(out=)`: a run folder that tells the story, and from which a growth goes on after any kill."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import esper
from esper import cli
from esper.growing import folder
from esper.growing.data import GeneratorStates, seeded_generators
from esper.growing.result import Grown
from esper.runs import files
from esper.runs.run_folder import RunFolder
from esper.utils.errors import UserError
from esper.watch.facts import state
from tests.controllers import Scheduled
from tests.growing import models
from tests.growing.models import QUICK

CPU = torch.device("cpu")
EPOCHS = 6


class Killed(BaseException):
    """Stands for the end of the process."""


class Augmented(Dataset[tuple[Tensor, Tensor]]):
    """Images that are shifted anew whenever they are read, by all three global generators."""

    def __init__(self) -> None:
        self.images, self.labels = models.images(48)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        noise = random.random() + float(np.random.rand()) + 0.1 * torch.randn(())  # noqa: NPY002
        return self.images[index] + 0.1 * noise, self.labels[index]


def grow(out: Path | None, **settings: Any) -> Grown:
    torch.manual_seed(0)
    chosen = {"controller": Scheduled(steps=(0, 3)), "epochs": EPOCHS, "lr": 1e-2, "batch_size": 16}
    chosen |= {"lifecycle": QUICK, "progress": False, **settings}
    return esper.grow(models.small_mlp(), models.table(), out=out, **chosen)


def grow_augmented(out: Path | None, **settings: Any) -> Grown:
    """With a controller that remembers, augmentation and a loader that shuffles by a generator of its own."""
    torch.manual_seed(0)
    loader = DataLoader(Augmented(), 16, shuffle=True, generator=torch.Generator().manual_seed(3))
    chosen = {"controller": "tamiyo", "force": True, "epochs": EPOCHS, **settings}
    val = models.images(30, seed=1)
    return esper.grow(models.small_cnn(), loader, val, out=out, lifecycle=QUICK, progress=False, **chosen)


def bits(grown: Grown) -> list[Tensor]:
    story = [grown.record.accuracy, grown.record.loss, grown.record.choices, grown.record.stage]
    return [*map(torch.as_tensor, story), *grown.model.state_dict().values()]


def same(one: Grown, other: Grown) -> bool:
    pairs = list(zip(bits(one), bits(other), strict=True))
    return all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.usefixtures("no_report")
@pytest.mark.parametrize("grow", [grow, grow_augmented])
def test_a_growth_that_is_killed_anywhere_goes_on_to_the_same_bits(
    grow: Callable[..., Grown], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = grow(tmp_path / "whole")
    assert same(whole, grow(None)), "the folder changes nothing"
    lines = [json.loads(line) for line in (tmp_path / "whole/metrics.jsonl").read_text().splitlines()]
    left, replace_file = 0, os.replace

    def dying(*arguments: Any) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise Killed
        replace_file(*arguments)

    monkeypatch.setattr(files.os, "replace", dying)
    out, kills = tmp_path / "killed", 0
    for rest in (2, 5, 9, 12, 7, 3, 1000):
        left = rest
        try:
            grown = grow(out, resume=True)
        except Killed:
            kills += 1
    assert kills == 6
    assert same(grown, whole)
    told = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    for line in (*lines, *told):
        line.pop("seconds")
    assert told == lines
    for name in ("events.jsonl", "growth.json", "network.safetensors", "trajectories/000000.safetensors"):
        assert (out / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name
    assert same(grow(out, resume=True), whole), "a finished one is read, not grown again"


@pytest.mark.usefixtures("no_report")
def test_ctrl_c_leaves_a_folder_that_goes_on(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    uses_metrics, last = 0, 28

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        nonlocal uses_metrics
        uses_metrics += 1
        if uses_metrics == last:
            os.kill(os.getpid(), signal.SIGINT)
        return F.cross_entropy(outputs, targets)

    settings = {"loss": loss, "epochs": 14}
    stopped = grow(tmp_path / "run", **settings)
    assert 0 < stopped.record.num_steps < 14
    said = "stopping after this batch and a few validations: the model so far is returned, and "
    kept = "has the epochs before this one, from which the same call with resume=True goes on; Ctrl-C again"
    assert f"{said}{tmp_path / 'run'} {kept}" in capfd.readouterr().err
    assert "it ended before its 14 epochs were over" in stopped.report()
    assert isinstance(stopped.model(models.table()[0]), Tensor)
    assert (tmp_path / "run/network.safetensors").exists()
    assert state(tmp_path / "run") == "stopped"
    last = -1
    (tmp_path / "run/network.pt2").write_bytes(b"of the stopped run")

    def fail(*_: Any) -> None:
        raise RuntimeError("no export")

    with monkeypatch.context() as patched:
        patched.setattr(folder, "save_archive", fail)
        again = grow(tmp_path / "run", resume=True, **settings)
    assert same(again, grow(None, **settings))
    assert not (tmp_path / "run/network.pt2").exists()
    assert state(tmp_path / "run") == "finished"


def test_the_folder_is_a_run_like_any_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "mine"
    grown = grow(out, baseline=True)
    folder = RunFolder.read(out)
    assert (folder.kind, folder.about["seed"]) == ("grow", 0)
    growth, network = folder.growth(), folder.network()
    assert growth is not None
    assert growth.finished
    assert growth.curves[0].score == pytest.approx(grown.record.accuracy[:, 0].tolist())
    assert [curve.name for curve in growth.curves] == ["grown", "static"]
    assert growth.verdicts == grown.verdicts()
    assert grow(out, baseline=True, resume=True).verdicts() == grown.verdicts()
    assert network is not None
    assert network.parameters == sum(p.numel() for p in grown.model.parameters())
    archive = torch.export.load(out / "network.pt2").module()
    x = models.table()[0]
    torch.testing.assert_close(archive(x), grown.model(x))
    page = folder.report_path.read_text()
    assert "The model reached a validation accuracy of" in page
    assert (folder.settings()["task"], state(out)) == ("Sequential", "finished")
    assert {event["slot"] for event in folder.events_file} <= set(grown.slot_names)
    assert cli.run(["resume", str(out)]) == 2
    assert "call esper.grow there again" in capsys.readouterr().err


@pytest.mark.usefixtures("no_report")
def test_nothing_is_erased_and_nothing_goes_on_with_other_arguments(tmp_path: Path) -> None:
    out = tmp_path / "mine"
    grow(out)
    before = {path: path.read_bytes() for path in out.rglob("*.jsonl")}
    with pytest.raises(UserError, match=r"holds a run of esper.grow; .*resume=True"):
        grow(out)
    with pytest.raises(UserError, match=r"batch_size is 8, and .* was begun with"):
        grow(out, resume=True, batch_size=8)
    with pytest.raises(UserError, match="say where the growth is"):
        grow(None, resume=True)
    shutil.rmtree(out / "checkpoints")
    with pytest.raises(UserError, match="to go on would erase them"):
        grow(out, resume=True)
    assert {path: path.read_bytes() for path in out.rglob("*.jsonl")} == before
    RunFolder.create(tmp_path / "other", config="rounds: 3", seed=0, kind="train").close()
    with pytest.raises(UserError, match=r"holds a run of .esper train., not of esper.grow"):
        grow(tmp_path / "other", resume=True)


def test_all_generators_go_on_where_they_stood_and_those_of_the_caller_are_left_alone() -> None:
    own = torch.Generator()
    loader = DataLoader(Augmented(), 16, shuffle=True, generator=own)

    def draw() -> list[float]:
        drawn = [random.gauss(0, 1), float(np.random.randn()), float(torch.rand(()))]  # noqa: NPY002
        return [*drawn, float(torch.rand((), generator=own))]

    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()  # noqa: NPY002
    with seeded_generators(1, CPU):
        draw()
        randomness = GeneratorStates(CPU, [loader])
        state = randomness.state_dict()
        first = [draw(), draw()]
        randomness.load_state_dict(state)
        assert [draw(), draw()] == first
    assert random.getstate() == before[0]
    assert np.random.get_state()[1].tolist() == before[1]  # noqa: NPY002
    assert torch.equal(torch.get_rng_state(), before[2])


class CountingAdam(torch.optim.Optimizer):
    """It counts its steps in the groups, as several do."""

    def __init__(self, groups: Any) -> None:
        super().__init__(groups, {"lr": 1e-2, "growth": 0.25})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            group["growth"] *= 1.1
            for p in (p for p in group["params"] if p.grad is not None):
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                mean.lerp_(p.grad, 0.1)
                p.sub_(mean / (1 - 0.9 ** group["step"]), alpha=group["lr"] * group["growth"])


class Holder(torch.optim.Optimizer):
    """It holds the optimizer that steps."""

    def __init__(self, groups: Any) -> None:
        self.base = torch.optim.SGD(groups, lr=0.1)
        super().__init__(self.base.param_groups, {})

    def step(self, closure: Any = None) -> None:
        self.base.step()


@pytest.mark.usefixtures("no_report")
def test_an_optimizer_that_counts_in_its_groups_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    options = {"controller": "static", "epochs": 4, "make_optimizer": CountingAdam, "progress": False}

    def train(name: str, stop: int, resume: bool) -> Grown:
        def on_epoch(event: Any) -> None:
            if event["epoch"] == stop:
                raise Killed

        torch.manual_seed(0)
        return esper.grow(
            models.small_mlp(), models.table(), models.table(30), out=tmp_path / name, resume=resume,
            on_epoch=on_epoch, **options,
        )  # fmt: skip

    whole = train("whole", 99, False)
    with pytest.raises(Killed):
        train("killed", 3, False)
    assert same(train("killed", 99, True), whole)


def test_an_optimizer_that_holds_another_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"Holder keeps a SGD \(base\), which cannot be saved; leave out out="
    ):
        grow(tmp_path / "run", make_optimizer=Holder)
