"""Made tasks: every kind is made, and none is like another."""

from __future__ import annotations

import pytest
import torch

from studies.distribution import FAMILIES, KINDS, TOKENS, Family, make_task


@pytest.mark.parametrize("family", [*FAMILIES, TOKENS], ids=lambda family: family.name)
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
    assert {kind for family in (*FAMILIES, TOKENS) for kind in family.kinds} == set(KINDS)
