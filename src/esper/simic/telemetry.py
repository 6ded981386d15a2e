"""What a run folder keeps of a round: its events, its summary, and the trajectories of all members.

An event's numbers are those that were known when the decision was made: the seed's `contribution`,
`shadow_gain` (points), `health`, `age` and `parameters`, the member's `loss` and `accuracy`. What was never
measured is left out. Slots that cool down after a prune do so by the clock alone and make no events.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from esper.lifecycle.actions import Blueprint, Head, Op, Style, has_gate
from esper.lifecycle.legality import Gate
from esper.lifecycle.stages import SEED_STAGES, Stage
from esper.population.population import Population
from esper.runs.schema import Event, EventKind, RoundSummary
from esper.runs.trajectories import COLUMNS, NO_BLUEPRINT, UNMEASURED, HostPart, Trajectories
from esper.simic.agent.ppo import UpdateMetrics
from esper.simic.rollout import Bools, Doubles, EpisodeRecord, Ints
from esper.utils.statistics import mean_interval

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
) -> list[Event]:
    """Return one event for each place where True, each array [T, N, S].

    before: speak of the seed that was there before the action, not after it.
    """
    blueprints = record.seen_blueprint[:-1] if before else record.blueprint
    sizes = _seed_sizes(record, before)
    return [
        Event(
            round=round,
            step=t,
            member=int(record.members[n]),
            kind=kind,
            slot=record.slot_ids[s],
            blueprint=Blueprint(int(blueprints[t, n, s])).name,
            stage_from=Stage(int(stage_from[t, n, s])).name,
            stage_to=Stage(int(stage_to[t, n, s])).name,
            numbers=_numbers(record, t, n, s) | {"parameters": float(sizes[t, n, s])},
        )
        for t, n, s in np.argwhere(where).tolist()
    ]


def _seed_sizes(record: EpisodeRecord, before: bool) -> Ints:
    """Return parameters of the seed in each slot, its gate included.  # [T, N, S]"""
    blueprint = record.seen_blueprint[:-1] if before else record.blueprint
    style = record.seen_style[:-1] if before else record.style
    slots = np.arange(len(record.slot_ids))
    bodies = record.seed_parameters[slots, np.maximum(blueprint, 0)]
    return np.asarray(bodies + _GATED[style] * record.gate_parameters, dtype=np.int64)


def _refusals(record: EpisodeRecord, round: int) -> list[Event]:
    """Return actions that a gate refused."""
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
    """Return members that the governor took back; each seed that this ended has an event of its own."""
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


def summarize_round(
    record: EpisodeRecord, update: UpdateMetrics, control: EpisodeRecord | None, **progress: Any
) -> RoundSummary:
    """Summarize one learner's round; `record` and `control` are of its own members.

    progress: how far the run is and the learning rate, by the names of `RoundSummary`.
    """
    returns, return_ci = mean_interval(record.returns.tolist())
    accuracy, accuracy_ci = mean_interval(record.accuracy[-1].tolist())
    ratio, ratio_ci = mean_interval(record.parameter_ratio[-1].tolist())
    by_step = op_shares(record)  # [T, ops]
    return RoundSummary(
        **progress,
        members=record.num_members,
        return_mean=returns,
        return_ci=return_ci,
        accuracy_mean=accuracy,
        accuracy_ci=accuracy_ci,
        parameter_ratio_mean=ratio,
        parameter_ratio_ci=ratio_ci,
        op_shares={op.name: float(share) for op, share in zip(Op, by_step.mean(axis=0), strict=True)},
        op_shares_by_step=by_step.tolist(),
        head_entropy=dict(update.head_entropy),
        policy_loss=update.policy_loss,
        value_loss=update.value_loss,
        entropy=update.entropy,
        kl=update.kl,
        clip_fraction=update.clip_fraction,
        explained_variance=update.explained_variance,
        gradient_norm=update.grad_norm,
        extra=_extra(record, update) | _compare_with_control(record, control),
        anomalies=_anomalies(record, update),
    )


def op_shares(record: EpisodeRecord) -> Doubles:
    """Return the share of members whose executed op was each, step by step.  # [T, ops]"""
    shares: Doubles = (record.executed_op[:, :, None] == np.arange(len(Op))).mean(axis=1)
    return shares


def _extra(record: EpisodeRecord, update: UpdateMetrics) -> dict[str, float]:
    return {
        "potential": float(np.nanmean(record.potential[-1])),
        "succeeded": float(record.succeeded.mean()),
        "germinated": float(record.germinated.sum() / record.num_members),
        "pruned": float(record.pruned.sum() / record.num_members),
        "rollbacks": float(record.panicked.sum() / record.num_members),
        "flops": float(record.flops.mean()),
        "epochs_done": update.epochs_done,
        "entropy_coefficient": update.entropy_coefficient,
    } | planted(record)


def planted(record: EpisodeRecord) -> dict[str, float]:
    """Return seeds per member as `planted/NAME`; a blueprint that nobody planted is left out."""
    counts = np.bincount(record.blueprint[record.germinated], minlength=len(Blueprint)) / record.num_members
    return {f"planted/{b.name}": float(counts[b]) for b in Blueprint if counts[b] > 0}


def _compare_with_control(record: EpisodeRecord, control: EpisodeRecord | None) -> dict[str, float]:
    """Return the gain over the ungrown control runs, where there are any."""
    if control is None:
        return {}
    mean, half = mean_interval((record.returns - control.returns).tolist())
    return {"above_twin": mean, "above_twin_ci": half}


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
    "stage_names": {int(s): s.name for s in Stage},
    "op_names": {int(op): op.name for op in Op},
    "blueprint_names": {int(b): b.name for b in Blueprint},
}
_SHOWN = 24  # layers of a part that are named; a deep segment says how many more it has


def build_trajectories(
    record: EpisodeRecord, parts: Sequence[HostPart], round: int, title: str = ""
) -> Trajectories:
    """Build the trajectories of an episode: all members in few bytes, with the names of the numbers.

    parts: what the network is drawn from, one behind each slot and the rest, as from `describe_host`.
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


def _hundredths(points: NDArray[np.float32]) -> NDArray[np.float32]:
    clipped = np.clip(100 * points, UNMEASURED + 1, -UNMEASURED - 1).round()
    return np.asarray(np.where(np.isfinite(points), clipped, UNMEASURED))
