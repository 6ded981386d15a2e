"""Selection among networks of one size: who gives way to whom, and what a copy takes over."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from studies.growth.selection import GROUP, heirs, play_with_selection
from tests.simic.worlds import make_environment, make_residual


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
    population.take_over(torch.tensor([0, 0, 2, 1]))
    for name, value in population.tensors().items():
        old = before[name].unflatten(0, (4, -1))
        assert torch.equal(value.unflatten(0, (4, -1)), old[[0, 0, 2, 1]]), name


def test_after_selection_a_group_descends_from_its_better_half() -> None:
    environment = make_environment(members=range(2 * GROUP), steps=8)
    taken: list[torch.Tensor] = []
    population = environment.population
    whole = population.take_over
    population.take_over = lambda source: (taken.append(source), whole(source))[1]  # type: ignore[method-assign]
    record = play_with_selection(environment).record()
    moved = [source for source in taken if (source != torch.arange(2 * GROUP)).any()]
    assert len(moved) == 2, "once after a quarter, once after half"
    assert all((source != torch.arange(2 * GROUP)).sum() == GROUP for source in moved)
    assert record.accuracy.shape == (9, 2 * GROUP)
