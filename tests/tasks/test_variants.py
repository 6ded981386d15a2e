"""Variants: pure, of the same shape, and blind to the test split until it is read."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from esper.tasks import Task, load_task
from esper.tasks.variants import (
    class_subset,
    input_noise,
    label_noise,
    permuted_inputs,
    permuted_labels,
    training_subset,
)

VARIANTS: dict[str, Callable[[Task, int], Task]] = {
    "class_subset": lambda task, seed: class_subset(task, 4, seed),
    "permuted_labels": permuted_labels,
    "permuted_inputs": permuted_inputs,
    "input_noise": lambda task, seed: input_noise(task, 0.5, seed),
    "label_noise": lambda task, seed: label_noise(task, 0.3, seed),
    "training_subset": lambda task, seed: training_subset(task, 200, seed),
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


def test_input_noise_has_the_deviation_asked_for_and_differs_between_splits() -> None:
    task = load_task("digits")
    noisy = input_noise(task, 0.5, seed=4)
    train = noisy.train.inputs - task.train.inputs
    validation = noisy.validation.inputs - task.validation.inputs
    assert abs(float(train.std()) - 0.5) < 0.01
    assert not torch.allclose(train[:300], validation)
    assert torch.equal(noisy.test().inputs, noisy.test().inputs)


def test_label_noise_changes_training_labels_alone() -> None:
    task = load_task("digits")
    noisy = label_noise(task, 0.5, seed=4)
    changed = float((noisy.train.targets != task.train.targets).float().mean())
    assert 0.4 < changed < 0.5  # a tenth of the drawn labels are right
    assert torch.equal(noisy.validation.targets, task.validation.targets)


def test_text_takes_the_variants_that_make_sense() -> None:
    task = load_task("text")
    assert permuted_labels(task, 1).train.targets.shape == task.train.targets.shape
    with pytest.raises(ValueError, match=r"tokens as inputs; input_noise needs numbers"):
        input_noise(task, 0.1, 1)
    with pytest.raises(ValueError, match=r"target per position; class_subset needs one per sample"):
        class_subset(task, 3, 1)


@pytest.mark.parametrize(
    ("variant", "message"),
    [
        (lambda task: class_subset(task, 1, 0), r"num_kept is 1; task digits allows 2 to 10"),
        (lambda task: input_noise(task, -1.0, 0), r"deviation is -1.0; it must be at least 0"),
        (lambda task: label_noise(task, 1.5, 0), r"share is 1.5; it lies between 0 and 1"),
        (lambda task: training_subset(task, 5000, 0), r"size is 5000; task digits has 1197 training samples"),
        (lambda task: training_subset(task, 15, 0), r"has 15 training samples for 10 classes; at least 20"),
    ],
)
def test_bad_variants_say_what_is_allowed(variant: Callable[[Task], Task], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        variant(load_task("digits"))
