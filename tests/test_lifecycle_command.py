"""`esper lifecycle`: real rules, honest pictures."""

from __future__ import annotations

import io
import re
from itertools import pairwise
from pathlib import Path

import pytest
from rich.console import Console

from esper import cli
from esper.commands.made_up_episode import RandomPlayer, ScriptedPlayer, film_episode
from esper.commands.stories import CAST
from esper.lifecycle.actions import Op
from esper.lifecycle.stages import TRANSITIONS, Stage
from esper.telemetry import palette
from esper.telemetry.schema import FilmReel
from esper.telemetry.strips import FilmStrip, legend


def drawn(reel: FilmReel, width: int, colour: bool) -> str:
    target = io.StringIO()
    screen = Console(
        file=target, width=width, force_terminal=colour, color_system="truecolor" if colour else None
    )
    for film in reel.films:
        screen.print(FilmStrip(film, reel))
    return target.getvalue()


def test_every_stage_and_op_has_its_place_in_the_palette() -> None:
    stages = {stage.name for stage in Stage}
    assert set(palette.STAGE_COLOURS) == set(palette.STAGE_LETTERS) == stages
    assert set(palette.STAGE_MEANINGS) == stages - {"UNKNOWN"}
    ops = {op.name for op in Op}
    assert set(palette.OP_COLOURS) == set(palette.OP_GLYPHS) == ops
    assert set(palette.OP_MEANINGS) == ops - {"WAIT"}
    assert len(set(palette.STAGE_LETTERS.values())) == len(stages), "letters tell stages apart without colour"


def test_alpha_is_the_shade_of_blending_alone() -> None:
    shades = [palette.cell_colour("BLENDING", alpha) for alpha in (0.0, 0.5, 1.0)]
    assert len(set(shades)) == 3
    assert shades[-1] == palette.STAGE_COLOURS["BLENDING"]
    assert palette.cell_colour("HOLDING", 0.2) == palette.STAGE_COLOURS["HOLDING"]


@pytest.mark.parametrize("make", [lambda: ScriptedPlayer(len(CAST)), lambda: RandomPlayer(8, seed=3)])
@pytest.mark.parametrize("slots", [1, 3, 5])
def test_only_legal_moves_are_filmed(make: object, slots: int) -> None:
    reel = film_episode(make(), slots, 80, seed=3)  # type: ignore[operator]
    reachable = {s: TRANSITIONS[s] | {t for m in TRANSITIONS[s] for t in TRANSITIONS[m]} | {s} for s in Stage}
    for film in reel.films:
        for before, after in pairwise(film.stage):
            for old, new in zip(before, after, strict=True):
                assert Stage(new) in reachable[Stage(old)], (
                    "an apply and a tick: at most two moves between frames"
                )
        for row, alphas in zip(film.stage, film.alpha, strict=True):
            assert all(
                alpha == 1.0 for stage, alpha in zip(row, alphas, strict=True) if stage == Stage.HOLDING
            )


def test_the_stories_show_every_stage_every_op_and_both_kinds_of_refusal() -> None:
    reel = film_episode(ScriptedPlayer(len(CAST)), 3, 80, seed=0)
    shown = {stage for film in reel.films for row in film.stage for stage in row}
    assert shown == {int(stage) for stage in Stage if stage is not Stage.UNKNOWN}
    assert {op for film in reel.films for op in film.op} == {int(op) for op in Op}
    refused = [
        op for film in reel.films for op, done in zip(film.op, film.succeeded, strict=True) if not done
    ]
    assert set(refused) == {int(Op.ADVANCE), int(Op.FOSSILIZE)}, "too early, and of no use"


def test_the_same_seed_plays_the_same_episode_beside_any_neighbours() -> None:
    few = film_episode(RandomPlayer(2, seed=5), 3, 50, seed=5)
    many = film_episode(RandomPlayer(6, seed=5), 3, 50, seed=5)
    assert few.films == many.films[:2]
    assert film_episode(RandomPlayer(2, seed=6), 3, 50, seed=6).films != few.films


@pytest.mark.parametrize("width", [40, 80, 200])
def test_lanes_without_colour_say_every_step(width: int) -> None:
    reel = film_episode(ScriptedPlayer(1), 2, 45, seed=0)
    lines = drawn(reel, width, colour=False).splitlines()
    assert max(map(len, lines)) <= width
    lane = "".join(line[6:].rstrip() for line in lines if line.startswith("r0c0"))
    cell = max(1, min(3, (width - 7) // 45))
    letters = [palette.STAGE_LETTERS[Stage(row[0]).name] for row in reel.films[0].stage]
    assert len(lane) == 45 * cell
    for step, letter in enumerate(letters):
        assert lane[step * cell] == letter or (letter == "b" and lane[step * cell].isdigit())


def test_lanes_in_colour_use_the_palette() -> None:
    text = drawn(film_episode(ScriptedPlayer(1), 2, 45, seed=0), 100, colour=True)
    for stage in ("GERMINATED", "TRAINING", "HOLDING", "FOSSILIZED"):
        red, green, blue = palette.rgb(palette.STAGE_COLOURS[stage])
        assert f"48;2;{red};{green};{blue}" in text
    assert "conv light" in re.sub(r"\x1b\[[0-9;]*m", "", text)


def test_the_legend_explains_every_stage() -> None:
    lines = [line.plain for line in legend(coloured=False)]
    assert len(lines) == len(palette.STAGE_MEANINGS)
    assert all(palette.stage_name(stage) in " ".join(lines) for stage in palette.STAGE_MEANINGS)


def test_the_command_draws_and_writes_a_png(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    png = tmp_path / "life.png"
    assert cli.run(["lifecycle", "--members", "2", "--steps", "30", "--seed", "7", "--png", str(png)]) == 0
    shown = capsys.readouterr().out
    assert "member 1" in shown
    assert "How to read it" in shown
    assert png.read_bytes().startswith(b"\x89PNG")
    assert cli.run(["lifecycle", "--png", str(tmp_path / "no" / "where.png")]) == 2
    assert "cannot write" in capsys.readouterr().err
