"""The film of a few members of an episode: the best, the worst, and what is typical between."""

from __future__ import annotations

from typing import Any

import numpy as np

from esper.lifecycle.actions import Blueprint, Head, Op
from esper.lifecycle.stages import Stage
from esper.simic.episode_record import EpisodeRecord
from esper.telemetry.schema import Film, FilmReel

# What the numbers in films and lanes mean.
NAMES: dict[str, Any] = {
    "stage_names": {int(s): s.name for s in Stage},
    "op_names": {int(op): op.name for op in Op},
    "blueprint_names": {int(b): b.name for b in Blueprint},
}


def film_reel(record: EpisodeRecord, count: int = 3, round: int = 0) -> FilmReel:
    """Films of `count` members, evenly spaced from the best return to the worst."""
    order = np.argsort(-np.nan_to_num(record.returns, nan=-np.inf), kind="stable")
    count = min(count, len(order))
    ranks = np.linspace(0, len(order) - 1, count).round().astype(int).tolist() if count > 1 else [0] * count
    return FilmReel(
        films=[film(record, int(order[rank]), _title(rank, len(order), ranks)) for rank in ranks],
        round=round,
        **NAMES,
    )


def _title(rank: int, members: int, ranks: list[int]) -> str:
    if rank == 0:
        return "best"
    if rank == members - 1:
        return "worst"
    if len(ranks) % 2 and rank == ranks[len(ranks) // 2]:
        return "typical"
    return f"rank {rank + 1} of {members}"


def film(record: EpisodeRecord, row: int, title: str) -> Film:
    """The episode of the member in one row."""
    return Film(
        member=int(record.members[row]),
        title=title,
        slots=record.slot_ids,
        stage=record.stage[:, row].tolist(),
        alpha=record.alpha[:, row].tolist(),
        blueprint=record.blueprint[:, row].tolist(),
        op=record.choices[:, row, Head.OP].tolist(),
        op_slot=record.choices[:, row, Head.SLOT].tolist(),
        succeeded=record.succeeded[:, row].tolist(),
        accuracy=record.accuracy[1:, row].tolist(),
        parameter_ratio=record.parameter_ratio[1:, row].tolist(),
    )
