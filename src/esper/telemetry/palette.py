"""One palette for every picture, in the terminal, in PNGs and in the report.

The hues are those of Okabe and Ito, which stay apart under the common kinds of colour blindness.
Stages and ops are looked up by name, so that telemetry needs no knowledge of the rules of growth.
"""

from __future__ import annotations

INK = "#1f2933"
MUTED = "#7b8794"
GRID = "#e4e7eb"
PAPER = "#ffffff"

STAGE_COLOURS: dict[str, str] = {
    "UNKNOWN": "#ffffff",
    "DORMANT": "#e9ecef",
    "GERMINATED": "#f0e442",
    "TRAINING": "#e69f00",
    "BLENDING": "#56b4e9",
    "HOLDING": "#0072b2",
    "FOSSILIZED": "#009e73",
    "PRUNED": "#d55e00",
    "EMBARGOED": "#c3a3b5",
    "RESETTING": "#dccbd5",
}

# How a stage reads where there is no colour.
STAGE_LETTERS: dict[str, str] = {
    "UNKNOWN": "?",
    "DORMANT": "·",
    "GERMINATED": "g",
    "TRAINING": "t",
    "BLENDING": "b",
    "HOLDING": "h",
    "FOSSILIZED": "F",
    "PRUNED": "x",
    "EMBARGOED": "e",
    "RESETTING": "r",
}

STAGE_MEANINGS: dict[str, str] = {
    "DORMANT": "the slot is empty",
    "GERMINATED": "a seed exists, and rests",
    "TRAINING": "it learns alone; the host does not hear it",
    "BLENDING": "the host hears it at strength alpha",
    "HOLDING": "fully heard, on probation",
    "FOSSILIZED": "part of the network for good",
    "PRUNED": "removed",
    "EMBARGOED": "the slot must rest",
    "RESETTING": "the slot is being cleared",
}

OP_COLOURS: dict[str, str] = {
    "WAIT": "#cbd2d9",
    "GERMINATE": "#b8a800",
    "SET_ALPHA_TARGET": "#56b4e9",
    "PRUNE": "#d55e00",
    "FOSSILIZE": "#009e73",
    "ADVANCE": "#0072b2",
}

# (terminal glyph, matplotlib marker) of each op on a time line; WAIT leaves no mark.
OP_GLYPHS: dict[str, tuple[str, str]] = {
    "WAIT": (" ", ""),
    "GERMINATE": ("G", "v"),
    "SET_ALPHA_TARGET": ("α", "d"),
    "PRUNE": ("P", "X"),
    "FOSSILIZE": ("F", "*"),
    "ADVANCE": ("A", ">"),
}

OP_MEANINGS: dict[str, str] = {
    "GERMINATE": "plant a seed",
    "ADVANCE": "on to the next stage",
    "SET_ALPHA_TARGET": "change how much is heard",
    "FOSSILIZE": "keep for good",
    "PRUNE": "take out",
}

# Anything else that needs telling apart (controllers, heads, blueprints): eight hues, then again dashed.
SERIES: tuple[str, ...] = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#e69f00",
    "#56b4e9",
    "#6b4ea0",
    "#7b8794",
)


def stage_name(stage: str) -> str:
    """A stage as people read it."""
    return stage.lower().replace("fossilized", "fossilised")


def rgb(colour: str) -> tuple[int, int, int]:
    """'#rrggbb' as three integers."""
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


def mix(colour: str, other: str, share: float) -> str:
    """`share` of the first colour and the rest of the other."""
    parts = (round(share * a + (1 - share) * b) for a, b in zip(rgb(colour), rgb(other), strict=True))
    return "#{:02x}{:02x}{:02x}".format(*parts)


def cell_colour(stage: str, alpha: float, background: str = PAPER) -> str:
    """The colour of one slot at one moment: the hue is the stage; in BLENDING the shade is alpha."""
    colour = STAGE_COLOURS[stage]
    return mix(colour, background, 0.25 + 0.75 * min(max(alpha, 0.0), 1.0)) if stage == "BLENDING" else colour
