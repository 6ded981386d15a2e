"""What the host computes of a plan of training, while a GPU waits for it.

    python -m benchmarks.plans --members 64 2048
    PYTHONPATH=OTHER/src python -m benchmarks.plans      of another checkout, `git worktree add OTHER COMMIT`

Members have three slots, a quarter of which hold a seed of one of seven kinds. `sketch` finds
what every row meets, `need` how much room that takes, `draft` lays it out in a room that holds all plans.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.population import machine_name
from esper.population.plan import SlotView, shadow_table, training_rows
from esper.population.planning import Sketch
from studies.command_line import positive

SLOTS, PLACES, KINDS, PLANS, REPEATS = 3, 3, 7, 8, 20
SEEDED, ALONE = 0.27, 1 / 3  # shares: of slots with a seed, and of seeds that train in isolation


def random_view(members: int, rng: np.random.Generator) -> SlotView:
    shape = members, SLOTS
    seeded = rng.random(shape) < SEEDED
    alone = seeded & (rng.random(shape) < ALONE)
    form = np.full((*shape, PLACES), -1)
    form[:, :, 0] = np.where(seeded, rng.integers(1, KINDS + 1, shape), -1)
    return SlotView(
        alpha=np.where(seeded & ~alone, 1.0, 0.0),
        training=alone,
        frozen=np.zeros(shape, dtype=bool),
        form=form,
        blend=rng.integers(0, 3, form.shape),
        part=np.moveaxis(np.arange(form.size).reshape(PLACES, *shape), 0, 2),
        fold=np.full(shape, -1),
        active=np.ones(members, dtype=bool),
        member=np.arange(members),
    )


def measure(members: int) -> dict[str, float]:
    """Median milliseconds of each part."""
    rng = np.random.default_rng(0)
    asked = [(view, training_rows(view)) for view in (random_view(members, rng) for _ in range(PLANS))]
    room: Any = None
    for view, rows in asked:
        need = Sketch(rows, view).need.roomier(True)
        room = need if room is None else room.joined(need)
    seconds: dict[str, list[float]] = {"sketch": [], "need": [], "draft": []}

    def timed(name: str, call: Callable[[], Any]) -> Any:
        begun = time.thread_time()
        result = call()
        seconds[name].append(time.thread_time() - begun)
        return result

    for view, rows in asked * REPEATS:
        tables = (shadow_table(rows, view.shape),)
        sketch = timed("sketch", lambda: Sketch(rows, view, tables))  # noqa: B023  it is called at once
        timed("need", lambda: sketch.need)  # noqa: B023
        timed("draft", lambda: sketch.draft(room))  # noqa: B023
    return {name: statistics.median(values) * 1e3 for name, values in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--members", type=positive, nargs="+", default=[64, 2048])
    args = parser.parse_args()
    print(machine_name("cpu"))
    for members in args.members:
        found = measure(members)
        parts = ", ".join(f"{name} {value:.3f}" for name, value in found.items())
        print(f"{members:,} members: {sum(found.values()):.2f} ms a plan ({parts})")


if __name__ == "__main__":
    main()
