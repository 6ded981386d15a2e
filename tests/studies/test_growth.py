"""The study of growth, whole, on a task so small that it says nothing."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import pytest

from esper.tamiyo.schedule import BY_BUDGET, Schedule
from studies.growth import environments, evaluation, report, training
from studies.growth.records import read
from studies.growth.rule import rule_of

BUDGETS = (1.0, 4.0)
TINY = environments.CONFIG.model_copy(
    update={
        "population": environments.CONFIG.population.model_copy(
            update={"batch_size": 4, "batches_per_epoch": 1, "validation_samples": 16, "initial_weights": 8}
        ),
        "policy": environments.CONFIG.policy.model_copy(update={"width": 8}),
    }
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training of two controllers and all arms on one task."""
    out = tmp_path_factory.mktemp("study")
    with pytest.MonkeyPatch.context() as patch:
        for module in (evaluation, training, environments):
            patch.setattr(module, "CONFIG", TINY)
        for module in (evaluation, environments):
            patch.setattr(module, "BUDGETS", BUDGETS)
        patch.setattr(evaluation, "CHOOSING", 1)
        patch.setattr(evaluation, "tidy", lambda: None)  # it frees the memory of a GPU
        patch.setattr(evaluation, "RATES", (1.0, 2.0))
        training.train(
            argparse.Namespace(
                trainings=2, members=3, rounds=1, seconds=600.0, families=["tables"], device="cpu", out=out,
                resume=None,
            )
        )  # fmt: skip
        learned = training.load_controllers(out, "cpu")
        assert list(learned) == ["main-0", "main-1"]
        setup = evaluation.Setup("spirals", 2, "cpu", learned)
        evaluation.evaluate(setup, [name for name in evaluation.PROGRAMS if name != "masked"], out)
    return out


@pytest.mark.long
def test_every_arm_is_played_at_every_budget_for_equal_compute(folder: Path) -> None:
    samples = [sample for path in folder.glob("*.jsonl.gz") for sample in read(path)]
    arms = {sample.arm for sample in samples}
    assert {"fixed 0", "fixed 5", "main-0", "main-1", "heuristic", "random", "final"} <= arms
    for arm in arms:
        assert {s.budget for s in samples if s.arm == arm} == set(BUDGETS)
    for sample in samples:
        assert len(sample.test) == len(sample.validation) == len(sample.cost) == 2
        assert np.isfinite(sample.test).all()
    fixed = sorted((s for s in samples if s.arm.startswith("fixed") and s.budget == 1), key=lambda s: s.arm)
    costs = [float(np.mean(s.cost)) for s in fixed]
    assert costs == sorted(costs)
    assert costs[0] == pytest.approx(1.0)
    assert costs[-1] > 14


@pytest.mark.long
def test_the_tables_are_made_from_what_was_written(folder: Path) -> None:
    study = report.Study.of(folder)
    regret = study.regrets("spirals", 4.0, report.TAMIYO)
    assert regret is not None
    best, own = (study.find("spirals", 4.0, arm) for arm in ("oracle", report.TAMIYO))
    assert best is not None
    assert own is not None
    assert regret.mean() == pytest.approx(100 * (np.mean(best.test) - np.mean(own.test)))
    trainings = [s for s in study.samples if s.arm.startswith("main-") and s.budget == 4.0]
    assert np.mean(own.test) == pytest.approx(np.mean([s.test for s in trainings]))
    page = "\n".join(f"<!-- study:{name} -->\nold\n<!-- end:{name} -->" for name in report.IN_PAGE)
    filled = report.page_with_tables(page, study)
    assert "old" not in filled
    assert filled == report.page_with_tables(filled, study)
    assert all(make(study).count("\n") > 1 for make in report.PRINTED.values())
    for name, draw in report.PICTURES.items():
        draw(study, folder / name)


def test_the_rule_of_thumb_that_ships_is_what_the_made_tasks_chose() -> None:
    """At each budget of the study, the lines of BY_BUDGET that it pays for are the chosen schedule."""
    for budget, name in rule_of().items():
        updates = budget * environments.STEPS * environments.CONFIG.population.batches_per_epoch
        lines = [(e.at, e.blueprint) for e in BY_BUDGET if e.updates[0] <= updates < e.updates[1]]
        chosen = evaluation.SCHEDULES[name]() if name != "start" else Schedule([])
        assert isinstance(chosen, Schedule)
        assert lines == [(line.at, line.blueprint) for line in chosen.events]
