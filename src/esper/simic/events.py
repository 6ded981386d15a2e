"""What happened in an episode, as events with the numbers behind each.

An event's numbers are those that were known when the decision was made: the seed's `contribution`,
`shadow_gain` (points), `health`, `age` and `parameters`, the member's `loss` and `accuracy`. What was never
measured is left out. Slots that cool down after a prune do so by the clock alone and make no events.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from esper.lifecycle.actions import Blueprint, Head, Style, has_gate
from esper.lifecycle.gates import Gate
from esper.lifecycle.stages import SEED_STAGES, Stage
from esper.runs.schema import Event, EventKind
from esper.simic.episode_record import Bools, EpisodeRecord, Ints

_SEED = np.isin(np.arange(max(Stage) + 1), [int(s) for s in SEED_STAGES])
_GATED = has_gate(torch.arange(len(Style))).numpy()


@dataclass(frozen=True)
class _Found:
    """Where one kind of event happened, and what to say about each place."""

    kind: EventKind
    where: Bools  # [T, N, S]
    stage_from: Ints  # [T, N, S]
    stage_to: Ints  # [T, N, S]
    seeds_before: bool = False  # speak of the seed that was there before the action, not after it


def episode_events(record: EpisodeRecord, round: int) -> list[Event]:
    """Every event of an episode, in the order of steps, then members."""
    seen, applied = record.seen_stage[:-1], record.stage
    fossilised = (applied == Stage.FOSSILIZED) & (seen != Stage.FOSSILIZED)
    advanced = (applied != seen) & _SEED[applied] & ~record.germinated & ~fossilised
    cut = np.full_like(applied, Stage.PRUNED)
    # A seed that ends with its ramp does so in the tick: its stage is that after the action.
    last_stage = np.where(_SEED[applied], applied, seen)
    found = [
        _Found("germinated", record.germinated, seen, applied),
        _Found("stage_changed", advanced, seen, applied),
        _Found("fossilised", fossilised, seen, applied),
        _Found("pruned", record.pruned, last_stage, cut, seeds_before=True),
        _Found("pruned", record.rolled_back, record.ticked_stage, cut),
    ]
    events = [event for f in found for event in _slot_events(record, round, f)]
    events += _refusals(record, round) + _rollbacks(record, round)
    return sorted(events, key=lambda event: (event.step, event.member))


def _slot_events(record: EpisodeRecord, round: int, found: _Found) -> list[Event]:
    blueprints = record.seen_blueprint[:-1] if found.seeds_before else record.blueprint
    sizes = _seed_sizes(record, found.seeds_before)
    return [
        Event(
            round=round,
            step=t,
            member=int(record.members[n]),
            kind=found.kind,
            slot=record.slot_ids[s],
            blueprint=Blueprint(int(blueprints[t, n, s])).name,
            stage_from=Stage(int(found.stage_from[t, n, s])).name,
            stage_to=Stage(int(found.stage_to[t, n, s])).name,
            numbers=_numbers(record, t, n, s) | {"parameters": float(sizes[t, n, s])},
        )
        for t, n, s in np.argwhere(found.where).tolist()
    ]


def _seed_sizes(record: EpisodeRecord, before: bool) -> Ints:
    """Parameters of the seed in each slot, its gate included.  # [T, N, S]"""
    blueprint = record.seen_blueprint[:-1] if before else record.blueprint
    style = record.seen_style[:-1] if before else record.style
    slots = np.arange(len(record.slot_ids))
    bodies = record.seed_parameters[slots, np.maximum(blueprint, 0)]
    return np.asarray(bodies + _GATED[style] * record.gate_parameters, dtype=np.int64)


def _refusals(record: EpisodeRecord, round: int) -> list[Event]:
    """Actions that a gate refused."""
    events = []
    for t, n in np.argwhere(record.refused_by != int(Gate.NONE)).tolist():
        s = int(record.choices[t, n, Head.SLOT])
        blueprint = int(record.seen_blueprint[t, n, s])
        events.append(
            Event(
                round=round,
                step=t,
                member=int(record.members[n]),
                kind="gate_refused",
                slot=record.slot_ids[s],
                blueprint=Blueprint(blueprint).name if blueprint >= 0 else None,
                stage_from=Stage(int(record.seen_stage[t, n, s])).name,
                gate=Gate(int(record.refused_by[t, n])).name,
                numbers=_numbers(record, t, n, s),
            )
        )
    return events


def _rollbacks(record: EpisodeRecord, round: int) -> list[Event]:
    """Members that the governor took back; each seed that this ended has an event of its own."""
    return [
        Event(
            round=round,
            step=t,
            member=int(record.members[n]),
            kind="rolled_back",
            numbers=_finite(
                loss=record.measured_loss[t, n],
                training_loss=record.training_loss[t, n],
                loss_before=record.loss[t, n],
                restored_loss=record.loss[t + 1, n],
                seeds_ended=record.rolled_back[t, n].sum(),
                reward=record.reward[t, n],
            ),
        )
        for t, n in np.argwhere(record.panicked).tolist()
    ]


def _numbers(record: EpisodeRecord, t: int, n: int, s: int) -> dict[str, float]:
    return _finite(
        contribution=record.contribution[t, n, s],
        shadow_gain=record.shadow_gain[t, n, s],
        health=record.health[t, n, s],
        age=record.seen_age[t, n, s],
        loss=record.loss[t, n],
        accuracy=record.accuracy[t, n],
    )


def _finite(**numbers: float) -> dict[str, float]:
    return {name: float(value) for name, value in numbers.items() if np.isfinite(value)}
