"""What does not fit together in a run folder, as sentences for the person who looks at it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

from esper.foundation.errors import UserError
from esper.telemetry.differences import paired_differences
from esper.telemetry.run_folder import RunFolder
from esper.telemetry.schema import Comparison

_ALWAYS_MEASURED = ("return_mean", "accuracy_mean")
_OF_A_GROWTH = ("accuracy_mean",)  # in whose metrics a round is an epoch, and nothing is paid
_TOLERANCE = 1e-6


def complaints(folder: RunFolder) -> list[str]:
    """One sentence for each contradiction in metrics.jsonl and results.json; none in a folder that is whole.

    Damage that makes a file unreadable is no matter of this function: reading raises UserError for it.
    """
    results = folder.results()
    return [*_rounds(folder), *_numbers(folder), *(_results(results) if results is not None else ())]


def _rounds(folder: RunFolder) -> Iterator[str]:
    rounds = [line["round"] for line in folder.metrics_file]
    counts = Counter(rounds)
    missing = [number for number in range(1, max(rounds, default=0)) if number not in counts]
    doubles = [number for number, count in counts.items() if count > 1]
    if missing:
        yield f"metrics.jsonl has no line for {_named(missing)}"
    if doubles:
        yield f"metrics.jsonl has more than one line for {_named(doubles)}"
    if rounds != sorted(rounds):
        yield "the rounds in metrics.jsonl are not in order"


def _numbers(folder: RunFolder) -> Iterator[str]:
    expected = _OF_A_GROWTH if folder.from_python else _ALWAYS_MEASURED
    for line in folder.metrics_file:
        where = f"round {line['round']} in metrics.jsonl"
        for name in _not_finite(line):
            yield f"{name} of {where} is not a finite number"
        for name in expected:
            if line.get(name, 0.0) is None:
                yield f"{name} of {where} is unknown: the loss was not finite, or the line was changed"


def _not_finite(value: Any, name: str = "") -> Iterator[str]:
    """Dotted names of all numbers in a record that are NaN or infinite."""
    if isinstance(value, float) and not math.isfinite(value):
        yield name
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, below in items:
        yield from _not_finite(below, f"{name}.{key}" if name else str(key))


def _results(results: Comparison) -> Iterator[str]:
    for result in results.controllers:
        if not all(0 <= accuracy <= 1 for accuracy in result.test_accuracy):
            yield f"results.json has test accuracies of {result.name} outside 0 to 1"
        if not all(size > 0 for size in result.parameters):
            yield f"results.json has networks of {result.name} without parameters"
    try:
        expected = {(d.controller, d.quantity): d for d in paired_differences(results.controllers)}
    except UserError as error:
        yield f"results.json: {error}"
        return
    for given in results.differences:
        found = expected.get((given.controller, given.quantity))
        if found is None or not _close(given.mean, found.mean) or not _close(given.ci, found.ci):
            yield (
                f"results.json says that {given.controller} differs from {given.baseline} in "
                f"{given.quantity} by {given.mean:g} ± {given.ci:g}, and its members say otherwise"
            )


def _close(a: float, b: float) -> bool:
    return (math.isnan(a) and math.isnan(b)) or math.isclose(a, b, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)


def _named(rounds: list[int]) -> str:
    shown = ", ".join(map(str, rounds[:5])) + (", ..." if len(rounds) > 5 else "")
    return f"round {shown}" if len(rounds) == 1 else f"rounds {shown}"
