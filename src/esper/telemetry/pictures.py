"""Pictures of a run: each a function from plain records or arrays to a matplotlib figure.

Figures are made without pyplot, so that nothing process-wide is touched and no window opens.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator, PercentFormatter

from esper.telemetry.files import write_atomically
from esper.telemetry.palette import (
    GRID,
    INK,
    MUTED,
    OP_COLOURS,
    OP_GLYPHS,
    OP_MEANINGS,
    PAPER,
    STAGE_COLOURS,
    STAGE_MEANINGS,
    cell_colour,
    stage_name,
)
from esper.telemetry.schema import Film, FilmReel

WIDTH = 10.0  # inches
DPI = 150
_COUNTED = ("round", "decision step")  # axes that have no fractions
_LANE = 0.34  # inches of height for a slot's lane
_GAP = 0.16  # share of a lane left free


def figure(height: float, width: float = WIDTH) -> Figure:
    """An empty figure of that many inches."""
    return Figure(figsize=(width, height), dpi=DPI, facecolor=PAPER, layout="constrained")


def style_axes(axes: Axes, title: str = "", x: str = "", y: str = "") -> Axes:
    """The common look: quiet frame, light grid, readable labels."""
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(MUTED)
    axes.grid(True, color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=INK, labelsize=9)
    axes.set_title(title, loc="left", fontsize=11, color=INK, fontweight="bold")
    axes.set_xlabel(x, fontsize=9.5, color=INK)
    axes.set_ylabel(y, fontsize=9.5, color=INK)
    if x in _COUNTED:
        axes.xaxis.set_major_locator(MaxNLocator(nbins="auto", integer=True))
    return axes


def png_bytes(picture: Figure) -> bytes:
    """The figure as a PNG file."""
    buffer = io.BytesIO()
    picture.savefig(buffer, format="png")
    return buffer.getvalue()


def save_png(picture: Figure, path: Path) -> None:
    """Write the figure as a PNG file, whole or not at all."""
    write_atomically(path, png_bytes(picture))


def film_strips(reel: FilmReel, heading: str = "The life of every slot") -> Figure:
    """One band per member: accuracy, and below it a lane per slot, coloured by stage, shaded by alpha."""
    lanes = [len(film.slots) for film in reel.films]
    heights = [size for lane in lanes for size in (0.62, lane * _LANE + 0.12)]
    picture = figure(sum(heights) + 0.34 * len(lanes) + 1.75)
    rows = picture.subplots(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    for i, film in enumerate(reel.films):
        _accuracy(rows[2 * i], film)
        _lanes(rows[2 * i + 1], film, reel)
    rows[-1].set_xlabel("decision step", fontsize=9.5, color=INK)
    picture.suptitle(heading, x=0.01, ha="left", fontsize=13, color=INK, fontweight="bold")
    _legends(picture)
    shades = ListedColormap([cell_colour("BLENDING", alpha / 100) for alpha in range(101)])
    bar = picture.colorbar(ScalarMappable(cmap=shades), ax=list(rows), fraction=0.012, pad=0.01, aspect=25)
    bar.set_label("alpha while blending", fontsize=8, color=INK)
    bar.set_ticks([0, 0.5, 1])
    bar.ax.tick_params(labelsize=8, colors=INK)
    return picture


def _accuracy(axes: Axes, film: Film) -> None:
    style_axes(axes, f"member {film.member}")
    axes.text(
        1.0, 1.08, film.title, transform=axes.transAxes, fontsize=9, color=MUTED, ha="right", style="italic"
    )
    axes.plot(range(film.steps), film.accuracy or [np.nan] * film.steps, color=INK, linewidth=1.4)
    axes.set_xlim(-0.5, film.steps - 0.5)
    axes.tick_params(labelbottom=False, length=0)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=3))
    axes.yaxis.set_major_formatter(percent())
    axes.set_ylabel("accuracy", fontsize=8, color=MUTED)
    axes.spines["bottom"].set_visible(False)


def _lanes(axes: Axes, film: Film, reel: FilmReel) -> None:
    style_axes(axes)
    axes.grid(False)
    for slot in range(len(film.slots)):
        for first, last, stage, alpha in _runs(film, reel, slot):
            height = 0.06 if stage == "DORMANT" else 1 - _GAP
            axes.add_patch(
                Rectangle(
                    (first - 0.5, slot - height / 2),
                    last - first,
                    height,
                    facecolor=cell_colour(stage, alpha),
                    edgecolor="none",
                )
            )
        _alpha_line(axes, film, reel, slot)
        _seed_names(axes, film, reel, slot)
    _op_marks(axes, film, reel)
    axes.set_xlim(-0.5, film.steps - 0.5)
    axes.set_ylim(len(film.slots) - 0.5, -0.62)
    axes.set_yticks(range(len(film.slots)), film.slots)
    axes.xaxis.set_major_locator(MaxNLocator(nbins="auto", integer=True))
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)


def _runs(film: Film, reel: FilmReel, slot: int) -> Iterator[tuple[int, int, str, float]]:
    """(first, step after the last, stage, alpha) of the pieces of a lane that look alike."""

    def look(step: int) -> tuple[str, float]:
        stage = reel.stage_names[film.stage[step][slot]]
        return stage, film.alpha[step][slot] if stage == "BLENDING" else 1.0

    for (stage, alpha), steps in groupby(range(film.steps), look):
        first, *rest = steps
        yield first, first + len(rest) + 1, stage, alpha


def _alpha_line(axes: Axes, film: Film, reel: FilmReel, slot: int) -> None:
    """Alpha itself, drawn over the shade: 0 at the bottom of the lane and 1 at its top."""
    half = (1 - _GAP) / 2
    blending = np.array([reel.stage_names[row[slot]] == "BLENDING" for row in film.stage])
    alpha = np.array([row[slot] for row in film.alpha])
    height = np.where(blending, slot + half - 2 * half * alpha, np.nan)
    axes.plot(
        range(film.steps), height, color=STAGE_COLOURS["HOLDING"], linewidth=1.5, solid_capstyle="round"
    )


def _seed_names(axes: Axes, film: Film, reel: FilmReel, slot: int) -> None:
    for step in range(film.steps):
        begins = step == 0 or film.blueprint[step - 1][slot] < 0
        if film.blueprint[step][slot] >= 0 and begins:
            name = reel.blueprint_names[film.blueprint[step][slot]].lower().replace("_", " ")
            axes.text(step + 0.75, slot + 0.04, name, fontsize=7.5, color=INK, va="center", clip_on=True)


def _op_marks(axes: Axes, film: Film, reel: FilmReel) -> None:
    """A mark on the slot that was acted on; what failed is a hollow red one."""
    for step in range(film.steps):
        name = reel.op_names[film.op[step]]
        marker = OP_GLYPHS[name][1]
        if marker:
            done = film.succeeded[step]
            axes.plot(
                step,
                film.op_slot[step] - 0.42,
                marker=marker,
                markersize=8 if name == "FOSSILIZE" else 6,
                markerfacecolor=OP_COLOURS[name] if done else PAPER,
                markeredgecolor=PAPER if done else "#c4001a",
                markeredgewidth=0.7 if done else 1.4,
                clip_on=False,
                zorder=5,
            )


def _legends(picture: Figure) -> None:
    stages: list[Any] = [
        Patch(facecolor=cell_colour(stage, 0.6), label=f"{stage_name(stage)}: {meaning}")
        for stage, meaning in STAGE_MEANINGS.items()
    ]
    ops: list[Any] = [
        Line2D(
            [], [], linestyle="", marker=OP_GLYPHS[op][1], markersize=7, color=OP_COLOURS[op], label=meaning
        )
        for op, meaning in OP_MEANINGS.items()
    ]
    refused = Line2D(
        [], [], linestyle="", marker=">", markersize=7, markerfacecolor=PAPER, label="refused by a gate"
    )
    refused.set_markeredgecolor("#c4001a")
    picture.legend(
        handles=[*stages, *ops, refused],
        loc="outside lower left",
        ncols=3,
        frameon=False,
        fontsize=8,
        labelcolor=INK,
        handlelength=1.4,
    )


def percent() -> PercentFormatter:
    """Ticks of a fraction as percentages, with the digits that they need."""
    return PercentFormatter(xmax=1.0, decimals=None)
