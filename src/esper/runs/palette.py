"""One palette for every picture, in PNGs, in the report and on the live page.

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

# Of each op: its colour, the letter that marks it on a time line, and what it does. WAIT leaves no mark.
_OPS = {
    "WAIT": ("#cbd2d9", " ", ""),
    "GERMINATE": ("#b8a800", "G", "plant a seed"),
    "ADVANCE": ("#0072b2", "A", "on to the next stage"),
    "SET_ALPHA_TARGET": ("#56b4e9", "α", "change how much is heard"),
    "FOSSILIZE": ("#009e73", "F", "keep for good"),
    "PRUNE": ("#d55e00", "P", "take out"),
}
OP_COLOURS = {op: colour for op, (colour, _, _) in _OPS.items()}
OP_GLYPHS = {op: glyph for op, (_, glyph, _) in _OPS.items()}
OP_MEANINGS = {op: meaning for op, (_, _, meaning) in _OPS.items() if meaning}

# Anything else that needs telling apart (controllers, heads, blueprints): eight hues, then again dashed.
SERIES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#6b4ea0", "#7b8794")


def stage_name(stage: str) -> str:
    """A stage as people read it."""
    return stage.lower().replace("fossilized", "fossilised")
