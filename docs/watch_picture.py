"""docs/demo.png, docs/watch.png and docs/watch_member.png: the live page in a headless browser.

The first shows the demo in docs/demo, the others the comparison of controllers of growth in docs/watched.
`python -m docs.watch_picture RUN` takes another demo, or another comparison, and draws anew. It needs
chromium and the extras `watch` and `dev`.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path

from esper.runs.run_folder import Kind, RunFolder
from tests.watch.browser import Visit, opened_tab
from tests.watch.served import serving

DEMO, WATCHED = Path(__file__).parent / "demo", Path(__file__).parent / "watched"
SHOWN = {  # what of the page each picture shows, and what has to be on it before
    "demo.png": ("theme=light", ".outcome .uplot"),
    "watch.png": ("theme=dark&step=15", ".wall .legend b"),
    "watch_member.png": ("view=members&theme=dark&step=9", ".wall .legend b"),
}


def sources() -> list[Path]:
    """The files that decide what the pictures show."""
    return sorted(path for folder in (DEMO, WATCHED) for path in folder.rglob("*") if path.is_file())


def draw(path: Path) -> None:
    """The picture of that name, as a PNG."""
    with tempfile.TemporaryDirectory() as place:
        kind: Kind = "demo" if path.name == "demo.png" else "compare"
        folder, kept = Path(place) / kind, DEMO if kind == "demo" else WATCHED
        config = (kept / "config.yaml").read_text(encoding="utf-8")
        with RunFolder.create(folder, config=config, seed=7, kind=kind, command=["esper", kind]):
            shutil.copytree(kept, folder, dirs_exist_ok=True)
        shown, needed = SHOWN[path.name]
        with serving(folder) as served, opened_tab(scale=1.5) as tab:
            visit = Visit(tab, served.address, shown)
            visit.wait(f"() => document.querySelector('{needed}') && document.querySelector('.uplot')")
            visit.settle()
            visit.page.screenshot(path=str(path))


def take(run: Path) -> None:
    """Keep what the pictures need of another run, a demo or a comparison."""
    is_demo = RunFolder.read(run).kind == "demo"
    kept = DEMO if is_demo else WATCHED
    shutil.rmtree(kept, ignore_errors=True)
    kept.mkdir()
    for name in ("results.json", "config.yaml"):
        shutil.copyfile(run / name, kept / name)
    if not is_demo:
        shutil.copytree(run / "trajectories", kept / "trajectories")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("run", type=Path, help="the folder of a run")
    take(parser.parse_args().run)
    from docs.make_pictures import make

    for name in SHOWN:
        make(name)


if __name__ == "__main__":
    main()
