"""Growing through the transformers Trainer: what arms spend, what they train on, and how runs are shared."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from esper.tasks.task import HostSpec, Split, Task, TestSplit
from studies import gpt, growth_trainer
from studies.growth_grid import EQUAL_STEPS_AT
from studies.growth_trainer import Arm, Windows, kinds, make_model, plan, rate_shares, train

pytest.importorskip("transformers")

CONTEXT = 8
BASE = Arm(2e8, depth=4, width=16, batch=8)


def make_task() -> Task:
    tokens = (torch.arange(64 * CONTEXT) * 7 % 11).view(64, CONTEXT)  # a pattern that is learned at once
    split = Split(tokens, tokens.roll(-1))
    host = HostSpec("gpt")
    return Task("pattern", "transformer", (CONTEXT,), 256, split, split, TestSplit(split), host)


def test_arms_spend_equal_flops_or_take_equal_steps() -> None:
    grown, equal_steps, plain, half = (plan(arm, CONTEXT) for arm in kinds(BASE))
    for steps, costs in (grown, plain, half):
        assert np.dot(steps, costs) == pytest.approx(BASE.budget, abs=sum(costs) / 2)
    assert sum(equal_steps[0]) == sum(plain[0]) < sum(grown[0])
    steps, costs = equal_steps
    assert steps[0] / sum(steps) == pytest.approx(EQUAL_STEPS_AT, abs=0.03)
    assert np.dot(steps, costs) < np.dot(*plain)


def test_the_learning_rate_follows_the_compute() -> None:
    shares = rate_shares([100, 50], [1.0, 2.0], 0.02)  # 200 in all
    assert shares[:5] == pytest.approx([0.0, 0.25, 0.5, 0.75, 1.0])
    assert shares[110] == 1.0  # 120 spent
    assert shares[130] == pytest.approx(0.5)  # 160 spent
    assert (len(shares), shares[-1]) == (151, 0.0)


def test_the_loss_is_over_all_bytes_of_a_window_but_the_first() -> None:
    model = make_model(1, 16, CONTEXT)
    batch = Windows(make_task().train, "cpu").__getitems__([3, 1, 60])
    with torch.no_grad():
        output = model(**batch)
        # What the Trainer divides by.
        counted = (batch["labels"] != growth_trainer.IGNORED).sum()
        divided = model(**batch, num_items_in_batch=counted)
    expected = F.cross_entropy(output.logits[:, :-1].flatten(0, 1), batch["input_ids"][:, 1:].flatten())
    torch.testing.assert_close(output.loss, expected)
    torch.testing.assert_close(divided.loss, expected)


def test_an_arm_trains_to_its_whole_depth_and_the_same_again() -> None:
    grown, _, plain, _ = kinds(replace(BASE, rate=1e-2))
    task = make_task()
    results = [train(arm, task, test=True) for arm in (grown, plain, grown)]
    assert results[0]["parameters"] == results[1]["parameters"]
    assert results[0]["validation"] == results[2]["validation"] != results[1]["validation"]
    for result in results:
        assert result["test"] == pytest.approx(result["validation"])  # the same windows
        assert result["validation"] < 4.5  # ln 256 is 5.5


def test_processes_share_the_runs_and_finals_take_the_best_rate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trained: list[Arm] = []

    def quickly(arm: Arm, task: Any, device: str, test: bool, compiled: bool) -> dict[str, Any]:
        trained.append(arm)
        loss = 3.0 + 100 * arm.rate * (1 if arm.start else -1) + 0.1 * arm.seed - 0.5 * bool(arm.start)
        cost = {"steps": [2], "flops": 1e15, "seconds": 9.0 - arm.start, "test": loss if test else None}
        return {**asdict(arm), "name": arm.name, "validation": loss, **cost}

    monkeypatch.setattr(growth_trainer, "train", quickly)
    monkeypatch.setattr(gpt, "make_task", lambda size: make_task())
    out = tmp_path / "new" / "runs.jsonl"
    for _ in range(2):  # the second finds all arms taken
        growth_trainer.main(["--out", str(out)])
        growth_trainer.main(["--out", str(out), "--arms", "finals", "--test"])
    assert len(trained) == len(out.read_text().splitlines()) == 8 + 20
    # More is worse for the grown arms above, and better for the others.
    assert {(bool(arm.start), arm.rate) for arm in trained if arm.seed} == {(True, 1e-3), (False, 2e-3)}
    growth_trainer.main(["--out", str(out), "--budget", "1e15", "--rates", "0.01"])
    assert [(arm.budget, arm.rate) for arm in trained[28:]] == [(1e15, 0.01)] * 4
    capsys.readouterr()
    growth_trainer.main(["--read", str(out)])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 8 + 4 + 2 + 4
    # 3.0 + 0.1 - 0.5 minus 3.0 - 0.2
    names = "4→8x384 at 0.3, warm-up 0.1 minus plain 8x384, warm-up 0.1"
    assert f"   4P  {names}: -0.2000 ± 0.0000, -4.0 ± 0.0 s, n=5" in lines
    assert json.loads(out.read_text().splitlines()[0])["test"] is None
