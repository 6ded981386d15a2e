"""Every picture of the pages, drawn from the files that it shows.

    python -m docs.make_pictures                              all of them
    python -m docs.make_pictures population.png study.png     some of them

A picture carries a digest of what it was drawn from, so that a test can tell when it has become old.
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from PIL import Image
from PIL.PngImagePlugin import PngInfo

from benchmarks import population
from benchmarks.common import read_results
from docs import watch_picture
from studies import growth_law
from studies.growth.report import PICTURES as STUDY_PICTURES
from studies.growth.report import Study

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
MEASURED = ROOT / "benchmarks" / "results"
STUDIED = ROOT / "studies" / "results"
DIGEST = "drawn-from"  # the entry of a picture's metadata


@dataclass(frozen=True)
class Drawing:
    """How a picture is made, and the bytes that decide what it shows."""

    draw: Callable[[Path], None]
    source: Callable[[], bytes]

    def digest(self) -> str:
        return hashlib.sha256(self.source()).hexdigest()[:16]


def bytes_of(paths: Iterable[Path]) -> Callable[[], bytes]:
    files = sorted(paths)
    return lambda: b"".join(path.read_bytes() for path in files)


def from_lines(module: object, file: Path) -> Drawing:
    """The plot of a benchmark, of lines that it printed."""

    def draw(path: Path) -> None:
        results, machine = read_results(argparse.ArgumentParser(), file, module.Result)  # type: ignore[attr-defined]
        module.plot(results, path, machine)  # type: ignore[attr-defined]

    return Drawing(draw, bytes_of([file]))


def of_study(draw: Callable[[Study, Path], None]) -> Drawing:
    return Drawing(lambda path: draw(Study.of(), path), bytes_of((STUDIED / "growth").glob("*.jsonl.gz")))


PICTURES: dict[str, Drawing] = {
    **{name: Drawing(watch_picture.draw, bytes_of(watch_picture.sources())) for name in watch_picture.SHOWN},
    "population.png": from_lines(population, MEASURED / "h200-population.jsonl"),
    **{name: of_study(draw) for name, draw in STUDY_PICTURES.items()},
    "growth_law.png": Drawing(growth_law.draw, bytes_of(growth_law.FILES)),
    "growth_seconds.png": Drawing(growth_law.draw_seconds, bytes_of(growth_law.FILES)),
}


def recorded_digest(path: Path) -> str | None:
    """The digest of what a picture was drawn from; None where it carries none."""
    with Image.open(path) as picture:
        return picture.info.get(DIGEST)


def make(name: str) -> None:
    """Draw a picture and write its digest into it."""
    path, drawing = DOCS / name, PICTURES[name]
    drawing.draw(path)
    about = PngInfo()
    about.add_text(DIGEST, drawing.digest())
    with Image.open(path) as picture:
        picture.save(path, pnginfo=about, optimize=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="PICTURE", help=f"of {', '.join(PICTURES)}; all if none")
    names = parser.parse_args().names or list(PICTURES)
    if unknown := set(names) - set(PICTURES):
        parser.error(f"no picture is called {', '.join(sorted(unknown))}; there are {', '.join(PICTURES)}")
    for name in names:
        make(name)
        print(f"wrote docs/{name}", flush=True)


if __name__ == "__main__":
    main()
