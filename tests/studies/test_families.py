"""Made tasks: every kind is made, and none is like another."""

from __future__ import annotations

import pytest
import torch

from esper.tasks import task_table
from studies.growth.families import FAMILIES, KINDS, Family, make_task
from studies.growth.world import HELD_OUT


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_every_kind_of_a_family_is_dealt(family: Family) -> None:
    tasks = [make_task(family, seed) for seed in range(len(family.kinds))]
    for task, kind in zip(tasks, family.kinds, strict=True):
        assert f"({kind})" in task.name
        assert task.train.inputs.isfinite().all()
    again = make_task(family, 0)
    assert torch.equal(again.train.inputs, tasks[0].train.inputs)
    other = make_task(family, len(family.kinds))
    assert not torch.equal(other.train.inputs, again.train.inputs)


def test_every_kind_has_a_family() -> None:
    assert {kind for family in FAMILIES for kind in family.kinds} == set(KINDS)


def test_no_family_has_the_shape_or_the_classes_of_a_task_that_judges() -> None:
    judges = [row for row in task_table() if row.name in HELD_OUT]
    assert len(judges) == len(HELD_OUT)
    for family in FAMILIES:
        assert family.shape not in {row.input_shape for row in judges}
        assert family.classes not in {row.num_classes for row in judges}
