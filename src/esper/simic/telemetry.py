"""What a run folder keeps of a round: its events, its summary, and the trajectories of all members.

An event's numbers are those that were known when the decision was made: the seed's `contribution`,
`shadow_gain` (points), `health`, `age` and `parameters`, the member's `loss`, `accuracy` and, times that of
the recipe, `rate` and `rate_before`. What was never measured is left out. Slots that cool down after a prune
do so by the clock alone and make no events.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from esper.lifecycle.actions import FIRST_GROWTH, Blueprint, Head, Op, Rate, Style, has_gate
from esper.lifecycle.legality import Gate
from esper.lifecycle.stages import SEED_STAGES, Stage
from esper.population.population import Population
from esper.runs.schema import Event, EventKind, RoundSummary
from esper.runs.trajectories import COLUMNS, NO_BLUEPRINT, UNMEASURED, HostPart, Trajectories
from esper.simic.agent.ppo import UpdateMetrics
from esper.simic.rollout import Bools, EpisodeRecord, Ints
from esper.utils.statistics import mean_interval

_LEARNED = ("policy_loss", "value_loss", "entropy", "kl", "clip_fraction", "explained_variance")
_SEED = np.isin(np.arange(max(Stage) + 1), [int(s) for s in SEED_STAGES])
_GATED = has_gate(torch.arange(len(Style))).numpy()


def episode_events(record: EpisodeRecord, round: int) -> list[Event]:
    """Return every event of an episode, in the order of steps, then members."""
    seen, applied = record.seen_stage[:-1], record.stage
    fossilised = (applied == Stage.FOSSILIZED) & (seen != Stage.FOSSILIZED)
    advanced = (applied != seen) & _SEED[applied] & ~record.germinated & ~fossilised
    cut = np.full_like(applied, Stage.PRUNED)
    # A seed that ends with its ramp does so in the tick: its stage is that after the action.
    last_stage = np.where(_SEED[applied], applied, seen)
    events = [
        *_slot_events(record, round, "germinated", record.germinated, seen, applied),
        *_slot_events(record, round, "stage_changed", advanced, seen, applied),
        *_slot_events(record, round, "fossilised", fossilised, seen, applied),
        *_slot_events(record, round, "pruned", record.pruned, last_stage, cut, before=True),
        *_slot_events(record, round, "pruned", record.rolled_back, record.ticked_stage, cut),
        *_refusals(record, round),
        *_rollbacks(record, round),
        *_rate_changes(record, round),
    ]
    return sorted(events, key=lambda event: (event.step, event.member))


def _slot_events(
    record: EpisodeRecord,
    round: int,
    kind: EventKind,
    where: Bools,
    stage_from: Ints,
    stage_to: Ints,
    before: bool = False,
) -> Iterator[Event]:
    """Yield one event for each place where True [T, N, S]; before: of the seed before the action."""
    blueprints = record.seen_blueprint[:-1] if before else record.blueprint
    styles = record.seen_style[:-1] if before else record.style
    bodies = record.seed_parameters[np.arange(len(record.slot_ids)), np.maximum(blueprints, 0)]
    sizes = bodies + (_GATED[styles] & (blueprints < FIRST_GROWTH)) * record.gate_parameters  # with gates
    event = partial(_event, record, round, kind)
    for t, n, s in np.argwhere(where).tolist():
        yield event(
            (t, n),
            slot=record.slot_ids[s],
            blueprint=Blueprint(int(blueprints[t, n, s])).name,
            stage_from=Stage(int(stage_from[t, n, s])).name,
            stage_to=Stage(int(stage_to[t, n, s])).name,
            numbers=_numbers(record, t, n, s) | {"parameters": float(sizes[t, n, s])},
        )


def _refusals(record: EpisodeRecord, round: int) -> Iterator[Event]:
    """Yield actions that a gate refused."""
    event = partial(_event, record, round, "gate_refused")
    for t, n in np.argwhere(record.refused_by != int(Gate.NONE)).tolist():
        s = int(record.choices[t, n, Head.SLOT])
        blueprint = int(record.seen_blueprint[t, n, s])
        yield event(
            (t, n),
            slot=record.slot_ids[s],
            blueprint=Blueprint(blueprint).name if blueprint >= 0 else None,
            stage_from=Stage(int(record.seen_stage[t, n, s])).name,
            gate=Gate(int(record.refused_by[t, n])).name,
            numbers=_numbers(record, t, n, s),
        )


def _rollbacks(record: EpisodeRecord, round: int) -> Iterator[Event]:
    """Yield members that the governor took back; each seed that this ended has an event of its own."""
    event = partial(_event, record, round, "rolled_back")
    for t, n in np.argwhere(record.panicked).tolist():
        numbers = _finite(
            loss=record.measured_loss[t, n],
            training_loss=record.training_loss[t, n],
            loss_before=record.loss[t, n],
            restored_loss=record.loss[t + 1, n],
            seeds_ended=record.rolled_back[t, n].sum(),
            reward=record.reward[t, n],
        )
        yield event((t, n), numbers=numbers)


def _rate_changes(record: EpisodeRecord, round: int) -> Iterator[Event]:
    """Yield what was done to learning rates, where controllers set them."""
    if record.rates is None:
        return
    done, scale = rate_choices(record), record.rates[..., 1]
    event = partial(_event, record, round, "rate_changed")
    for t, n in np.argwhere(done != Rate.KEEP).tolist():
        numbers = {"rate": float(scale[t + 1, n]), "rate_before": float(scale[t, n])}
        numbers |= _finite(loss=record.loss[t, n], accuracy=record.accuracy[t, n])
        yield event((t, n), rate=Rate(int(done[t, n])).name, numbers=numbers)


def rate_choices(record: EpisodeRecord) -> Ints:
    """Return the `Rate` that each step carried out; KEEP where the governor took the step back.  # [T, N]"""
    assert record.rates is not None
    changed = record.rates[1:] != record.rates[:-1]
    raised = record.rates[1:, :, 1] > record.rates[:-1, :, 1]
    cases = [changed[..., 2], raised, changed[..., 1]]
    found = np.select(cases, [Rate.DECAY, Rate.DOUBLE, Rate.HALVE], Rate.KEEP)
    return np.where(record.panicked, int(Rate.KEEP), found)


def _event(record: EpisodeRecord, round: int, kind: EventKind, at: tuple[int, int], **more: Any) -> Event:
    return Event(round, at[0], int(record.members[at[1]]), kind, **more)


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


def summarize_round(
    record: EpisodeRecord, update: UpdateMetrics, control: EpisodeRecord | None, **progress: Any
) -> RoundSummary:
    """Summarize one learner's round; `record` and `control` are of its own members.

    progress: how far the run is and the learning rate, by the names of `RoundSummary`.
    """
    active = record.active[:, :, None]  # finished members decide nothing
    done = (record.executed_op[:, :, None] == np.arange(len(Op))) & active  # [T, N, ops]
    by_step = done.sum(axis=1) / np.maximum(active.sum(axis=1), 1)  # shares of the members that decided
    # Seeds per member; a blueprint that nobody planted is left out.
    seeds = np.bincount(record.blueprint[record.germinated], minlength=len(Blueprint)) / record.num_members
    extra = {f"planted/{b.name}": float(seeds[b]) for b in Blueprint if seeds[b] > 0}
    if control is not None:  # the same networks without growth
        above = mean_interval((record.returns - control.returns).tolist())
        extra["above_twin"], extra["above_twin_ci"] = above
    ends = (record.returns, record.accuracy[-1], record.parameter_ratio[-1])
    for name, values in zip(("return", "accuracy", "parameter_ratio"), ends, strict=True):
        progress[f"{name}_mean"], progress[f"{name}_ci"] = mean_interval(values.tolist())
    return RoundSummary(
        **progress,
        members=record.num_members,
        op_shares={op.name: float(done[..., op].sum() / active.sum()) for op in Op},
        op_shares_by_step=by_step.tolist(),
        head_entropy=dict(update.head_entropy),
        **{name: getattr(update, name) for name in _LEARNED},
        gradient_norm=update.grad_norm,
        extra={
            "potential": float(np.nanmean(record.potential[-1])),
            "succeeded": float(record.succeeded[record.active].mean()),
            "germinated": float(record.germinated.sum() / record.num_members),
            "pruned": float(record.pruned.sum() / record.num_members),
            "rollbacks": float(record.panicked.sum() / record.num_members),
            "flops": float(record.flops.mean()),
            "epochs_done": update.epochs_done,
            "entropy_coefficient": update.entropy_coefficient,
            **extra,
        },
        anomalies=_anomalies(record, update),
    )


def _anomalies(record: EpisodeRecord, update: UpdateMetrics) -> list[str]:
    """Return one sentence for each thing that should not happen."""
    found = []
    rollbacks = int(record.panicked.sum())
    if rollbacks:
        who = int(record.panicked.any(axis=0).sum())
        found.append(f"the governor rolled {who} of {record.num_members} members back, {rollbacks} times")
    if update.steps_dropped:
        found.append(f"{update.steps_dropped} transitions had a return that was not finite and were dropped")
    if update.steps_vetoed:
        found.append(f"{update.steps_vetoed} updates had a gradient that was not finite and were refused")
    return found


# What the numbers in trajectories mean.
NAMES: dict[str, Any] = {
    f"{kind.__name__.lower()}_names": {int(member): member.name for member in kind}
    for kind in (Stage, Op, Blueprint, Rate)
}
# Columns of trajectories that are kept as the record has them.
_KEPT = ("members", "returns", "stage", "succeeded", "accuracy", "parameters", "spent", "seed_parameters")
_RANGE = (UNMEASURED + 1, -UNMEASURED - 1)  # of contributions, in hundredths of a point
_SHOWN = 24  # layers of a part that are named; a deep segment says how many more it has


def build_trajectories(
    record: EpisodeRecord, parts: Sequence[HostPart], round: int, title: str = ""
) -> Trajectories:
    """Build the trajectories of an episode: all members in few bytes, with the names of the numbers.

    parts: what the network is drawn from, one behind each slot and the rest, as from `describe_host`.
    """
    points = 100 * record.contribution[:-1]
    columns: dict[str, NDArray[Any]] = {
        **{name: getattr(record, name) for name in _KEPT},
        "alpha": (255 * record.alpha).round(),
        "blueprint": np.where(record.blueprint < 0, NO_BLUEPRINT, record.blueprint),
        "contribution": np.where(np.isfinite(points), np.clip(points, *_RANGE).round(), UNMEASURED),
        "op": record.choices[:, :, Head.OP],
        "op_slot": record.choices[:, :, Head.SLOT],
        "rolled_back": record.panicked,
    }
    if record.rates is not None:
        columns |= {"rate": record.rates[..., 0], "rate_choice": rate_choices(record)}
    return Trajectories(
        round=round,
        slots=record.slot_ids,
        parts=parts,
        columns={name: column.astype(COLUMNS[name][0]) for name, column in columns.items()},
        title=title,
        **NAMES,
    )


def describe_host(population: Population) -> list[HostPart]:
    """Describe the segments of a population's host and its head."""
    network, host = population.network, population.network.host
    shapes = [*(host.slot_shapes or [()] * host.num_slots), ()]
    names = [*(f"segment {i + 1}" for i in range(host.num_slots)), "head"]
    modules = [*host.segments, host.head]
    units = [0 if slot.branch is None else slot.branch.units for slot in network.slots]
    return [
        HostPart(
            name, describe_layers(module), sum(p.numel() for p in module.parameters()), tuple(shape), hidden
        )
        for name, module, shape, hidden in zip(names, modules, shapes, [*units, 0], strict=True)
    ]


def describe_layers(module: nn.Module) -> list[str]:
    """Return the layers of a module, a short line each; of a deep one the first and how many more."""
    leaves = [str(leaf).splitlines()[0] for leaf in module.modules() if not list(leaf.children())]
    rest = len(leaves) - _SHOWN
    return leaves[:_SHOWN] + ([f"and {rest} more"] if rest > 0 else [])
