"""The sizes of network that a sweep tries: a task's own host, with which growth begins, and larger ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from esper.tasks.task import HostSpec, Task

Options = Mapping[str, int]


def _sizes(name: str, *pairs: tuple[int, int]) -> tuple[Options, ...]:
    """Hidden units (or their share of the width) and depth, from the least cost to the greatest."""
    return tuple({name: units, "depth": depth} for units, depth in pairs)


LADDERS: dict[str, tuple[Options, ...]] = {  # over 16 times in cost, by the preset of the host
    "resmlp": _sizes("hidden", (8, 2), (16, 2), (32, 2), (32, 4), (64, 4), (64, 8)),
    "resnet": _sizes("hidden", (4, 1), (8, 1), (16, 1), (16, 2), (16, 4), (16, 6)),
    "gpt": _sizes("expansion", (2, 1), (4, 1), (4, 2), (4, 4), (4, 8), (4, 14)),
}
SIZES = min(len(sizes) for sizes in LADDERS.values())


def with_size(task: Task, size: int) -> Task:
    """The same task with a host of its ladder; size 0 is the host that growth begins with."""
    host = task.host
    return replace(task, host=HostSpec(host.preset, {**host.options, **LADDERS[host.preset][size]}))
