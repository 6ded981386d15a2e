"""What the examples share: their command line, the curve and the verdict at the end."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from esper.simic.gym_training import Point
from esper.telemetry.palette import MUTED, SERIES
from esper.telemetry.pictures import figure, save_png, style_axes


@dataclass(frozen=True)
class Options:
    """The command line of an example."""

    seed: int
    total_steps: int
    picture: Path


def read_options(name: str, what: str, total_steps: int, arguments: list[str] | None) -> Options:
    parser = argparse.ArgumentParser(prog=f"python -m examples.{name}", description=what)
    parser.add_argument("--seed", type=int, default=0, help="of environments, weights and actions")
    parser.add_argument("--steps", type=int, default=total_steps, help="environment steps at most")
    parser.add_argument("--picture", type=Path, default=Path(f"runs/examples/{name}.png"), help="the curve")
    given = parser.parse_args(arguments)
    return Options(given.seed, given.steps, given.picture)


def verdict(reached: float, stated: float, picture: Path) -> int:
    """Say what was reached against what was stated; the exit status."""
    good = reached >= stated
    print(f"reached {reached:.2f}, stated {stated:g}: {'yes' if good else 'NO'}; curve in {picture}")
    return 0 if good else 1


def draw_curve(path: Path, title: str, curves: Mapping[str, Sequence[Point]], target: float) -> None:
    """Mean return over environment steps, a line for each run, and the return that is aimed at, as a PNG."""
    picture = figure(3.6, width=7.0)
    axes = style_axes(picture.subplots(), title, x="environment steps", y="mean return")
    for (name, curve), colour in zip(curves.items(), SERIES, strict=False):
        steps, returns = [p.steps for p in curve], [p.mean_return for p in curve]
        axes.plot(steps, returns, color=colour, linewidth=1.8, label=name)
    axes.axhline(target, color=MUTED, linewidth=1.2, linestyle="--", label=f"stated: {target:g}")
    axes.legend(frameon=False, fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    save_png(picture, path)
