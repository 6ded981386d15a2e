"""The benchmarks run, read committed results back, and compare like with like."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import loop, members, population, progressive, roofline, textbook
from benchmarks.common import line_of, read_results
from benchmarks.hot_paths import features_by_slot, main, masks_preallocated
from benchmarks.population import Result
from benchmarks.when_to_grow import MODELS, Measured, table
from esper.lifecycle.slot_states import SlotConfig
from esper.simic.rollout import play
from esper.tamiyo.scripted import Static
from esper.tasks import load_task
from tests.scenes import random_observation
from tests.tamiyo.features_by_element import features_one_by_one, to_reports
from tests.tamiyo.masks_by_member import masks_one_by_one, to_mask_states

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def test_committed_lines_are_read_and_written_back(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    found, machine = read_results(parser, RESULTS / "h200-population.jsonl", Result)
    assert machine == "NVIDIA H200"
    copy = tmp_path / "lines.jsonl"
    copy.write_text("\n".join(line_of(result, machine) for result in found))
    assert read_results(parser, copy, Result) == (found, machine)


def test_json_prints_one_object_per_row(capsys: pytest.CaptureFixture[str]) -> None:
    main(["masks", "features", "--members", "2", "4", "--slots", "3", "--seconds", "0", "--json"])
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(r["work"], r["n"], r["slots"]) for r in rows] == [
        ("masks", 2, 3), ("masks", 4, 3), ("features", 2, 3), ("features", 4, 3),
    ]  # fmt: skip
    for row in rows:
        assert set(row) == {"work", "n", "slots", "ours_ms", "baseline_ms", "ratio", "ops"}
        assert row["ratio"] == pytest.approx(row["baseline_ms"] / row["ours_ms"])
        assert row["ops"] > 0


def test_the_mends_of_the_review_compute_what_the_baselines_compute() -> None:
    observation, config = random_observation(np.random.default_rng(0), 5, 3), SlotConfig.grid(1, 3)
    objects, reports = to_mask_states(observation.slots), to_reports(observation, config)
    plain, mended = masks_one_by_one(objects, config), masks_preallocated(objects, config)
    assert all(torch.equal(plain[key], mended[key]) for key in plain)
    assert torch.equal(features_one_by_one(reports, config), features_by_slot(reports, config))


def test_a_whole_step_and_a_population_are_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    few = ["--members", "2", "--device", "cpu", "--json"]
    monkeypatch.setattr(sys, "argv", ["loop", *few, "--steps", "2", "--warm", "1", "--rounds", "1"])
    loop.main()
    (line,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert set(line["shares"]) == {name for name, _, _ in loop.PHASES}
    assert all(share > 0 for share in line["shares"].values())
    assert sum(line["shares"].values()) == pytest.approx(1, abs=0.01)
    monkeypatch.setattr(sys, "argv", ["population", *few, "--repeats", "1", "--batches", "1"])
    population.main()
    for line in map(json.loads, capsys.readouterr().out.splitlines()):
        assert line["ratio"] == pytest.approx(line["baseline_ms"] / line["ours_ms"], rel=0.05)


def test_a_grown_loop_is_measured_beside_a_plain_one(capsys: pytest.CaptureFixture[str]) -> None:
    progressive.main(["resnet", "--seconds", "0", "--json"])
    row = json.loads(capsys.readouterr().out)
    assert (row["model"], row["compiled"]) == ("resnet", False)
    assert row["ratio_low"] <= row["ratio"] <= row["ratio_high"]
    assert row["grown_mb"] == row["plain_mb"] > 0


def test_hosts_and_textbook_networks_train_for_the_same_flops() -> None:
    family = replace(textbook.FAMILIES["mlp"], flops=2e7, rates=(1e-4, 1e-2), batch=16)
    task = load_task("letter")
    hosts = textbook.make_hosts(family, task, "cpu", [0, 1], [1e-2] * 2)
    np.testing.assert_allclose(play(hosts, Static(), 0).spent[-1], 2e7)
    plain = textbook.PlainLoop(family, task, "cpu")
    step = 3 * family.batch * textbook.forward_flops(plain.model, task.train.inputs[:1])
    assert plain.steps * step == pytest.approx(2e7, abs=step)
    for train in textbook.SIDES.values():
        side = train(family, task, 2, "cpu")
        assert side.rate == 1e-2  # the other one hardly moves
        assert side.tried["0.01"] < side.tried["0.0001"]
        assert len(side.loss) == len(side.accuracy) == 2
        assert np.less(side.loss, 3.2).all()  # ln 26 is 3.26


def test_controllers_are_judged_by_their_distance_to_the_model_without_growth() -> None:
    rows = [
        Measured("m", controller, seed, grown, 60.0 + seed, 200, 1, 1.0)
        for controller, grown in (("timid", 61.0), ("bold", 64.0))
        for seed in (0, 1)
    ]
    output = table(rows)
    assert "| m | bold | 64.0 | 60.5 | +3.50 ± 6.35 | 1.0 | 200 |" in output
    assert output.splitlines()[-2] == "| timid | +0.50 ± 6.35 |"


@pytest.mark.parametrize("name", MODELS)
def test_the_models_take_the_data_they_are_named_after(name: str) -> None:
    make, data = MODELS[name]
    shape = {"digits": (1, 8, 8), "letter": (16,), "mnist1d": (1, 40)}[data]
    classes = {"digits": 10, "letter": 26, "mnist1d": 10}[data]
    assert make()(torch.zeros(2, *shape)).shape == (2, classes)


def test_a_step_is_judged_by_products_and_by_the_memory_that_adamw_moves() -> None:
    measurement = members.Measurement("tiny", "float32", torch.device("cpu"), repeats=1)
    measurement.rate = 1e9
    bound = roofline.bounds(measurement, 3, bytes_per_second=1e6)
    assert bound.products == pytest.approx(3e3 * measurement.flops / 1e9)
    assert bound.update == pytest.approx(3e3 * measurement.parameters * 24 / 1e6)
    assert bound.share == pytest.approx(bound.products / bound.update)
    assert bound.products < bound.update
    first, second, *kernels = roofline.report(measurement, 3, 1e6, top=2).splitlines()
    assert first.startswith(f"3 × tiny of {measurement.parameters} parameters")
    assert second.endswith(f"at most {bound.share:.2f}")
    assert [line.count("launches") for line in kernels] == [1, 1, 1]
    assert kernels[2].endswith("other kernels")


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 8))))
def test_the_time_in_which_a_kernel_runs_and_the_gaps_are_those_counted_one_by_one(
    drawn: list[tuple[int, int]],
) -> None:
    spans = sorted((float(start), float(start + length)) for start, length in drawn)
    busy, gaps = loop.busy_and_gaps(spans)
    ticks = [any(start <= t < end for start, end in spans) for t in range(40)]
    assert busy == sum(ticks)
    idle = "".join("x" if tick else " " for tick in ticks).strip().split("x")
    assert gaps == [len(gap) for gap in idle if gap]
