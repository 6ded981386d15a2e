"""Random streams: numbers that are functions of (run seed, member id, purpose, counter).

A counter-based generator written as tensor arithmetic, so that a member draws the same numbers on any
device, in any shard and beside any neighbours.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum

import numpy as np
import torch
from torch import Tensor

SEED_MASK = 0x7FFFFFFF  # makes a hash a seed for torch: 31 bits, never negative


class Stream(IntEnum):
    """What a number is drawn for; streams of one member never overlap."""

    HOST_INIT = 1
    SEED_INIT = 2
    DATA_ORDER = 3
    ACTION = 4
    CONTROL = 5
    RATE = 6


def _signed(value: int) -> int:
    """Return the 64-bit pattern of `value` as the signed integer that torch stores."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >= 1 << 63 else value


# The constants of splitmix64 (Steele, Lea and Flood 2014): the golden ratio and two multipliers.
_GOLDEN = _signed(0x9E3779B97F4A7C15)
_MIX_1 = _signed(0xBF58476D1CE4E5B9)
_MIX_2 = _signed(0x94D049BB133111EB)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Shift signed 64-bit integers right, logically."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    """Apply the finalizer of splitmix64: every output bit depends on every input bit."""
    x = (x ^ _shift(x, 30)) * _MIX_1
    x = (x ^ _shift(x, 27)) * _MIX_2
    return x ^ _shift(x, 31)


def _mix_number(value: int) -> int:
    """Apply the same finalizer to a Python integer.

    Seed and stream pass through it before a member's id is added: a sum of plain multiples would make
    member 1 of seed 0 the twin of member 0 of seed 1.
    """
    word = (value + 1) * 0x9E3779B97F4A7C15 & (1 << 64) - 1
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & (1 << 64) - 1
    word = (word ^ word >> 27) * 0x94D049BB133111EB & (1 << 64) - 1
    return word ^ word >> 31


def stream_keys(seed: int, members: Tensor, stream: Stream, counter: int | Tensor) -> Tensor:
    """Derive the key of each member's numbers.  # members [N] int64; counter a number, [] or [N] → [N]"""
    # key = mix(mix(member · golden + hash(seed, stream)) + counter · m1): each level is mixed before the
    # next is added, so that no two of seed, stream, member and counter can cancel.
    start = _signed(_mix_number(_mix_number(seed) + int(stream)))
    offset = counter * _MIX_1 if isinstance(counter, Tensor) else _signed(counter * _MIX_1)
    return _mix(_mix(members * _GOLDEN + start) + offset)


def random_bits(seed: int, members: Tensor, stream: Stream, counter: int | Tensor, count: int) -> Tensor:
    """Draw `count` independent 64-bit words for each member.  # as `stream_keys` → [N, count] int64"""
    steps = torch.arange(1, count + 1, device=members.device, dtype=torch.long)
    return _mix(stream_keys(seed, members, stream, counter).unsqueeze(-1) + steps * _GOLDEN)


def random_uniform(seed: int, members: Tensor, stream: Stream, counter: int | Tensor, count: int) -> Tensor:
    """Draw uniform numbers in [0, 1), 24 bits each.  # [N, count] float32"""
    # A float32 holds 24 bits exactly: the upper ones, over 2^24.
    return _shift(random_bits(seed, members, stream, counter, count), 40).float() * 2.0**-24


def random_order(seed: int, members: Tensor, stream: Stream, counter: int | Tensor, count: int) -> Tensor:
    """Draw a permutation of range(count) for each member.  # [N, count] int64"""
    # Sorting distinct 64-bit words gives every permutation alike; equal words are too rare to matter.
    return random_bits(seed, members, stream, counter, count).argsort(dim=-1)


@contextmanager
def seeded_globals(seed: int) -> Iterator[None]:
    """Seed NumPy's and Python's global generators, for code that draws from them; restore them afterwards."""
    numpy_state, python_state = np.random.get_state(), random.getstate()  # noqa: NPY002
    np.random.seed(seed % 2**32)  # noqa: NPY002 - it takes no larger seed
    random.seed(seed)
    try:
        yield
    finally:
        np.random.set_state(numpy_state)  # noqa: NPY002
        random.setstate(python_state)
