"""Features written one by one: the slow reference of `batch_obs_to_features`.

For each slot, for each member, a report from a dictionary, and one write into the feature tensor for each
value; the benchmarks measure the batched function against it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from esper.lifecycle.slot_states import SlotConfig
from esper.lifecycle.stages import SEED_STAGES, Stage
from esper.tamiyo.policy.features import (
    BASE_COLUMNS,
    BASE_FEATURE_SIZE,
    COLUMNS,
    SLOT_COLUMNS,
    SLOT_FEATURE_SIZE,
    Observation,
)

STAGE_ORDER = [int(s) for s in Stage]
SEEDS = frozenset(int(s) for s in SEED_STAGES)
MODE_SIGN = (0.0, 1.0, -1.0)
TEMPO_TICKS = (3, 5, 8)
SHARED = (3, 4, 6, 7)


@dataclass(frozen=True)
class SlotReport:
    """One slot of one member: its state and its evidence, NaN where unmeasured."""

    state: dict[str, float]
    evidence: dict[str, float]


@dataclass(frozen=True)
class MemberReport:
    """One member: its base values and a report by slot id."""

    base: dict[str, float]
    histories: dict[str, list[float]]
    slots: dict[str, SlotReport]


def clip(value: float, low: float, high: float, unknown: float) -> float:
    return unknown if math.isnan(value) else min(max(value, low), high)


def symlog(value: float) -> float:
    return math.copysign(math.log1p(abs(value)), value)


def points(value: float) -> float:
    return clip(symlog(value) / math.log1p(100), -1, 1, -2)


def share(value: float) -> float:
    return clip(value, 0, 1, -1)


def clock(value: float) -> float:
    return clip(math.log1p(value) / math.log1p(150), 0, 1, -1)


def write_base(features: Tensor, row: int, member: MemberReport, at: dict[str, int]) -> None:
    base = member.base
    features[row, at["progress"]] = share(base["progress"])
    features[row, at["step_cost"]] = share(math.log(base["step_cost"]) / 4)
    features[row, at["steps_left"]] = share(math.log1p(base["steps_left"]) / math.log1p(1000))
    features[row, at["val_loss"]] = clip(symlog(base["val_loss"]) / 7, -1, 1, -2)
    features[row, at["val_accuracy"]] = share(base["val_accuracy"])
    features[row, at["parameter_ratio"]] = share(math.log(base["parameter_ratio"]) / 4)
    features[row, at["last_succeeded"]] = float(base["last_succeeded"])
    for i in range(5):
        loss, accuracy = member.histories["loss_history"][i], member.histories["accuracy_history"][i]
        features[row, at["loss_history"] + i] = clip(symlog(loss) / 7, -1, 1, -2)
        features[row, at["accuracy_history"] + i] = share(accuracy)
    enabled = [s.state["stage"] for s in member.slots.values() if s.state["enabled"]]
    for i, stage in enumerate(SHARED):
        features[row, at["stage_shares"] + i] = enabled.count(stage) / len(enabled)
    if base["last_op"] >= 0:
        features[row, at["last_op"] + int(base["last_op"])] = 1.0


def slot_features(report: SlotReport, at: dict[str, int]) -> Iterator[tuple[int, float]]:
    """Where in a slot's block, and what: every value of one report."""
    state, evidence = report.state, report.evidence
    occupied = int(state["stage"]) in SEEDS
    left = state["alpha_steps_total"] - state["alpha_steps_done"] if state["alpha_mode"] else 0
    yield at["occupied"], 1.0 if occupied else 0.0
    yield at["stage"] + STAGE_ORDER.index(int(state["stage"])), 1.0
    yield at["alpha"], share(state["alpha"])
    yield at["alpha_mode"], MODE_SIGN[int(state["alpha_mode"])]
    yield at["alpha_steps_total"], min(state["alpha_steps_total"] / 8, 1)
    yield at["alpha_steps_done"], min(state["alpha_steps_done"] / 8, 1)
    yield at["time_to_target"], min(left / 8, 1)
    velocity = (state["alpha_target"] - state["alpha"]) / left if left else 0.0
    yield at["alpha_velocity"], clip(velocity, -1, 1, -2)
    yield at["epochs_in_stage"], clock(state["epochs_in_stage"])
    yield at["room"], min(math.log1p(state["room"]) / math.log1p(8), 1)
    yield at["tempo"], TEMPO_TICKS[int(state["tempo"])] / 8 if occupied else -1.0
    yield at["alpha_target"], share(state["alpha_target"]) if occupied else -1.0
    yield at["age"], clock(state["age"]) if occupied else -1.0
    if occupied:
        yield at["algorithm"] + int(state["style"]), 1.0
    for name in ("contribution", "contribution_velocity", "interaction", "shadow_gain"):
        yield at[name], points(evidence[name])
    for name in ("gradient_health", "vanishing", "exploding", "previous_health"):
        yield at[name], share(evidence[name])
    yield at["gradient_norm"], share(math.log1p(evidence["gradient_norm"]) / 7)
    yield at["contribution_freshness"], share(0.995 ** evidence["contribution_age"])


def column_slice(name: str) -> slice:
    """Where a column lies inside its block."""
    (block,) = (columns for columns in (BASE_COLUMNS, SLOT_COLUMNS) if name in {c.name for c in columns})
    at = [c.name for c in block].index(name)
    start = sum(c.width for c in block[:at])
    return slice(start, start + block[at].width)


def features_one_by_one(batch: list[MemberReport], slot_config: SlotConfig) -> Tensor:
    """The whole batch, as the review quotes it."""
    at = {c.name: column_slice(c.name).start for c in COLUMNS}
    features = torch.zeros(len(batch), BASE_FEATURE_SIZE + SLOT_FEATURE_SIZE * slot_config.num_slots)
    for env_idx, member in enumerate(batch):
        write_base(features, env_idx, member, at)
    for slot_idx, slot_id in enumerate(slot_config.slot_ids):
        start = BASE_FEATURE_SIZE + slot_idx * SLOT_FEATURE_SIZE
        for env_idx, member in enumerate(batch):
            for column, value in slot_features(member.slots[slot_id], at):
                features[env_idx, start + column] = value
    return features


def to_reports(observation: Observation, slot_config: SlotConfig) -> list[MemberReport]:
    """The same observation as per-member Python objects."""
    singles = (
        "progress", "step_cost", "steps_left", "val_loss", "val_accuracy", "parameter_ratio",
        "last_succeeded", "last_op",
    )  # fmt: skip
    base = {name: getattr(observation, name).tolist() for name in singles}
    histories = {name: getattr(observation, name).tolist() for name in ("loss_history", "accuracy_history")}
    states = {name: value.tolist() for name, value in observation.slots.tensors().items()}
    evidence = {name: value.tolist() for name, value in observation.evidence.tensors().items()}
    return [
        MemberReport(
            base={name: values[n] for name, values in base.items()},
            histories={name: values[n] for name, values in histories.items()},
            slots={
                slot_id: SlotReport(
                    {name: values[n][s] for name, values in states.items()},
                    {name: values[n][s] for name, values in evidence.items()},
                )
                for s, slot_id in enumerate(slot_config.slot_ids)
            },
        )
        for n in range(observation.num_members)
    ]
