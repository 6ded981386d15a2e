"""One palette for every picture, in the terminal, in PNGs and in the report.

The hues are those of Okabe and Ito, which stay apart under the common kinds of colour blindness.
Stages and ops are looked up by name, so that telemetry needs no knowledge of the rules of growth.
"""

from __future__ import annotations

INK = "#1f2933"
MUTED = "#7b8794"
GRID = "#e4e7eb"
PAPER = "#ffffff"

# Of each stage: its colour, the letter that stands for it where there is no colour, and what it means.
_STAGES = {
    "UNKNOWN": ("#ffffff", "?", ""),
    "DORMANT": ("#e9ecef", "·", "the slot is empty"),
    "GERMINATED": ("#f0e442", "g", "a seed exists, and rests"),
    "TRAINING": ("#e69f00", "t", "it learns alone; the host does not hear it"),
    "BLENDING": ("#56b4e9", "b", "the host hears it at strength alpha"),
    "HOLDING": ("#0072b2", "h", "fully heard, on probation"),
    "FOSSILIZED": ("#009e73", "F", "part of the network for good"),
    "PRUNED": ("#d55e00", "x", "removed"),
    "EMBARGOED": ("#c3a3b5", "e", "the slot must rest"),
    "RESETTING": ("#6e5c69", "r", "the slot is being cleared"),
}
STAGE_COLOURS = {stage: colour for stage, (colour, _, _) in _STAGES.items()}
STAGE_COLOURS_DARK = STAGE_COLOURS | {"DORMANT": "#2b3643"}  # on a dark page, where pale grey shines
STAGE_LETTERS = {stage: letter for stage, (_, letter, _) in _STAGES.items()}
STAGE_MEANINGS = {stage: meaning for stage, (_, _, meaning) in _STAGES.items() if meaning}

# Of each op: its colour, its terminal glyph and its matplotlib marker on a time line, and what it does. WAIT
# leaves no mark.
_OPS = {
    "WAIT": ("#cbd2d9", " ", "", ""),
    "GERMINATE": ("#b8a800", "G", "v", "plant a seed"),
    "ADVANCE": ("#0072b2", "A", ">", "on to the next stage"),
    "SET_ALPHA_TARGET": ("#56b4e9", "α", "d", "change how much is heard"),
    "FOSSILIZE": ("#009e73", "F", "*", "keep for good"),
    "PRUNE": ("#d55e00", "P", "X", "take out"),
}
OP_COLOURS = {op: colour for op, (colour, _, _, _) in _OPS.items()}
OP_GLYPHS = {op: (glyph, marker) for op, (_, glyph, marker, _) in _OPS.items()}
OP_MEANINGS = {op: meaning for op, (_, _, _, meaning) in _OPS.items() if meaning}

# Anything else that needs telling apart (controllers, heads, blueprints): eight hues, then again dashed.
SERIES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#6b4ea0", "#7b8794")


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


def cell_colour(stage: str, alpha: float) -> str:
    """The colour of one slot at one moment: the hue is the stage; in BLENDING the shade is alpha."""
    colour = STAGE_COLOURS[stage]
    return mix(colour, PAPER, 0.25 + 0.75 * min(max(alpha, 0.0), 1.0)) if stage == "BLENDING" else colour
