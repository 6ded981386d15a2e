"""Differences between arms: paired by member, with intervals over members and over training seeds."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from esper.foundation.statistics import mean_interval
from esper.simic.rollout import Doubles
from studies.records import Arm, Evaluation
from studies.variants import MAIN

TAMIYO = "tamiyo"
_SEED = re.compile(rf"\b{MAIN}-\d+")  # a trained controller inside the name of an arm


def title(name: str) -> str:
    """The name of an arm without its training seed: `static-final of main-3` → `static-final of tamiyo`."""
    return _SEED.sub(TAMIYO, name)


def by_title(found: Evaluation) -> dict[str, list[Arm]]:
    """The arms of each title; several where there are several training seeds."""
    series: dict[str, list[Arm]] = {}
    for arm in found.arms:
        series.setdefault(title(arm.name), []).append(arm)
    return series


@dataclass(frozen=True)
class Effect:
    """One arm minus another in some quantity."""

    mean: float
    half: float  # of the 95 % interval over members, seeds averaged
    size: float  # Cohen's d of the members' differences
    over_seeds: float  # half of the 95 % interval over training seeds; NaN for one seed


def matrix(arms: Sequence[Arm], quantity: str) -> Doubles:
    """A quantity by training seed and member.  # [K, N]"""
    return np.array([getattr(arm, quantity) for arm in arms], dtype=np.float64)


def effect(arms: Sequence[Arm], others: Sequence[Arm], quantity: str = "potential") -> Effect:
    """Arms minus others, member by member; seed by seed where both have as many of them."""
    ours, theirs = matrix(arms, quantity), matrix(others, quantity)
    if len(ours) != len(theirs):
        theirs = theirs.mean(axis=0, keepdims=True)
    gaps = ours - theirs  # [K, N]
    members = gaps.mean(axis=0)
    mean, half = mean_interval(members.tolist())
    return Effect(mean, half, cohens_d(members), mean_interval(gaps.mean(axis=1).tolist())[1])


def another_training(values: Doubles | Sequence[float]) -> float:
    """How far one more training may lie from the mean of these: half of the 95 % prediction interval."""
    return mean_interval(list(values))[1] * math.sqrt(len(values) + 1)


def cohens_d(differences: Doubles | Sequence[float]) -> float:
    """The mean of paired differences over their standard deviation."""
    values = np.asarray(differences, dtype=np.float64)
    deviation = float(values.std(ddof=1)) if values.size > 1 else 0.0
    return float(values.mean()) / deviation if deviation > 1e-9 else math.nan


# ---- the size frontier -----------------------------------------------------------------------------------


def frontier(found: Evaluation) -> list[tuple[float, float]]:
    """Parameters and mean test accuracy of static hosts, by size."""
    arms = [arm for arm in found.arms if arm.name == "static" or arm.name.startswith("static width")]
    return sorted((float(np.mean(arm.parameters)), float(np.mean(arm.test_accuracy))) for arm in arms)


def at_equal_parameters(points: Sequence[tuple[float, float]], parameters: float) -> float:
    """The accuracy of a static host of this size, between those that were trained; NaN outside of them."""
    sizes = [math.log(size) for size, _ in points]
    where = math.log(parameters)
    if len(points) < 2 or not sizes[0] - 1e-9 <= where <= sizes[-1] + 1e-9:
        return math.nan
    return float(np.interp(where, sizes, [accuracy for _, accuracy in points]))


@dataclass(frozen=True)
class Reached:
    """When an arm reached an accuracy, on the mean over its members; NaN if it never did."""

    batches: float
    flops: float


def time_to(arm: Arm, accuracy: float) -> Reached:
    for batches, now, spent in zip(arm.batches, arm.curve, arm.spent, strict=True):
        if now >= accuracy:
            return Reached(batches, spent)
    return Reached(math.nan, math.nan)
