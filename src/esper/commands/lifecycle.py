"""`esper lifecycle`: an episode of growth on the screen, the first picture of the system."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from esper.commands.options import Seed, check_range, console

if TYPE_CHECKING:
    from esper.telemetry.schema import FilmReel

GUIDE = (
    "How to read it: every band is one member, every lane one slot of its host, and time runs to the right, "
    "one step after another. A seed is planted ({0}) and learns alone ({1}) while the host does not hear "
    "it; then it is blended in ({2}, as alpha rises), held on probation ({3}) and kept for good ({4}), or "
    "taken out ({5}), after which its slot rests ({6}) before it may be used again. "
    "The row above the lanes shows what the controller asked for."
)
_IN_COLOUR = ("yellow", "orange", "pale to full blue", "dark blue", "green", "red", "mauve")
_IN_LETTERS = ("g", "t", "0 to 9", "h", "F", "x", "e")


def lifecycle(
    members: Annotated[int, typer.Option(help="how many networks to show, 1 to 64")] = 3,
    slots: Annotated[int, typer.Option(help="slots of each network, 1 to 25")] = 3,
    steps: Annotated[int, typer.Option(help="decision steps to play, 1 to 1000")] = 60,
    seed: Seed = 0,
    scripted: Annotated[
        bool, typer.Option("--scripted/--random", help="told stories, or random legal choices")
    ] = True,
    png: Annotated[Path | None, typer.Option(help="also draw it into this file")] = None,
) -> None:
    """Play an episode with the real rules and made-up evidence, and draw the life of every slot."""
    for name, value, most in (("--members", members, 64), ("--slots", slots, 25), ("--steps", steps, 1000)):
        check_range(name, value, 1, most)
    check_range("--seed", seed, 0, 2**53 - 1)
    from esper.commands.made_up_episode import RandomPlayer, ScriptedPlayer, film_episode

    player = ScriptedPlayer(members) if scripted else RandomPlayer(members, seed)
    reel = film_episode(player, slots, steps, seed)
    _draw(reel)
    if png is not None:
        from esper.telemetry.pictures import film_strips, save_png

        save_png(film_strips(reel), png)
        console().print(f"wrote {png}")


def _draw(reel: FilmReel) -> None:
    from rich.padding import Padding
    from rich.text import Text

    from esper.telemetry.strips import FilmStrip, legend, op_legend

    screen = console()
    coloured = screen.color_system is not None
    for film in reel.films:
        screen.print(FilmStrip(film, reel))
        screen.print()
    for line in legend(coloured):
        screen.print(line)
    screen.print()
    screen.print(op_legend(coloured))
    screen.print(Padding(Text(GUIDE.format(*(_IN_COLOUR if coloured else _IN_LETTERS))), (1, 0)))
