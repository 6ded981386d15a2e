"""Numbers as people read them: few digits, units, no exponents."""

from __future__ import annotations

import math
from collections.abc import Sequence

_FLOP_UNITS = ((1e15, "PFLOPs"), (1e12, "TFLOPs"), (1e9, "GFLOPs"), (1e6, "MFLOPs"))


def number(value: float, form: str) -> str:
    """The value in that format, or a dash where it is not finite."""
    return format(value, form) if math.isfinite(value) else "–"


def interval(mean: float, half: float, form: str) -> str:
    """'0.13 ± 0.02', or the mean alone where there is no interval."""
    if not math.isfinite(half):
        return number(mean, form)
    return f"{number(mean, form)} ± {number(half, form.lstrip('+'))}"


def three_digits(*values: float) -> str:
    """The format that shows the largest of the values with three digits or so, and no exponent."""
    size = max((abs(value) for value in values if math.isfinite(value)), default=0.0)
    return ",.0f" if size >= 100 else ",.1f" if size >= 10 else ".2f" if size >= 1 else ".3f"


def flop_unit(flops: Sequence[float]) -> tuple[float, str]:
    """How many FLOPs the unit has in which the largest value is read best, and its name."""
    size = max((value for value in flops if math.isfinite(value)), default=0.0)
    return next(((scale, name) for scale, name in _FLOP_UNITS if size >= scale), (1e6, "MFLOPs"))


def duration(seconds: float) -> str:
    """Hours, minutes and seconds as 1:02:03 or 2:03."""
    if not math.isfinite(seconds):
        return "–"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def plain_number(value: float) -> str:
    """A number on an axis: 0.002, 1,500, 3 M; never 1e+08."""
    if abs(value) >= 1e6:
        return f"{value / 1e6:,g} M"
    return f"{value:,g}" if abs(value) >= 1e-4 or value == 0 else f"{value:.8f}".rstrip("0")
