"""The exam of rewards: each way to pay against a slow reference, and a small run of the whole."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from studies import rates, rewards
from tests.studies.test_rates import SMALL


@settings(deadline=None)
@given(st.lists(st.integers(-4, 4), min_size=1, max_size=8), st.integers(0, 3))
def test_ways_to_pay_follow_the_reference(gains: list[int], padding: int) -> None:
    level = [0]
    for gain in gains:
        level.append(level[-1] + gain)
    terminal = [0] * (len(gains) - 1) + [level[-1]]
    escrow = [min(level[t + 1 :]) - min(level[t:]) for t in range(len(gains))]
    row = torch.tensor([[float(gain) for gain in gains] + [0.0] * padding])
    for kind, expected in {"potential": gains, "terminal": terminal, "escrow": escrow}.items():
        found = rewards.pay(row, torch.tensor([len(gains)]), kind)[0].tolist()
        assert found == [float(value) for value in expected] + [0.0] * padding, kind
    assert sum(escrow) == level[-1] - min(level), "a dip that is made good is paid for"


@pytest.mark.long
def test_the_exam_is_run_and_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rates, "TASKS", 3)
    monkeypatch.setattr(rewards, "ROUNDS", 1)
    out, options = tmp_path / "exam.jsonl", [word for text in SMALL for word in ("--set", text)]
    rewards.main(["--trainings", "1", "--out", str(out), *options])
    printed = capsys.readouterr().out
    assert all(f"| {kind} |" in printed for kind in rewards.KINDS)
    assert "| farmer |" in printed
    rewards.main(["--read", str(out)])
    assert capsys.readouterr().out == printed
