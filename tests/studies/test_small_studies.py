"""The smaller parts of the study of growth: tasks that are made, variants of tasks, selection."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from esper.tasks import Task, load_task
from studies.growth.families import FAMILIES, Family, make_task
from studies.growth.selection import GROUP, heirs, take_over
from studies.growth.variants import class_subset, permuted_inputs, permuted_labels
from tests.simic.worlds import make_residual


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


@given(st.integers(1, 5), st.integers(0, 10_000))
def test_the_worse_half_of_a_group_go_on_from_the_better_half(groups: int, seed: int) -> None:
    dice = torch.Generator().manual_seed(seed)
    accuracy = torch.randint(0, 4, (GROUP * groups,), generator=dice) / 4
    due = (torch.rand(groups, generator=dice) < 0.5).repeat(GROUP)
    source = heirs(accuracy, due)
    for g in range(groups):
        rows = list(range(g, GROUP * groups, groups))
        ranked = sorted(rows, key=lambda row: (-accuracy[row], row))
        expected = {row: row for row in rows}
        if due[g]:
            expected |= dict(zip(ranked[GROUP // 2 :], ranked[: GROUP // 2], strict=True))
        assert {row: int(source[row]) for row in rows} == expected


def test_a_member_that_takes_over_has_every_row_of_the_other_and_nobody_else_changes() -> None:
    environment = make_residual(members=range(4), steps=3, folds=1, depth=2)
    population, before = environment.population, environment.population.snapshot()
    take_over(population, torch.tensor([0, 0, 2, 1]))
    for name, value in population.tensors().items():
        old = before[name].unflatten(0, (4, -1))
        assert torch.equal(value.unflatten(0, (4, -1)), old[[0, 0, 2, 1]]), name


VARIANTS: dict[str, Callable[[Task, int], Task]] = {
    "class_subset": lambda task, seed: class_subset(task, 4, seed),
    "permuted_labels": permuted_labels,
    "permuted_inputs": permuted_inputs,
}


def fingerprint(task: Task) -> tuple[float, ...]:
    parts = (task.train.inputs, task.train.targets, task.validation.inputs, task.validation.targets)
    return tuple(float((p.float().flatten() * torch.arange(p.numel())).sum()) for p in parts)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_is_pure_keeps_its_shape_and_reads_no_test_data(name: str) -> None:
    task = load_task("digits")
    before = fingerprint(task)
    one, same, other = (VARIANTS[name](task, seed) for seed in (1, 1, 2))
    assert fingerprint(task) == before
    assert fingerprint(one) == fingerprint(same) != fingerprint(other)
    assert fingerprint(one) != before
    assert (one.input_shape, one.num_classes, one.topology) == (task.input_shape, 10, "cnn")
    assert len(one.validation) == len(task.validation)
    assert task.held_out.reads == one.held_out.reads == 0
    assert one.test().inputs.shape == task.test().inputs.shape
