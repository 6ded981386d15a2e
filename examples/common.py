"""What the examples share: their command line, and the verdict at the end."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path


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
