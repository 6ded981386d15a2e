"""One command evaluates every arm, saves after every program, and pairs what it compares."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from esper.foundation.errors import UserError
from studies.ablations import CHANGES
from studies.calibration import RATES, match
from studies.evaluation import PROGRAMS, Course, ProgramsFailed, Request, check, evaluate_task, run_program
from studies.records import Arm, Evaluation, run_lengths
from tests.studies.worlds import MEMBERS, TINY, task

EXPECTED = {
    "static",
    "heuristic",
    "habit",
    "periodic",
    "scheduled",
    "main-0",
    "random",
    *(f"{name}, {change}" for name in ("scheduled", "main-0") for change in CHANGES),
    "static-final of main-0",
    "static-final of heuristic",
    "static-final of main-0, equal FLOPs",
    "static, equal FLOPs",
    "best of restarts, equal FLOPs",
    "static width 4",
    "static width 5",
    "static width 6",
    "static width 12",
    "static width 16",
    "random search over sizes",
    "pruned from twice the width",
}


def test_every_arm_runs(found: Evaluation) -> None:
    assert {arm.name for arm in found.arms} == EXPECTED
    for arm in found.arms:
        lengths = {len(arm.test_accuracy), len(arm.parameters), len(arm.flops), len(arm.potential)}
        assert lengths == {MEMBERS}, arm.name
        assert len(arm.batches) == len(arm.curve) == len(arm.spent), arm.name
        assert np.isfinite(arm.potential).all(), arm.name


def test_what_is_written_is_read_back(found: Evaluation, tmp_path: Path) -> None:
    assert Evaluation.read(found.write(tmp_path)) == found


def test_a_later_program_goes_on_from_the_file(found: Evaluation, tmp_path: Path) -> None:
    found.write(tmp_path)
    blank = replace(found, arms=[], calibration=None)
    assert blank.continued(tmp_path) == found
    assert replace(blank, members=99).continued(tmp_path).arms == []  # other settings: from the start
    assert "static" not in found.without("arms")
    assert "static width 4" in found.without("arms")


def test_a_host_that_nothing_grew_on_is_the_static_one(found: Evaluation) -> None:
    """The blocks are paired: a static-final without seeds has the hosts and the data of the static arm."""
    static, final = found["static"], found["static-final of heuristic"]
    for member, parameters in enumerate(final.parameters):
        if parameters == found.host_parameters:
            assert final.test_accuracy[member] == pytest.approx(static.test_accuracy[member], abs=0.02)
            assert final.flops[member] == pytest.approx(static.flops[member])


def test_equal_flops_are_equal(found: Evaluation) -> None:
    grown = np.mean(found["main-0"].flops)
    for name in ("static-final of main-0", "static", "best of restarts"):
        assert np.mean(found[f"{name}, equal FLOPs"].flops) == pytest.approx(grown, rel=0.15), name


def test_the_budget_of_the_search_is_that_of_one_training(found: Evaluation) -> None:
    assert found["random search over sizes"].batches[-1] == TINY.steps * TINY.batches


def test_pruning_ends_at_the_size_of_the_grown_networks(found: Evaluation) -> None:
    """Or at the dense host's own size, where the grown networks are larger than that."""
    target = round(float(np.mean(found["main-0"].parameters)))
    dense = found["static width 16"].parameters[0]
    assert set(found["pruned from twice the width"].parameters) == {min(target, dense)}


def test_growth_is_told_of_controllers_alone(found: Evaluation) -> None:
    told = {arm.name for arm in found.arms if arm.growth is not None}
    assert "main-0" in told
    assert "random" in told
    assert "static width 4" not in told
    scheduled = found["scheduled"].growth
    assert scheduled is not None
    assert scheduled.germinated[2] == 1.0  # every member, at the first step of the list
    assert sum(map(sum, scheduled.placed)) == MEMBERS * round(scheduled.seeds_planted)


def test_runs_of_holding_are_counted_by_length() -> None:
    held = np.zeros((5, 1, 2), dtype=bool)
    held[1:3, 0, 0] = True  # two steps
    held[4, 0, 0] = True  # one, cut by the end
    held[:, 0, 1] = True  # five
    assert run_lengths(held) == [0, 1, 1, 0, 0, 1]


def test_the_rate_of_random_germination_lies_between_those_tried() -> None:
    found = match(2.0, [0.5, 1.5, 2.5, 3.0])
    assert found.rate == pytest.approx((RATES[1] + RATES[2]) / 2)
    assert found.expected == pytest.approx(2.0)
    assert match(9.0, [0.5, 1.5, 2.5, 3.0]).rate == RATES[-1]


def test_programs_that_need_the_controllers_say_so(found: Evaluation) -> None:
    course = Course(TINY, task(), members=None, policies=None, found=found)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="need the program 'arms'"):
        course.controllers()


def test_a_program_that_fails_costs_the_others_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: Evaluation
) -> None:
    monkeypatch.setitem(PROGRAMS, "search", lambda course: iter([found["static"]]))
    request = Request(members=MEMBERS, programs=("finals", "search"), out=tmp_path)
    with pytest.raises(ProgramsFailed, match="spirals: finals failed"):
        evaluate_task(TINY, task(), request)
    assert [arm.name for arm in Evaluation.read(found.path(tmp_path)).arms] == ["static"]


def test_too_little_memory_halves_the_chunks(monkeypatch: pytest.MonkeyPatch, found: Evaluation) -> None:
    tried = []

    def hungry(course: Course) -> Iterator[Arm]:
        tried.append(course.setting.chunk)
        yield found["static"]
        if course.setting.chunk > 1024:
            raise torch.OutOfMemoryError

    monkeypatch.setitem(PROGRAMS, "search", hungry)
    course = Course(TINY, task(), torch.arange(2), None, replace(found, arms=[]))
    run_program(course, "search")
    assert tried == [4096, 2048, 1024]
    assert len(course.found.arms) == 1


def test_what_cannot_be_done_is_refused_before_anything_is_trained(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="are none; give the --out"):
        check(Request(policies=tmp_path, programs=("arms",)), "cpu")
    with pytest.raises(UserError, match="--programs arms finals pruning"):
        check(Request(programs=("finals", "search", "pruning")), "cpu")
    check(Request(policies=tmp_path, programs=("frontier", "search")), "cpu")  # these need no controller
