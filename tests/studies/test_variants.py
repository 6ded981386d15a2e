"""Variants: pure, of the same shape, and blind to the test split until it is read."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from esper.tasks import Task, load_task
from studies.growth.variants import class_subset, permuted_inputs, permuted_labels

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
    assert task.test_reads == one.test_reads == 0
    assert one.test().inputs.shape == task.test().inputs.shape


def test_a_class_subset_keeps_its_classes_in_every_split() -> None:
    task = class_subset(load_task("digits"), 3, seed=0)
    kept = task.train.targets.unique().tolist()
    assert len(kept) == 3
    assert task.validation.targets.unique().tolist() == task.test().targets.unique().tolist() == kept
    assert len(task.train) == 1197


def test_permuted_labels_rename_every_split_alike() -> None:
    task = load_task("digits")
    renamed = permuted_labels(task, seed=4)
    order = {int(a): int(b) for a, b in zip(task.train.targets, renamed.train.targets, strict=True)}
    assert sorted(order) == sorted(order.values()) == list(range(10))
    assert [order[int(t)] for t in task.test().targets] == renamed.test().targets.tolist()


def test_permuted_inputs_keep_every_sample_as_a_bag() -> None:
    task = load_task("digits")
    moved = permuted_inputs(task, seed=4)
    for before, after in ((task.train, moved.train), (task.test(), moved.test())):
        assert torch.equal(before.inputs.flatten(1).sort().values, after.inputs.flatten(1).sort().values)
        assert not torch.equal(before.inputs, after.inputs)


def test_text_takes_the_variants_that_make_sense() -> None:
    task = load_task("text")
    assert permuted_labels(task, 1).train.targets.shape == task.train.targets.shape
    with pytest.raises(ValueError, match=r"tokens as inputs; permuted_inputs needs numbers"):
        permuted_inputs(task, 1)
    with pytest.raises(ValueError, match=r"target per position; class_subset needs one per sample"):
        class_subset(task, 3, 1)


def test_a_class_subset_has_at_least_two_classes() -> None:
    with pytest.raises(ValueError, match=r"num_kept is 1; task digits allows 2 to 10"):
        class_subset(load_task("digits"), 1, 0)
