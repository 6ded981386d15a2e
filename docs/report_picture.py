"""docs/report.png: what the report of `make demo` begins with, from the files of that run.

The two files that it is drawn from are kept in docs/demo; `python -m docs.report_picture runs/demo` takes
those of another run and draws anew.
"""

from __future__ import annotations

import argparse
import io
import shutil
from pathlib import Path

from matplotlib.figure import Figure
from PIL import Image

from esper.runs import charts
from esper.runs.palette import GRID, INK, MUTED
from esper.runs.pictures import figure, png_bytes
from esper.runs.run_folder import RunFolder
from esper.runs.schema import Comparison
from esper.utils.statistics import mean_interval

DEMO = Path(__file__).parent / "demo"
FILES = ("metrics.jsonl", "results.json")
COLUMNS = {
    "controller": 0.0,
    "test accuracy, %": 0.42,
    "parameters": 0.68,
}  # and where each begins


def results_table(results: Comparison) -> Figure:
    """Controllers, and what each reached: means with 95 % intervals over members."""
    rows = [
        [
            result.name,
            _interval([100 * a for a in result.test_accuracy], ".1f"),
            _interval(result.parameters, ",.0f"),
        ]
        for result in results.controllers
    ]
    picture = figure(0.34 * (len(rows) + 3))
    axes = picture.subplots()
    axes.set_axis_off()
    axes.set(xlim=(0, 1), ylim=(len(rows) + 1.2, -1.4))
    members = len(results.controllers[0].members)
    heading = f"The demo: {results.task}, {results.host}, {members} members, means with 95 % intervals"
    axes.text(0, -1, heading, fontsize=12, fontweight="bold", color=INK, va="center")
    for name, place in COLUMNS.items():
        axes.text(place, 0, name, fontsize=10, color=MUTED, va="center")
    for k, cells in enumerate(rows, start=1):
        axes.axhline(k - 0.5, color=GRID, linewidth=0.8)
        for cell, place in zip(cells, COLUMNS.values(), strict=True):
            axes.text(place, k, cell, fontsize=10.5, color=INK, va="center")
    return picture


def _interval(values: object, form: str) -> str:
    mean, half = mean_interval(list(values))  # type: ignore[call-overload]
    return f"{mean:{form}} ± {half:{form}}"


def draw(path: Path) -> None:
    """One picture below the other: the results, accuracy against compute, the learning curves."""
    folder = RunFolder(DEMO, {})
    rounds, results = folder.metrics(), folder.results()
    assert results is not None
    figures = [
        results_table(results),
        charts.accuracy_against_compute(results.controllers),
        charts.learning_curves(rounds),
    ]
    parts = [Image.open(io.BytesIO(png_bytes(part))).convert("RGB") for part in figures]
    whole = Image.new("RGB", (max(p.width for p in parts), sum(p.height for p in parts)), "white")
    for k, part in enumerate(parts):
        whole.paste(part, (0, sum(p.height for p in parts[:k])))
    whole.save(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("run", type=Path, help="the folder of a finished demo")
    run = parser.parse_args().run
    if missing := [name for name in FILES if not (run / name).is_file()]:
        parser.error(f"{run} has no {' and no '.join(missing)}; give the folder of a finished demo")
    DEMO.mkdir(exist_ok=True)
    for name in FILES:
        shutil.copyfile(run / name, DEMO / name)
    from docs.make_pictures import make

    make("report.png")


if __name__ == "__main__":
    main()
