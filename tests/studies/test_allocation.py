"""The study of allocation: replays beside a slow reference, forks bit by bit, a report of made records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from esper.config import load_config
from esper.simic.environment import GrowthEnvironment
from esper.simic.rollout import Episode
from esper.tamiyo.scripted import Static

pytest.importorskip("prodigyopt")
pytest.importorskip("schedulefree")

from studies import allocation, allocation_runs
from studies.held_out import spec_for, varied_tables, with_rates
from tests.studies.test_rates import SMALL

CANDIDATES = len(allocation.RATES) * allocation.NETWORKS


def made_records(shapes: int = 10, telling: bool = True) -> list[dict[str, Any]]:
    """Make records: the best rate differs from task to task; curves tell the end of a network, or nothing."""
    rng, records = np.random.default_rng(0), []
    size = (len(allocation.RATES), allocation.TWINS * allocation.NETWORKS)
    for shape in range(shapes):
        best = rng.integers(1, 9)
        end = 800 - 40 * np.abs(np.arange(size[0])[:, None] - best) + rng.normal(0, 5, size)
        rungs = (len(allocation.RUNGS), *size)
        curve = np.broadcast_to(end, rungs) / 10 if telling else rng.uniform(0, 100, rungs)
        grid = {
            "validation": end + rng.normal(0, 5, size),
            "test": np.stack([end, end]),
            "accuracy": curve,
            "loss": -curve,
            "training_loss": -curve[: len(allocation.EARLY)],
        }
        times = allocation.TIMES
        record = {f"longer {n}": {"test": np.full((2, 5, allocation.TWINS), 700.0).tolist()} for n in times}
        forked = np.full((2, len(allocation.FORKS), allocation.TWINS, len(times)), 600.0)
        own = {"shape": shape, "facts": [100 + shape, 5, 3], "forked": {"test": forked.tolist()}}
        records.append(record | own | {"grid": {name: value.tolist() for name, value in grid.items()}})
    return records


def slow_replay(
    table: allocation.Table, task: int, twin: int, order: list[int], times: int, one: allocation.Schedule
) -> tuple[float, int]:
    """Play one search with lists; return the test score of what it finds and the steps that it spent."""
    start, *going = one.counts(times, len(order))
    alive, spent, before = order[:start], 0, 0
    for rung, kept in zip(one.rungs, going, strict=True):
        spent, before = spent + len(alive) * (rung - before), rung
        seen = table.curves["accuracy"][allocation.RUNGS.index(rung), task, twin]
        alive = sorted(alive, key=lambda candidate: -seen[candidate])[:kept]
    spent += len(alive) * (allocation.STEPS - before)
    found = max(alive, key=lambda candidate: table.validation[task, twin, candidate])
    return float(table.test[task, twin, :, found].mean()), spent


@pytest.mark.parametrize("one", [allocation.SEARCH, *allocation.SCHEDULES], ids=str)
@pytest.mark.parametrize("telling", [True, False])
def test_replays_are_those_of_a_slow_reference_and_never_spend_more(
    one: allocation.Schedule, telling: bool
) -> None:
    table, tasks = allocation.Table.of(made_records(2, telling)), np.arange(2)
    drawn = allocation.draw(table.keys, tasks, len(allocation.RATES))
    rank = allocation.by_measure(table, tasks, "accuracy")
    for times in allocation.TIMES:
        found = allocation.replay(table, tasks, drawn, times, one, rank).mean(axis=2)
        for task, twin in np.ndindex(2, allocation.TWINS):
            orders = drawn[0][task, twin].tolist()
            slow = [slow_replay(table, task, twin, order, times, one) for order in orders]
            assert found[task, twin] == pytest.approx(np.mean([score for score, _ in slow]))
            assert all(0 < spent <= times * allocation.STEPS for _, spent in slow)


def test_the_counts_of_a_schedule_are_those_worked_out_by_hand() -> None:
    halving = allocation.Schedule((2, 4, 8), 2)
    assert halving.counts(2, 80) == [7, 3, 1, 1]  # 7·2 + 3·2 + 1·4 + 1·8 = 32 steps
    assert halving.counts(8, 8) == [8, 4, 2, 2]  # one of two would go on, but there is compute for both
    assert allocation.SEARCH.counts(4, 80) == [4]
    assert allocation.Schedule((2,), 4).counts(4, 80) == [11, 3]  # 11·2 + 3·14 = 64; 12 would cost 66


def test_candidates_are_drawn_around_a_rate_first() -> None:
    keys = np.random.default_rng(1).random((3, 2, 4, CANDIDATES))
    order, near = allocation.draw(keys, np.array([0, 5, 9]), 1)
    assert near == 3 * allocation.NETWORKS
    assert (np.sort(order) == np.arange(CANDIDATES)).all()
    rates = allocation.RATE_OF[order[..., :near]]
    assert [sorted(set(each.ravel())) for each in rates] == [[0, 1, 2], [4, 5, 6], [7, 8, 9]]


def test_the_best_plan_for_each_task_earns_nothing_by_luck() -> None:
    rng = np.random.default_rng(2)
    luck = rng.normal(0, 1, (300, 2, 2, 10))
    found = allocation.best_for_each(luck, np.arange(300))
    assert abs(found.mean()) < 0.12
    assert luck.mean(axis=(1, 2)).max(axis=1).mean() > 0.5, "while the best in hindsight seems to win"
    best = np.eye(10)[rng.integers(10, size=300)][:, None, None]
    assert allocation.best_for_each(luck + 20 * best, np.arange(300)).mean() == pytest.approx(20, abs=0.2)


def test_the_worst_of_a_population_copy_the_best() -> None:
    rng = np.random.default_rng(3)
    source, factor = allocation_runs.choose_forks(np.array([0.5, 0.9, 0.1, 0.7]), 2.0, rng)
    assert source.tolist() == [0, 1, 1, 3]
    assert factor[[0, 1, 3]].tolist() == [1.0, 1.0, 1.0]
    assert factor[2] in (0.5, 2.0)
    source, factor = allocation_runs.choose_forks(np.full(8, 0.5), 2.0, rng)
    assert source.tolist() == list(range(8)), "nobody is better"


def test_a_fork_has_the_state_of_its_source_and_leaves_others_alone() -> None:
    config = load_config(preset="demo", overrides=SMALL)
    spec = with_rates(spec_for(config, varied_tables(0)[:1]), np.array([[1.0], [2.0], [4.0]]), offset=1)

    def played(source: list[int] | None) -> dict[str, torch.Tensor]:
        environment = GrowthEnvironment(spec)
        episode = Episode(environment, Static())
        episode.step()
        if source is not None:
            allocation_runs.fork(environment, np.array(source), np.array([1.0, 3.0, 1.0]))
        state = environment.state_dict()
        episode.step()
        return {f"before {name}": value for name, value in state.items()} | environment.state_dict()

    alone, forked = played(None), played([0, 0, 2])
    for name in ("before population.hosts.weights", "before population.hosts.first", "before potential"):
        assert torch.equal(forked[name][1], alone[name][0]), name
    assert forked["state.rates.scale"].tolist() == [1.0, 3.0, 4.0]
    weights = "population.hosts.weights"
    assert torch.equal(forked[weights][[0, 2]], alone[weights][[0, 2]])
    assert not torch.equal(forked[weights][1], alone[weights][0]), "at another rate"


def test_all_networks_are_trained_and_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, few in {"SHAPES": 1, "TASKS": 2, "NETWORKS": 1, "TIMES": (2,), "RUNGS": (1, 2)}.items():
        monkeypatch.setattr(allocation_runs, name, few)
    first, second = allocation_runs.judge(load_config(preset="demo", overrides=SMALL), 0)
    assert first["facts"] == second["facts"]
    assert np.shape(first["grid"]["test"]) == (2, len(allocation.RATES), 2)
    assert np.shape(first["grid"]["accuracy"]) == (2, len(allocation.RATES), 2)
    assert np.shape(first["forked"]["test"]) == (2, len(allocation.FORKS), 2, 1)
    assert np.shape(first["longer 2"]["test"]) == (2, len(allocation_runs.LONG_RATES), 2)
    assert all(0 <= score <= 1000 for score in np.ravel(first["grid"]["test"]))


@pytest.mark.parametrize("telling", [True, pytest.param(False, marks=pytest.mark.long)])
def test_the_figures_say_what_curves_tell(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, telling: bool
) -> None:
    few = {
        name: [one for one in configs if one.ranking in ("accuracy", "ridge") and one.schedule.rungs == (2,)]
        for name, configs in allocation.ARMS.items()
    }
    monkeypatch.setattr(allocation, "ARMS", few)
    monkeypatch.setattr(allocation, "FORMS", ("one plan", "ridge"))
    found: list[dict[str, Any]] = []
    headroom = allocation.headroom
    monkeypatch.setattr(allocation, "headroom", lambda of: found.append(of) or headroom(of))
    path = tmp_path / "records.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in made_records(telling=telling)))
    allocation.main(["--read", str(path)])
    assert "×8: nothing to win: H1" in capsys.readouterr().out
    assert len(found) == len(allocation.TIMES)
    for of in found:
        h1, h2, h3 = (float(each.mean()) for each in list(headroom(of).values())[:3])
        assert h3 < 0.5, "halving reads the same curve"
        if telling:  # the best rate differs from task to task by 4 points a rate, and facts do not tell it
            assert np.mean(of["predictor"] - of["rate by facts"]) > 3.0
        else:
            assert h1 > 0.5
            assert h2 < 1.0
