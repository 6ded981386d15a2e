"""Sizes of tiles."""

from __future__ import annotations

import triton


def power(n: int, least: int = 1) -> int:
    """The next power of two, at least `least`: the sizes that a tile may have."""
    return max(int(triton.next_power_of_2(n)), least)
