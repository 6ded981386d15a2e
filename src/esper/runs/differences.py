"""Paired differences between controllers, with 95 % intervals."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from esper.runs.schema import ControllerResult, PairedDifference
from esper.utils.errors import UserError
from esper.utils.statistics import mean_interval, t_quantile

COMPARED = ("test_accuracy", "parameters", "potential", "flops")
FINAL_OF = "static-final of "  # the name of an arm: the network that a controller ended with, from the start


def against_growers(controllers: Sequence[ControllerResult]) -> list[PairedDifference]:
    """Every network that was trained from the start against the controller that grew it, where both are."""
    by_name = {result.name: result for result in controllers}
    pairs = [
        (by_name.get(r.name.removeprefix(FINAL_OF)), r) for r in controllers if r.name.startswith(FINAL_OF)
    ]
    return [
        gap for grower, final in pairs if grower is not None for gap in paired_differences([grower, final])
    ]


def clear_among(difference: PairedDifference, comparisons: int) -> bool:
    """Whether 0 lies outside the interval even if it is one of several that are to hold all at once."""
    degrees = difference.members - 1
    wider = difference.ci * t_quantile(degrees, comparisons) / t_quantile(degrees)
    return abs(difference.mean) > wider


def paired_differences(controllers: Sequence[ControllerResult]) -> list[PairedDifference]:
    """Every controller against the first one, member by member, in every quantity that both have."""
    if not controllers:
        return []
    baseline = controllers[0]
    differences = []
    for other in controllers[1:]:
        if list(other.members) != list(baseline.members):
            raise UserError(
                f"{other.name} and {baseline.name} ran different members, so no differences can be paired; "
                "compare controllers on the same member ids"
            )
        for quantity in COMPARED:
            if not (getattr(other, quantity) and getattr(baseline, quantity)):
                continue
            gaps = np.subtract(getattr(other, quantity), getattr(baseline, quantity))
            mean, half = mean_interval(gaps.tolist())
            differences.append(
                PairedDifference(other.name, baseline.name, quantity, mean, half, len(baseline.members))
            )
    return differences
