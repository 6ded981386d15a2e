"""Sizes of tiles, in plain arithmetic: a step asks hundreds of times, and Triton's own functions are slow."""

from __future__ import annotations


def power(n: int, least: int = 1) -> int:
    """The next power of two, at least `least`: the sizes that a tile may have."""
    return max(1 << (n - 1).bit_length(), least)


def cdiv(n: int, size: int) -> int:
    """How many tiles of a size cover n."""
    return -(-n // size)
