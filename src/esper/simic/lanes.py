"""The slots of every member of an episode, as the run folder keeps them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from esper.lifecycle.actions import Blueprint, Head, Op
from esper.lifecycle.stages import Stage
from esper.population.population import Population
from esper.runs.lanes import COLUMNS, NO_BLUEPRINT, UNMEASURED, HostPart, Lanes
from esper.simic.episode_record import EpisodeRecord

# What the numbers in lanes mean.
NAMES: dict[str, Any] = {
    "stage_names": {int(s): s.name for s in Stage},
    "op_names": {int(op): op.name for op in Op},
    "blueprint_names": {int(b): b.name for b in Blueprint},
}
_SHOWN = 24  # layers of a part that are named; a deep segment says how many more it has


def lanes_of(record: EpisodeRecord, parts: Sequence[HostPart], round: int, title: str = "") -> Lanes:
    """The whole episode of every member, in few bytes, with the names of its numbers.

    parts: what the network is drawn from, one behind each slot and the rest, as from `host_parts`.
    """
    columns: dict[str, NDArray[Any]] = {
        "members": record.members,
        "returns": record.returns,
        "stage": record.stage,
        "alpha": (255 * record.alpha).round(),
        "blueprint": np.where(record.blueprint < 0, NO_BLUEPRINT, record.blueprint),
        "contribution": _hundredths(record.contribution[:-1]),
        "op": record.choices[:, :, Head.OP],
        "op_slot": record.choices[:, :, Head.SLOT],
        "succeeded": record.succeeded,
        "rolled_back": record.panicked,
        "accuracy": record.accuracy,
        "parameters": record.parameters,
        "spent": record.spent,
        "seed_parameters": record.seed_parameters,
    }
    return Lanes(
        round=round,
        slots=record.slot_ids,
        parts=parts,
        columns={name: column.astype(COLUMNS[name][0]) for name, column in columns.items()},
        title=title,
        **NAMES,
    )


def host_parts(population: Population) -> list[HostPart]:
    """Describe the segments of a population's host and its head."""
    bodies, host = population.bodies, population.bodies.host
    shapes = [*(host.joint_shapes or [()] * host.num_slots), ()]
    names = [*(f"segment {i + 1}" for i in range(host.num_slots)), "head"]
    modules = [*host.segments, host.head]
    units = [0 if slot.branch is None else slot.branch.units for slot in bodies.slots]
    return [
        HostPart(name, layers_of(module), sum(p.numel() for p in module.parameters()), tuple(shape), hidden)
        for name, module, shape, hidden in zip(names, modules, shapes, [*units, 0], strict=True)
    ]


def layers_of(module: nn.Module) -> list[str]:
    """The layers of a module, a short line each; of a deep one the first and how many more."""
    leaves = [str(leaf).splitlines()[0] for leaf in module.modules() if not list(leaf.children())]
    rest = len(leaves) - _SHOWN
    return leaves[:_SHOWN] + ([f"and {rest} more"] if rest > 0 else [])


def _hundredths(points: NDArray[np.float32]) -> NDArray[np.float32]:
    clipped = np.clip(100 * points, UNMEASURED + 1, -UNMEASURED - 1).round()
    return np.asarray(np.where(np.isfinite(points), clipped, UNMEASURED))
