"""Fixed and grown networks at equal compute: what arms spend, that they train, and the committed runs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from esper.growing.blocks import find_blocks
from esper.growing.progressive import Progressive
from esper.tasks import load_task
from esper.tasks.task import HostSpec, Split, Task, TestSplit
from esper.utils.errors import UserError
from studies import growth_grid, growth_trainer
from studies.growth_grid import (
    DECAY,
    FAMILIES,
    Arm,
    TrainingStep,
    adamw,
    alternating_subsets,
    finals,
    halve_outputs,
    make_gpt,
    muon,
    pilot,
    plan,
    rate_share,
    read_arms,
    restart_blocks,
    step_at,
    train,
)

RESULTS = Path(growth_grid.__file__).parent / "results"


def test_arms_train_for_equal_flops_or_equal_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = replace(FAMILIES["resmlp"], depth=4, width=8, batch=16, validation=200)
    monkeypatch.setitem(FAMILIES, "tiny", tiny)
    arms, task = finals(["tiny"], [4e6], 0.3, [0.02] * 3)[:4], load_task("letter")
    grown, whole, half, equal_steps = results = [train(arm, task, "cpu") for arm in arms]
    for result in (grown, whole, half):
        assert result["flops"] == pytest.approx(4e6, rel=0.03)
    assert sum(equal_steps["steps"]) == pytest.approx(sum(whole["steps"]), abs=1)
    assert equal_steps["flops"] < 0.9 * whole["flops"]
    assert grown["parameters"] == equal_steps["parameters"] == whole["parameters"] > half["parameters"]
    for result in results:
        assert result["curve"][-1][0] == result["flops"]
        assert result["validation"] < result["curve"][0][2]


def test_fresh_blocks_with_outputs_of_zero_change_nothing_at_first() -> None:
    model = make_gpt(64, 4)
    optimizer = adamw(model, 1e-3, 0.1)
    tokens = torch.randint(256, (2, 32))
    grower = Progressive(model, optimizer, 4, grow_at=0.5, example=(tokens,))
    before = [each.active for each in grower.lists]
    for _ in range(2):
        logits = model(tokens)
        F.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()
        logits = model(tokens)
        grower.step()
    assert grower.whole
    assert not torch.allclose(model(tokens), logits)
    restart_blocks(grower, before, make_gpt(64, 4), [optimizer])
    torch.testing.assert_close(model(tokens), logits)
    new = model.layers[1]
    assert all(not value.any() for p in new.parameters() for value in optimizer.state[p].values())


def test_a_step_at_a_rate_in_memory_is_the_step_at_that_rate() -> None:
    torch.manual_seed(0)
    first, second = (make_gpt(64, 2) for _ in range(2))
    second.load_state_dict(first.state_dict())
    usual, scaled = (muon(model, 0.02, 0.1) for model in (first, second))
    tokens = torch.randint(256, (2, 32))
    for rate in (0.02, 0.013, 0.0):
        for model in (first, second):
            model.zero_grad()
            F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        usual[0].param_groups[0]["lr"] = rate
        usual[0].step()
        step_at(scaled[0], torch.tensor(rate))
        for (name, a), b in zip(first.named_parameters(), second.parameters(), strict=True):
            torch.testing.assert_close(a, b, msg=f"{name} at {rate}")
    held = [p for optimizer in usual for group in optimizer.param_groups for p in group["params"]]
    assert len(held) == len(set(held)) == len(list(first.parameters()))


def test_halved_blocks_add_half_as_much() -> None:
    model = make_gpt(64, 4)
    tokens = torch.randint(256, (2, 32))
    grower = Progressive(model, adamw(model, 1e-3, 0.1), 2, grow_at=0.5, example=(tokens,))
    F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
    grower.step()
    x = torch.randn(2, 32, 64)
    block = model.layers[1]
    down = block.down(x.repeat(1, 1, 4))
    others = [p.clone() for name, p in block.named_parameters() if not name.startswith(("proj", "down"))]
    halve_outputs(grower)
    torch.testing.assert_close(block.down(x.repeat(1, 1, 4)), down / 2)
    kept = [p for name, p in block.named_parameters() if not name.startswith(("proj", "down"))]
    assert all(torch.equal(a, b) for a, b in zip(others, kept, strict=True))


@pytest.mark.parametrize(
    "control",
    [{"order": "zeroed"}, {"order": "halved"}, {"tied": 0.8}, {"tied": 1.0}, {"muon": True}],
    ids=lambda control: "-".join(map(str, *control.items())),
)
def test_controls_train_for_the_budget(control: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FAMILIES, "tiny", replace(FAMILIES["resmlp"], depth=4, width=8, validation=200))
    arm = Arm("tiny", 4e6, 4, 8, 0.02, start=2, grow_at=(0.3,), batch=16)
    result = train(replace(arm, **control), load_task("letter"), "cpu")
    assert result["flops"] == pytest.approx(4e6, rel=0.03)
    assert result["validation"] < result["curve"][0][2]
    assert control.get("order", "interleaved") in result["name"]
    assert ("Muon" in result["name"]) == ("muon" in control)
    assert ("tied" in result["name"]) == ("tied" in control)


def test_layers_that_alternate_all_train_before_the_growth(monkeypatch: pytest.MonkeyPatch) -> None:
    assert alternating_subsets(5, 8) == [[0, 1, 3, 5, 7], [0, 2, 4, 6, 7]]
    assert alternating_subsets(4, 8) == [[0, 1, 4, 7], [0, 2, 5, 7], [0, 3, 6, 7]]
    for start, depth in ((6, 8), (8, 8), (2, 8), (5, 12)):
        with pytest.raises(UserError, match="no several sets"):
            alternating_subsets(start, depth)
    monkeypatch.setitem(FAMILIES, "tiny", replace(FAMILIES["resmlp"], depth=8, width=8, validation=200))
    ran: list[tuple[int, ...]] = []
    step = TrainingStep.__call__

    def seen(self: TrainingStep, batch: Any, rate: float) -> None:
        (blocks,) = (each.blocks for each in find_blocks(self.model))
        ran.append(tuple(k for k, block in enumerate(blocks) if "forward" not in vars(block)))
        step(self, batch, rate)

    monkeypatch.setattr(TrainingStep, "__call__", seen)
    arm = Arm("tiny", 4e6, 8, 8, 0.02, start=5, grow_at=(0.5,), order="alternating", batch=16)
    result = train(arm, load_task("letter"), "cpu")
    first = result["steps"][0]
    assert ran[:3] == [(0, 1, 3, 5, 7), (0, 2, 4, 6, 7), (0, 1, 3, 5, 7)]
    assert len(set(ran[:first])) == 2
    assert set(ran[first:]) == {tuple(range(8))}
    assert result["flops"] == pytest.approx(4e6, rel=0.05)


def test_a_cpu_multiplies_in_bfloat16_where_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function: function)  # which takes a minute here
    monkeypatch.setitem(FAMILIES, "tiny", replace(FAMILIES["resmlp"], depth=4, width=8, validation=200))
    arm, task = Arm("tiny", 2e6, 4, 8, 0.02, start=2, grow_at=(0.3,), batch=16), load_task("letter")
    exact, rounded = (train(arm, task, "cpu", bfloat16=asked) for asked in (False, True))
    assert [exact["bfloat16"], rounded["bfloat16"]] == [False, True]
    assert exact["validation"] != rounded["validation"] == pytest.approx(exact["validation"], rel=0.05)


def test_llama_grows_into_the_network_that_is_trained_plainly() -> None:
    network = FAMILIES["llama"].make(64, 4)
    grower = Progressive(network, adamw(network, 1e-3, 0.1), 10, grow_at=0.5)
    assert (grower.active, grower.blocks) == (2, 4)
    arms = [Arm("llama", 1e13, 4, 64, 0.006), Arm("llama", 1e13, 4, 64, 0.006, start=2, grow_at=(0.3,))]
    for arm in arms:
        assert np.dot(*plan(arm)) == pytest.approx(1e13, rel=0.01), arm.name


@pytest.mark.gpu
@pytest.mark.parametrize("muon_too", [False, True])
def test_captured_steps_train_as_plain_ones_do(muon_too: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FAMILIES, "tiny", replace(FAMILIES["resmlp"], depth=4, width=64, validation=2000))
    inputs = torch.randn(4000, 16, generator=torch.Generator().manual_seed(0))
    data = Split(inputs, (inputs[:, :4] > 0).long() @ torch.tensor([1, 2, 4, 8]))
    task = Task("signs", "mlp", (16,), 26, data, data, TestSplit(data), HostSpec("resmlp"))
    arm = replace(finals(["tiny"], [2e10], 0.3, [0.01] * 3)[0], muon=muon_too)
    launched, update = [], TrainingStep._update

    def count(self: TrainingStep, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        launched.append(self)
        update(self, inputs, targets)

    monkeypatch.setattr(TrainingStep, "_update", count)
    captured = train(arm, task, "cuda")
    assert len(launched) == 2 * (TrainingStep.WARM_UP + 1)  # of each depth: to compile, and for the capture
    monkeypatch.setattr(TrainingStep, "WARM_UP", sum(captured["steps"]) + 1)
    plain = train(arm, task, "cuda")
    assert captured["validation"] == pytest.approx(plain["validation"], abs=0.02)
    assert captured["curve"][0][2] == pytest.approx(plain["curve"][0][2], abs=0.02)


def test_a_folder_of_texts_is_split_by_whole_files(tmp_path: Path) -> None:
    for k in range(200):  # each file has a letter of its own
        path = tmp_path / f"part{k % 3}" / f"{k}.md"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bytes([50 + k]) * 800)
    (tmp_path / "picture.png").write_bytes(b"!" * 800)
    (tmp_path / "notes.md").mkdir()
    task = FAMILIES["text"].load(tmp_path)
    parts = (task.train, task.validation, task.held_out.read())
    letters = [set(part.inputs.unique().tolist()) - {ord("\n")} for part in parts]
    assert all(letters)
    assert len(set.union(*letters)) == sum(map(len, letters)), "no file is in two splits"
    assert ord("!") not in set.union(*letters)
    assert torch.equal(task.train.inputs.flatten()[1:], task.train.targets.flatten()[:-1])
    (tmp_path / "empty" / "robots.txt").mkdir(parents=True)  # a folder that is called like a text
    for folder in (None, tmp_path / "empty"):
        with pytest.raises(UserError, match=r"--data is .*; give a folder with files .md"):
            FAMILIES["text"].load(folder)


def test_every_arm_of_the_pilot_spends_the_budget() -> None:
    for arm in pilot(["resmlp"], [1e10]):
        assert np.dot(*plan(arm)) == pytest.approx(1e10, rel=0.03), arm.name


@pytest.mark.parametrize("decay", [0.2, DECAY, 0.6])
def test_the_rate_rises_stays_and_falls_over_its_shares_of_the_compute(decay: float) -> None:
    points = {0.0: 0.0, 0.05: 0.5, 0.1: 1.0, 1 - decay: 1.0, 1 - decay / 2: 0.5, 1.0: 0.0}
    for progress, share in points.items():
        assert rate_share(progress, 0.1, decay) == pytest.approx(share, abs=1e-12)
    arm = Arm("gpt", 1e15, 8, 256, 0.006, decay=decay)
    assert arm.name == "fixed 8x256" + ("" if decay == DECAY else f" decay {decay:g}")


def test_a_file_of_results_names_its_arms() -> None:
    path = RESULTS / "growth_grid-21m-h200.jsonl"
    arms = read_arms(path)
    assert Arm("gpt-21m", 6e16, 12, 384, 0.002, start=6, grow_at=(0.22,), seed=1) in arms
    assert [arm.name for arm in arms] == [json.loads(line)["name"] for line in path.read_text().splitlines()]


def test_committed_runs_are_read(capsys: pytest.CaptureFixture[str]) -> None:
    paths = sorted(RESULTS.glob("growth_grid-*.jsonl"))
    growth_grid.main(["--read", *map(str, paths)])
    lines = capsys.readouterr().out.splitlines()
    validated, tested = lines[: lines.index("")], lines[lines.index("") :]
    runs = [int(line.rsplit("n=", 1)[1]) for line in validated[1:]]
    assert sum(runs) == sum(len(path.read_text().splitlines()) for path in paths)
    assert any(" at 0.3 " in line for line in tested)

    growth_trainer.main(["--read", str(RESULTS / "growth_trainer-h200.jsonl")])
    assert "plain 8x192" in capsys.readouterr().out
