"""docs/demo.png, docs/watch.png and docs/watch_member.png: the page over a demo, in a headless browser.

What it shows is kept in docs/watched; `python -m docs.watch_picture runs/demo` takes that of another run and
draws anew. It needs chromium and the extras `watch` and `dev`.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path

from esper.runs.run_folder import Kind, RunFolder
from tests.watch.browser import Visit, opened_tab
from tests.watch.served import serving

WATCHED = Path(__file__).parent / "watched"
KEPT_ROUNDS = 3  # whose members are kept here
SHOWN = {  # what of the page each picture shows, and what has to be on it before
    "demo.png": ("theme=light", ".outcome .uplot"),
    "watch.png": ("theme=dark&step=11", ".wall .legend b"),
    "watch_member.png": ("view=members&theme=dark&step=9", ".wall .legend b"),
}


def sources() -> list[Path]:
    """The files that decide what the picture shows."""
    return sorted(path for path in WATCHED.rglob("*") if path.is_file())


def draw(path: Path) -> None:
    """The picture of that name, as a PNG."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "demo"
        config = (WATCHED / "config.yaml").read_text(encoding="utf-8")
        # The results of the demo have a picture of their own; the others show the training of its controller.
        kind: Kind = "demo" if path.name == "demo.png" else "train"
        with RunFolder.create(folder, config=config, seed=7, kind=kind, command=["esper", "demo"]):
            shutil.copytree(WATCHED, folder, dirs_exist_ok=True)
        if kind == "train":
            (folder / "results.json").unlink()
        shown, needed = SHOWN[path.name]
        with serving(folder) as served, opened_tab(scale=1.5) as tab:
            visit = Visit(tab, served.address, shown)
            visit.wait(f"() => document.querySelector('{needed}') && document.querySelector('.uplot')")
            visit.settle()
            visit.page.screenshot(path=str(path))


def take(run: Path) -> None:
    """Keep what the picture needs of another run."""
    shutil.rmtree(WATCHED, ignore_errors=True)
    (WATCHED / "trajectories").mkdir(parents=True)
    for name in ("metrics.jsonl", "config.yaml", "results.json"):
        shutil.copyfile(run / name, WATCHED / name)
    for name in ("metrics.jsonl", "results.json"):
        shutil.copyfile(run / name, WATCHED.parent / "demo" / name)
    for file in sorted((run / "trajectories").iterdir())[-KEPT_ROUNDS:]:
        shutil.copyfile(file, WATCHED / "trajectories" / file.name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("run", type=Path, help="the folder of a run")
    take(parser.parse_args().run)
    from docs.make_pictures import make

    for name in SHOWN:
        make(name)


if __name__ == "__main__":
    main()
