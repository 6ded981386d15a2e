"""The factored action: eight heads of growth, their choices, which heads each op reads, and the rate."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from esper.utils.devices import lookup


class Head(IntEnum):
    """The eight heads, in the order of the columns of an action."""

    SLOT = 0
    BLUEPRINT = 1
    STYLE = 2
    TEMPO = 3
    ALPHA_TARGET = 4
    ALPHA_SPEED = 5
    ALPHA_CURVE = 6
    OP = 7


class Blueprint(IntEnum):
    """The architecture of a seed. NOOP keeps the numbering and is never selectable."""

    NOOP = 0
    CONV_LIGHT = 1
    ATTENTION = 2
    NORM = 3
    DEPTHWISE = 4
    BOTTLENECK = 5
    CONV_SMALL = 6
    CONV_HEAVY = 7
    LORA = 8
    LORA_LARGE = 9
    MLP_SMALL = 10
    MLP = 11
    FLEX_ATTENTION = 12
    CLONE = 13  # the block ahead of the joint, repeated
    WIDEN_HALF = 14  # half as many hidden units again in the block ahead
    WIDEN_FULL = 15  # as many hidden units again


class Blend(IntEnum):
    """How a seed's output s joins the host's activation h at strength a."""

    ADD = 0  # h + a·s
    MULTIPLY = 1  # h·(1 + a·tanh(s))
    GATE = 2  # h + a·g(h)·s


class AlphaCurve(IntEnum):
    """The easing of an alpha ramp."""

    LINEAR = 0
    COSINE = 1
    SIGMOID_GENTLE = 2
    SIGMOID = 3
    SIGMOID_SHARP = 4


class Style(IntEnum):
    """A way to blend and the curve of the first ramp, in one choice."""

    LINEAR_ADD = 0
    LINEAR_MULTIPLY = 1
    SIGMOID_ADD = 2
    GATED_GATE = 3


class Tempo(IntEnum):
    """The length of the first ramp of alpha: see `TEMPO_TICKS`."""

    FAST = 0
    STANDARD = 1
    SLOW = 2


class AlphaTarget(IntEnum):
    """The strength that a ramp leads to: see `TARGET_ALPHA`."""

    HALF = 0
    SEVENTY = 1
    FULL = 2


class AlphaSpeed(IntEnum):
    """The length of any later ramp: see `SPEED_TICKS`."""

    INSTANT = 0
    FAST = 1
    MEDIUM = 2
    SLOW = 3


class Op(IntEnum):
    """What is done to a slot in one decision; which heads each op reads is in `HEADS_READ`."""

    WAIT = 0
    GERMINATE = 1
    SET_ALPHA_TARGET = 2
    PRUNE = 3
    FOSSILIZE = 4
    ADVANCE = 5


class Rate(IntEnum):
    """What is done to the learning rate in one decision, whatever the op is: see `esper.lifecycle.rates`."""

    KEEP = 0
    DOUBLE = 1
    HALVE = 2
    DECAY = 3  # fall linearly to 0 from now on


NUM_HEADS = len(Head)
RATE_HEAD = NUM_HEADS  # the column of the rate behind those of growth, where a policy sets it
NUM_OPS = len(Op)
NUM_BLUEPRINTS = len(Blueprint)

# The choices of each head; the slot head has as many as there are slots.
HEAD_CHOICES: dict[Head, type[IntEnum]] = {
    Head.BLUEPRINT: Blueprint,
    Head.STYLE: Style,
    Head.TEMPO: Tempo,
    Head.ALPHA_TARGET: AlphaTarget,
    Head.ALPHA_SPEED: AlphaSpeed,
    Head.ALPHA_CURVE: AlphaCurve,
    Head.OP: Op,
}

HEADS_READ: dict[Op, frozenset[Head]] = {
    Op.WAIT: frozenset(),
    Op.GERMINATE: frozenset({Head.SLOT, Head.BLUEPRINT, Head.STYLE, Head.TEMPO, Head.ALPHA_TARGET}),
    Op.SET_ALPHA_TARGET: frozenset(
        {Head.SLOT, Head.STYLE, Head.ALPHA_TARGET, Head.ALPHA_SPEED, Head.ALPHA_CURVE}
    ),
    Op.PRUNE: frozenset({Head.SLOT, Head.ALPHA_SPEED, Head.ALPHA_CURVE}),
    Op.FOSSILIZE: frozenset({Head.SLOT}),
    Op.ADVANCE: frozenset({Head.SLOT}),
}

# What each choice stands for, in the order of the choices.
TEMPO_TICKS = dict(zip(Tempo, (3, 5, 8), strict=True))
TARGET_ALPHA = dict(zip(AlphaTarget, (0.5, 0.7, 1.0), strict=True))
SPEED_TICKS = dict(zip(AlphaSpeed, (0, 3, 5, 8), strict=True))
STYLE_BLEND = dict(zip(Style, (Blend.ADD, Blend.MULTIPLY, Blend.ADD, Blend.GATE), strict=True))
_CURVES = (AlphaCurve.LINEAR, AlphaCurve.LINEAR, AlphaCurve.SIGMOID, AlphaCurve.SIGMOID)
STYLE_CURVE = dict(zip(Style, _CURVES, strict=True))

# Blueprints that fit each kind of host. An mlp host is a stack of width-D vectors with no order among
# its features, so it takes the feature-wise blueprints and none that convolve or attend along an axis.
TOPOLOGY_BLUEPRINTS: dict[str, frozenset[Blueprint]] = {
    "cnn": frozenset(Blueprint(i) for i in range(1, 8)),
    "transformer": frozenset(Blueprint(i) for i in (2, 3, 8, 9, 10, 11, 12)),
    "mlp": frozenset(Blueprint(i) for i in (3, 8, 9, 10, 11)),
}


# Blueprints that grow the block ahead of a joint; they fit any topology whose hosts have residual blocks.
# They need no training alone: a clone is trained already, and new units are written out with weights of 0.
GROWTH_BLUEPRINTS = frozenset({Blueprint.CLONE, Blueprint.WIDEN_HALF, Blueprint.WIDEN_FULL})
FIRST_GROWTH = min(GROWTH_BLUEPRINTS)  # every blueprint from here on grows the block ahead


def selectable_blueprints(topology: str) -> frozenset[Blueprint]:
    """Return the blueprints that may be germinated in a host of this topology."""
    if topology not in TOPOLOGY_BLUEPRINTS:
        raise ValueError(f"topology is {topology!r}; allowed are {', '.join(TOPOLOGY_BLUEPRINTS)}")
    return TOPOLOGY_BLUEPRINTS[topology]


def head_sizes(num_slots: int) -> tuple[int, ...]:
    """Return the number of choices of each head, in head order."""
    return tuple(num_slots if head is Head.SLOT else len(HEAD_CHOICES[head]) for head in Head)


# Functions over tensors of choices, of any shape.
tempo_ticks = lookup(list(TEMPO_TICKS.values()))  # the length of the first ramp
blend_of = lookup([int(STYLE_BLEND[style]) for style in Style])  # how seeds join the host's activation
has_gate = lookup([STYLE_BLEND[style] is Blend.GATE for style in Style])  # whether it has one of its own
# Which heads each op reads; the op head always.  # op [...] int64 → [..., heads] bool
relevance = lookup([[head in HEADS_READ[op] | {Head.OP} for head in Head] for op in Op])


@dataclass(frozen=True)
class Actions:
    """One factored action per member: a column per head, and a choice of `Rate` where the rate may change."""

    choices: Tensor  # [N, heads] int64
    rate: Tensor | None = None  # [N] int64; None keeps it

    def __post_init__(self) -> None:
        if self.choices.ndim != 2 or self.choices.shape[1] != NUM_HEADS:
            raise ValueError(f"actions are {tuple(self.choices.shape)}; give [members, {NUM_HEADS}]")
        if self.choices.dtype != torch.long:
            raise ValueError(f"actions are of {self.choices.dtype}; expected torch.int64, indices of choices")
        if self.rate is not None and (
            self.rate.shape != self.choices.shape[:1] or self.rate.dtype != torch.long
        ):
            raise ValueError(
                f"the rates of actions are {self.rate.dtype} {tuple(self.rate.shape)}; expected torch.int64 "
                f"({len(self.choices)},), the index of a choice for each member"
            )

    def __getitem__(self, head: Head) -> Tensor:
        """Return the choice of one head for every member.  # [N]"""
        return self.choices[:, head]

    def __len__(self) -> int:
        return self.choices.shape[0]

    def columns(self) -> Tensor:
        """Return all choices side by side, the rate last; KEEP where none was given.  # [N, heads + 1]"""
        rate = torch.zeros_like(self.choices[:, 0]) if self.rate is None else self.rate
        return torch.cat((self.choices, rate.unsqueeze(1)), dim=1)

    @staticmethod
    def of_columns(columns: Tensor) -> Actions:
        """Split choices with or without a column for the rate.  # [N, heads] or [N, heads + 1]"""
        has_rate = columns.shape[1] > NUM_HEADS
        return Actions(columns[:, :NUM_HEADS], columns[:, RATE_HEAD] if has_rate else None)

    @staticmethod
    def wait(num_members: int, device: torch.device | str = "cpu") -> Actions:
        """Return WAIT for every member, with every head at its canonical choice 0."""
        return Actions(torch.zeros(num_members, NUM_HEADS, dtype=torch.long, device=device))
