"""The lives that `esper lifecycle --scripted` tells, as tables.

A story is the life of one seed: what is asked for, and how many steps after the last time. A line is
spoken as soon as it is due and the masks allow it, so a story is legal whatever else happens in the member.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from esper.lifecycle.actions import AlphaCurve, AlphaSpeed, AlphaTarget, Blueprint, Head, Op, Style, Tempo


@dataclass(frozen=True)
class Line:
    """One decision about the story's seed, `after` steps from the one before."""

    after: int
    op: Op
    choices: Mapping[Head, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Story:
    """The life of one seed, and what it will prove to be worth, in points of accuracy."""

    worth: float
    lines: tuple[Line, ...]


def _plant(blueprint: Blueprint, style: Style, tempo: Tempo, target: AlphaTarget = AlphaTarget.FULL) -> Line:
    choices = {Head.BLUEPRINT: blueprint, Head.STYLE: style, Head.TEMPO: tempo, Head.ALPHA_TARGET: target}
    return Line(1, Op.GERMINATE, choices)


def _ramp(after: int, op: Op, speed: AlphaSpeed, curve: AlphaCurve = AlphaCurve.COSINE) -> Line:
    choices = {Head.ALPHA_TARGET: AlphaTarget.FULL, Head.ALPHA_SPEED: speed, Head.ALPHA_CURVE: curve}
    return Line(after, op, choices)


KEPT = Story(
    5.0,
    (
        _plant(Blueprint.CONV_LIGHT, Style.SIGMOID_ADD, Tempo.STANDARD),
        Line(1, Op.ADVANCE),
        Line(10, Op.ADVANCE),
        Line(5, Op.ADVANCE),
        Line(4, Op.FOSSILIZE),
    ),
)
TRIED_AT_HALF = Story(
    4.0,
    (
        _plant(Blueprint.DEPTHWISE, Style.GATED_GATE, Tempo.FAST, AlphaTarget.HALF),
        Line(2, Op.ADVANCE),
        Line(10, Op.ADVANCE),
        _ramp(7, Op.SET_ALPHA_TARGET, AlphaSpeed.MEDIUM),
        Line(5, Op.ADVANCE),
        Line(4, Op.FOSSILIZE),
    ),
)
TAKEN_OUT = Story(
    -3.0,
    (
        _plant(Blueprint.ATTENTION, Style.LINEAR_MULTIPLY, Tempo.FAST),
        Line(1, Op.ADVANCE),
        Line(10, Op.ADVANCE),
        Line(3, Op.ADVANCE),
        Line(3, Op.FOSSILIZE),  # its contribution is negative: refused
        _ramp(2, Op.PRUNE, AlphaSpeed.SLOW),
    ),
)
GIVEN_UP = Story(
    0.0,
    (
        _plant(Blueprint.NORM, Style.LINEAR_ADD, Tempo.STANDARD),
        Line(1, Op.ADVANCE),
        _ramp(5, Op.PRUNE, AlphaSpeed.INSTANT),
    ),
)
HURRIED = Story(
    6.0,
    (
        _plant(Blueprint.BOTTLENECK, Style.SIGMOID_ADD, Tempo.SLOW),
        Line(1, Op.ADVANCE),
        Line(5, Op.ADVANCE),  # ten epochs are asked for: refused
        Line(5, Op.ADVANCE),
        Line(8, Op.ADVANCE),
        Line(3, Op.FOSSILIZE),
    ),
)

# What each member tries, one seed after another, with a title for the picture.
CAST: tuple[tuple[str, tuple[Story, ...]], ...] = (
    ("every seed proves its worth, the second at half strength first", (KEPT, TRIED_AT_HALF)),
    ("a harmful seed is faded out while a good one grows beside it", (TAKEN_OUT, KEPT, GIVEN_UP)),
    ("one is hurried and refused, one is given up, one is kept", (HURRIED, GIVEN_UP, TRIED_AT_HALF)),
    ("half strength first, then a harmful seed beside a good one", (TRIED_AT_HALF, TAKEN_OUT, HURRIED)),
)
