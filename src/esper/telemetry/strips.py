"""Film strips in the terminal: a lane per slot, a column per step, the stage as colour, alpha as shade."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from rich.console import Console, ConsoleOptions, RenderResult
from rich.style import Style
from rich.text import Text

from esper.telemetry.palette import (
    INK,
    MUTED,
    OP_COLOURS,
    OP_GLYPHS,
    OP_MEANINGS,
    STAGE_COLOURS,
    STAGE_LETTERS,
    STAGE_MEANINGS,
    cell_colour,
    mix,
    stage_name,
)
from esper.telemetry.schema import Film, FilmReel

_BLOCKS = "▁▂▃▄▅▆▇█"
_LABEL = 6  # columns for the slot ids
_WIDEST_CELL = 3
_TICKS_EVERY = 10
_REFUSED = Style(color="#ffffff", bgcolor="#c4001a", bold=True)
_FAINT = Style(color=MUTED)


@dataclass(frozen=True)
class FilmStrip:
    """A film as lanes of cells. Where the terminal is too narrow the time line is wrapped."""

    film: Film
    reel: FilmReel

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        room = max(options.max_width - _LABEL - 1, 10)
        cell = max(1, min(_WIDEST_CELL, room // max(self.film.steps, 1)))
        per_row = room // cell
        coloured = console.color_system is not None
        yield self._caption()
        for start in range(0, self.film.steps, per_row):
            span = range(start, min(start + per_row, self.film.steps))
            yield self._marks(span, cell)
            for slot in range(len(self.film.slots)):
                yield self._lane(slot, span, cell, coloured)
            yield _time_line(span, cell)

    def _caption(self) -> Text:
        text = Text(f"member {self.film.member}", "bold", no_wrap=True, overflow="ellipsis")
        if self.film.accuracy:
            text.append(f"   {self.film.accuracy[0]:.0%} → {self.film.accuracy[-1]:.0%}", "not bold")
        return text.append(f"   {self.film.title}", Style(color=MUTED, bold=False))

    def _marks(self, span: range, cell: int) -> Text:
        """What was decided at each step; what failed is small and red."""
        line = Text("does".ljust(_LABEL), _FAINT, no_wrap=True)
        for step in span:
            name = self.reel.op_names[self.film.op[step]]
            glyph = OP_GLYPHS[name][0].ljust(cell)
            if self.film.succeeded[step]:
                line.append(glyph, Style(color=OP_COLOURS[name], bold=True))
            else:
                line.append(glyph.lower(), _REFUSED)
        return line

    def _lane(self, slot: int, span: range, cell: int, coloured: bool) -> Text:
        line = Text(self.film.slots[slot].ljust(_LABEL), no_wrap=True)
        names = self._names(slot, cell) if coloured else {}
        for step in span:
            stage = self.reel.stage_names[self.film.stage[step][slot]]
            alpha = self.film.alpha[step][slot]
            if coloured:
                _colour_cell(line, stage, alpha, cell, names.get(step, ""))
            else:
                line.append(_plain_cell(stage, alpha) * cell)
        return line

    def _names(self, slot: int, cell: int) -> dict[int, str]:
        """The blueprint's name, written into the cells of a seed that is not yet heard: step → letters."""
        letters: dict[int, str] = {}
        for first, last, blueprint in _quiet_runs(self.film, self.reel, slot):
            name = self.reel.blueprint_names[blueprint].lower().replace("_", " ")
            name = f" {name}"[: (last - first) * cell].ljust((last - first) * cell)
            for step in range(first, last):
                letters[step] = name[(step - first) * cell : (step - first + 1) * cell]
        return letters


def _quiet_runs(film: Film, reel: FilmReel, slot: int) -> Iterator[tuple[int, int, int]]:
    """(first step, step after the last, blueprint) of every seed's time before it is heard."""
    quiet = [reel.stage_names[row[slot]] in ("GERMINATED", "TRAINING") for row in film.stage]
    for is_quiet, steps in groupby(range(film.steps), quiet.__getitem__):
        first, *rest = steps
        if is_quiet:
            yield first, first + len(rest) + 1, film.blueprint[first][slot]


def _colour_cell(line: Text, stage: str, alpha: float, cell: int, letters: str) -> None:
    if stage in ("DORMANT", "UNKNOWN"):
        line.append(STAGE_LETTERS[stage].ljust(cell), _FAINT)
        return
    colour = cell_colour(stage, alpha)
    if stage == "BLENDING":
        block = _BLOCKS[min(int(alpha * len(_BLOCKS)), len(_BLOCKS) - 1)] if alpha > 0 else " "
        line.append(
            block * cell,
            Style(color=STAGE_COLOURS[stage], bgcolor=mix(STAGE_COLOURS[stage], "#ffffff", 0.25)),
        )
    else:
        edge = Style(color=mix(colour, INK, 0.7), bgcolor=colour)  # keeps lanes of one colour apart
        line.append(letters or _BLOCKS[0] * cell, Style(color=INK, bgcolor=colour) if letters else edge)


def _plain_cell(stage: str, alpha: float) -> str:
    """One character without colour: a letter, and in BLENDING a digit of alpha."""
    return str(min(int(alpha * 10), 9)) if stage == "BLENDING" else STAGE_LETTERS[stage]


def _time_line(span: range, cell: int) -> Text:
    line = [" "] * (len(span) * cell + 4)
    for step in span:
        if step % _TICKS_EVERY == 0:
            start = (step - span.start) * cell
            line[start : start + len(str(step))] = str(step)
    return Text("step".ljust(_LABEL) + "".join(line), _FAINT, no_wrap=True)


def legend(coloured: bool, stages: Sequence[str] = tuple(STAGE_MEANINGS)) -> Iterator[Text]:
    """What the colours and the letters mean, a line each."""
    width = max(map(len, stages))
    for stage in stages:
        swatch = Text()
        if stage == "BLENDING":
            for alpha in (0.2, 0.4, 0.6, 0.8, 1.0):
                if coloured:
                    _colour_cell(swatch, stage, alpha, 1, "")
                else:
                    swatch.append(_plain_cell(stage, alpha))
        elif coloured:
            _colour_cell(swatch, stage, 1.0, 5, "  ·  " if stage == "DORMANT" else "")
        else:
            swatch.append(STAGE_LETTERS[stage] * 5)
        yield Text.assemble(swatch, f" {stage_name(stage):{width}}  ", (STAGE_MEANINGS[stage], _FAINT))


def op_legend(coloured: bool) -> Text:
    """The letters of the row of decisions, in one line."""
    text = Text()
    for op, meaning in OP_MEANINGS.items():
        text.append(OP_GLYPHS[op][0], Style(color=OP_COLOURS[op], bold=True))
        text.append(f" {meaning}".replace(" ", "\u00a0") + "   ", _FAINT)
    text.append("a", _REFUSED)
    text.append(f" {'red' if coloured else 'small'}: refused".replace(" ", "\u00a0"), _FAINT)
    return text
