"""The study of growth, whole, on a task so small that it says nothing."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import pytest

from esper.tamiyo.schedule import BY_BUDGET, Schedule
from esper.utils.errors import UserError
from esper.utils.gather import Gather
from studies.growth import __main__ as study
from studies.growth import evaluation, report, training, world
from studies.growth.records import POINTS, Sample, on_the_way, read
from studies.growth.rule import CHOICES, rule_of
from studies.growth.training import load_controllers
from tests.shards import on_processes

BUDGETS = (1.0, 4.0)
TINY = world.CONFIG.model_copy(
    update={
        "population": world.CONFIG.population.model_copy(
            update={"batch_size": 4, "batches_per_epoch": 1, "validation_samples": 16, "initial_weights": 8}
        ),
        "policy": world.CONFIG.policy.model_copy(update={"width": 8}),
    }
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training of two controllers and all arms on one task."""
    out = tmp_path_factory.mktemp("study")
    with pytest.MonkeyPatch.context() as patch:
        for module in (evaluation, training, world):
            patch.setattr(module, "CONFIG", TINY)
        for module in (evaluation, world):
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
        course = evaluation.Course("spirals", 2, "cpu", learned)
        evaluation.evaluate(course, [name for name in evaluation.PROGRAMS if name != "masked"], out)
    return out


def test_every_arm_is_played_at_every_budget_for_equal_compute(folder: Path) -> None:
    samples = [sample for path in folder.glob("*.jsonl.gz") for sample in read(path)]
    arms = {sample.arm for sample in samples}
    assert {"fixed 0", "fixed 5", "main-0", "main-1", "habit", "random", "final"} <= arms
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


def test_several_processes_take_tasks_in_turn_and_share_the_members_of_a_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(evaluation, "Course", lambda name, *_: name)
    monkeypatch.setattr(evaluation, "evaluate", lambda course, *_: asked.append(course))
    monkeypatch.setattr(study, "load_controller", lambda *_, **__: None)
    monkeypatch.setenv("WORLD_SIZE", "2")
    args = argparse.Namespace(
        policies=None,
        device="cpu",
        task=["letter", "spirals", "digits"],
        members=1,
        programs=[],
        out=tmp_path,
    )
    for rank in "01":
        monkeypatch.setenv("RANK", rank)
        study.evaluate(args)
    assert asked == ["letter", "digits", "spirals"]

    short = TINY.model_copy(update={"episode": TINY.episode.model_copy(update={"steps": 4})})
    for module in (training, world):
        monkeypatch.setattr(module, "CONFIG", short)
    one = argparse.Namespace(
        trainings=1,
        members=3,
        rounds=2,
        seconds=0.0,
        families=["tables"],
        device="cpu",
        out=tmp_path,
        resume=None,
    )

    def train(gather: Gather) -> tuple[int, dict[str, bytes]]:
        trainer = training._trainer(one, gather)
        with (tmp_path / f"{gather.rank}.jsonl").open("w") as log:
            training._play(trainer, one, log)
        state = trainer.learners["main-0"].agent.state_dict()
        return trainer.rounds_done, {name: value.numpy().tobytes() for name, value in state.items()}

    first, second = on_processes(2, train)
    assert first == second
    assert first[0] == 1, "the time was up after one round"


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
    page = "\n".join(f"<!-- study:{name} -->\nold\n<!-- end:{name} -->" for name in report.TABLES)
    filled = report.page_with_tables(page, study)
    assert "old" not in filled
    assert filled == report.page_with_tables(filled, study)
    for name, draw in report.PICTURES.items():
        draw(study, folder / name)


@pytest.mark.parametrize(("gain", "headroom"), [(0.0, 0.0), (0.02, 2.0)])
def test_headroom_is_what_another_schedule_gains_and_not_the_luck_of_a_choice(
    gain: float, headroom: float
) -> None:
    """Schedules that differ by noise have no headroom; one that is better has its gain."""
    random = np.random.default_rng(0)

    def sample(arm: str, mean: float) -> Sample:
        noise = 0.001 * random.standard_normal((2, 400))
        validation, test = (noise + mean).tolist()
        return Sample("t", arm, 4.0, 1.0, validation, test, [1] * 400, [1.0] * 400)

    schedules = [sample(arm, 0.5 + gain * (arm == "clone at 10 %")) for arm in CHOICES]
    study = report.Study((*schedules, sample(report.RULE, 0.5)))
    assert report.headroom(study, "t", 4.0) == pytest.approx(headroom, abs=0.02)


def test_a_curve_has_the_first_measurement_at_each_share_of_the_budget() -> None:
    spent = np.linspace(0, 1, 17)[:, None]
    assert on_the_way(spent, spent)[0] == pytest.approx(np.arange(1, POINTS + 1) / POINTS)
    coarse = np.array([[0.0], [0.6], [1.0]])
    accuracy = np.array([[0.1], [0.5], [0.9]])
    assert on_the_way(coarse, accuracy)[0] == [0.5] * 4 + [0.9] * 4


def test_a_sample_comes_back_as_it_was_written(tmp_path: Path) -> None:
    from studies.growth.records import write

    sample = Sample("t", "a", 4.0, 1.5, [0.5], [0.25], [10], [1.0], [[0.1] * POINTS], {"x": 1.0}, {"8|8": 1})
    write([sample, sample], tmp_path / "t.jsonl.gz")
    assert read(tmp_path / "t.jsonl.gz") == [sample, sample]


def test_a_folder_without_policies_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"holds no main-\*.safetensors"):
        load_controllers(tmp_path / "nowhere", "cpu")


def test_the_rule_of_thumb_that_ships_is_what_the_made_tasks_chose() -> None:
    """At each budget of the study, the lines of BY_BUDGET that it pays for are the chosen schedule."""
    for budget, name in rule_of().items():
        updates = budget * world.STEPS * world.CONFIG.population.batches_per_epoch
        lines = [(e.at, e.blueprint) for e in BY_BUDGET if e.updates[0] <= updates < e.updates[1]]
        chosen = evaluation.SCHEDULES[name]() if name != "start" else Schedule([])
        assert isinstance(chosen, Schedule)
        assert lines == [(event.at, event.blueprint) for event in chosen.events]
