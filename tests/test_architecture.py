"""The plan that docs/architecture.md draws is the plan that the code makes."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from esper.lifecycle.actions import Blueprint
from esper.lifecycle.slot_states import SlotRecord
from esper.lifecycle.stages import Stage
from esper.population.plan import Plan, Rows, measurement_rows, training_rows
from esper.population.planning import build_plan
from tests.population.test_plan import view_of

PAGE = (Path(__file__).parent.parent / "docs/architecture.md").read_text(encoding="utf-8")


def drawn_plans() -> tuple[tuple[Rows, Plan], tuple[Rows, Plan]]:
    """The member of the page: its rows and its plan in a validation and in training."""
    view = view_of(
        [
            [
                SlotRecord(Stage.TRAINING, Blueprint.NORM),
                SlotRecord(Stage.BLENDING, Blueprint.CONV_LIGHT, alpha=0.5),
            ]
        ]
    )
    measured, trained = measurement_rows(view).rows, training_rows(view)
    return tuple((rows, build_plan(rows, view, torch.device("cpu"))) for rows in (measured, trained))  # type: ignore[return-value]


def table(heading: str) -> list[list[str]]:
    """The cells of the table whose head begins like this."""
    after = PAGE.split(f"| {heading} |")[1].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in after]


def numbers(cell: str) -> list[float]:
    return [float(n) for n in re.findall(r"-?[\d.]*\d", cell.replace("–", "-"))]


def test_the_rows_that_are_drawn_are_those_of_a_validation() -> None:
    rows, _ = drawn_plans()[0]
    drawn = table("row | member")
    assert len(drawn) == len(rows.member) == 3
    for k, (row, member, alphas, fork, _why) in enumerate(drawn):
        assert [int(row), int(member)] == [k, int(rows.member[k])]
        assert numbers(alphas) == rows.alpha[k].tolist()
        assert numbers(fork) == [float(rows.fork[k])]


def test_the_index_tensors_that_are_drawn_are_those_of_a_validation() -> None:
    _, plan = drawn_plans()[0]
    drawn = table("slot | rows in → out")
    assert len(drawn) == len(plan.stations)
    for (work,), (_slot, in_out, base, group, rows) in zip(plan.stations, drawn, strict=True):
        assert numbers(in_out) == [work.before, work.after]
        assert numbers(base) == work.base.tolist()
        assert numbers(rows) == work.rows.tolist()
        assert [f"{Blueprint(g.form).name} × {g.size}" for g in work.groups] == [group]


def test_in_training_the_shadow_hears_the_other_seed_with_its_weights_held() -> None:
    rows, plan = drawn_plans()[1]
    assert rows.alpha.tolist() == [[0.0, 0.5], [1.0, 0.5]]
    assert [(g.size, g.live) for g in plan.groups] == [(1, 1), (2, 1)]
    assert "`Group.live` = 1" in PAGE
