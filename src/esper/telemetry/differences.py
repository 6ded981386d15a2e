"""Paired differences between controllers, with 95 % intervals."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from esper.foundation.errors import UserError
from esper.foundation.statistics import mean_interval
from esper.telemetry.schema import ControllerResult, PairedDifference

COMPARED = ("test_accuracy", "parameters", "potential", "flops")


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
