"""Pictures of a run: each a function from plain records or arrays to a matplotlib figure.

Figures are made without pyplot, so that nothing process-wide is touched and no window opens.
"""

from __future__ import annotations

import io
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from esper.runs.files import write_atomically
from esper.runs.palette import (
    GRID,
    INK,
    MUTED,
    PAPER,
)

WIDTH = 10.0  # inches
DPI = 150
_COUNTED = ("round", "decision step")  # axes that have no fractions


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


def percent() -> PercentFormatter:
    """Ticks of a fraction as percentages, with the digits that they need."""
    return PercentFormatter(xmax=1.0, decimals=None)
