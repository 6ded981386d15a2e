"""The study of the learning rate: a small run of the whole, and a table with numbers worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from studies import rates

SMALL = (
    "members=4", "rounds=2", "learner.imitate=1", "learner.plans=2", "episode.steps=3", "policy.width=16",
    "population.batches_per_epoch=1", "population.initial_weights=4", "population.seed_weights=1",
    "ppo.minibatches=2", "ppo.epochs=1",
)  # fmt: skip


@pytest.mark.long
def test_every_arm_of_a_training_has_the_same_tasks_and_first_rates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, few in {"TASKS": 3, "FALLS": (0.1, 0.3), "WINDOWS": (1,), "SCALES": (1.0, 4.0)}.items():
        monkeypatch.setattr(rates, name, few)
    out, settings = tmp_path / "rates.jsonl", [word for text in SMALL for word in ("--set", text)]
    rates.main(["--trainings", "2", "--out", str(out), *settings])
    printed = capsys.readouterr().out
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert [record["training"] for record in records] == [0, 1]
    for record in records:
        assert set(record["accuracy"]) >= {rates.CONTROLLER, *rates.OPPONENTS}
        assert all(len(found) == 3 for found in record["accuracy"].values())
        assert len(record["rounds"]) == 2
    assert records[0]["accuracy"]["static"] != records[1]["accuracy"]["static"], "other tasks"
    rates.main(["--read", str(out)])
    assert capsys.readouterr().out.strip() in printed


def test_the_table_pairs_networks_and_counts_trainings() -> None:
    def record(training: int, *gains: float) -> dict[str, object]:
        static = [50.0, 60.0]
        arms = {name: static for name in rates.OPPONENTS}
        ahead = [value + gain for value, gain in zip(static, gains, strict=True)]
        facts = {"seconds": 10.0, "rule": [0.2, 1], "scale": 4.0}
        return {"training": training, "accuracy": {**arms, rates.CONTROLLER: ahead}, **facts}

    table = rates.report([record(0, 1.0, 3.0), record(1, 3.0, 5.0)])
    # Means of 2 and 4 over two trainings: 3 ± 12.71 · √2 / √2; within a training 12.71 · √2 / √2 too.
    assert "| static | +3.00 ± 12.71 | +2.00 ± 12.71 | +4.00 ± 12.71 |" in table
    assert "| controller | 58.00 |" in table
