"""The tables and the pictures of the study's two pages, from the files under studies/results.

    python -m studies.report                                     writes docs/study*.md and docs/study*.png
    python -m studies.report --results runs/study --docs runs/study     a report of one's own evaluation

A table goes between its markers, `<!-- study:NAME -->` and `<!-- end:NAME -->`; one that has no markers yet
is added at the end.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from esper.foundation.errors import UserError
from studies import foresight, training_log
from studies.ablation_tables import ablations_table, variants_table
from studies.command_line import run
from studies.effects import TAMIYO, by_title
from studies.held_out import HELD_OUT
from studies.pictures import PICTURES
from studies.records import Evaluation
from studies.tables import (
    calibration_table,
    frontier_table,
    gromo_table,
    main_table,
    policy_table,
    seeds_table,
    shipped_table,
    summary_table,
    time_table,
)

RESULTS = Path("studies/results")
DOCS = Path("docs")
STORY = "study.md"  # for reading: two tables, between prose
SIMULATED = "simulated.jsonl"  # logs of studies.simulated, one after another
PAGE = "study_tables.md"  # for looking up: all the others

# Name → the heading that a new table gets, and how it is made.
TABLES: dict[str, tuple[str, Callable[[dict[str, Evaluation]], str]]] = {
    "main": ("All arms", main_table),
    "seeds": ("Training seeds", seeds_table),
    "frontier": ("At equal parameters", frontier_table),
    "time": ("Time to the static host's accuracy, as shares of its whole training", time_table),
    "ablations": ("Ablations of the lifecycle", ablations_table),
    "variants": ("Controllers trained with something taken away", variants_table),
    "policy": ("What the controllers do", policy_table),
    "calibration": ("Random growth, matched", calibration_table),
}


def evaluations(folder: Path) -> dict[str, Evaluation]:
    """The results of every task that was evaluated, in the order of the study."""
    paths = {name: folder / f"evaluation-{name}.json" for name in HELD_OUT}
    found = {name: read(path) for name, path in paths.items() if path.exists()}
    if not found:
        raise UserError(f"{folder} holds no evaluation-*.json; run: python -m studies.growth evaluate")
    return found


def read(path: Path) -> Evaluation:
    try:
        found = Evaluation.read(path)
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        raise UserError(
            f"{path} does not hold an evaluation of this version ({error}); evaluate the task again"
        ) from None
    if "static" not in found or TAMIYO not in by_title(found):
        raise UserError(f"{path} lacks what the program 'arms' finds; evaluate the task with it")
    return found


def extras(folder: Path) -> dict[str, tuple[str, Callable[[Path], str], Path]]:
    """Tables from files that only some studies have: name → heading, how it is made, from what."""
    known = {
        "gromo": ("Beside gromo", gromo_table, folder / "gromo.json"),
        "training": ("The training", training_table, folder / training_log.LOG),
        "simulated": ("The learner in a simulated world", kinds_table, folder / SIMULATED),
        "foresight": ("What can be foreseen", foresight_table, folder / foresight.RESULTS.name),
    }
    return {name: extra for name, extra in known.items() if extra[2].exists()}


def training_table(path: Path) -> str:
    return training_log.table(training_log.read(path))


def kinds_table(path: Path) -> str:
    return training_log.kinds_table(training_log.read(path))


def foresight_table(path: Path) -> str:
    return foresight.table(list(foresight.read(path).values()))


def placed(page: str, name: str, heading: str, table: str) -> str:
    """The page with a table between its markers."""
    begins, ends = f"<!-- study:{name} -->", f"<!-- end:{name} -->"
    block = f"{begins}\n{table}\n{ends}"
    if begins in page:
        return re.sub(f"{re.escape(begins)}.*?{re.escape(ends)}", lambda _: block, page, flags=re.DOTALL)
    return f"{page.rstrip()}\n\n### {heading}\n\n{block}\n"


def write(path: Path, title: str, made: Mapping[str, tuple[str, str]]) -> None:
    """Put tables into a page, in place of what was there before."""
    page = path.read_text() if path.exists() else title
    for name, (heading, table) in made.items():
        print(f"\n### {heading}\n\n{table}", flush=True)
        page = placed(page, name, heading, table)
    path.write_text(page)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--docs", type=Path, default=DOCS)
    args = parser.parse_args()
    found = evaluations(args.results)
    made = {name: (heading, make(found)) for name, (heading, make) in TABLES.items()}
    made |= {name: (heading, make(path)) for name, (heading, make, path) in extras(args.results).items()}
    story = {
        "summary": ("In short", summary_table(found)),
        "shipped": ("The controller that is shipped", shipped_table(found)),
    }
    write(args.docs / STORY, "# Does growth pay?\n", story)
    write(args.docs / PAGE, "# Does growth pay? The tables\n", made)
    for picture, draw in PICTURES.items():
        draw(found, args.docs / picture)
    if (log := args.results / training_log.LOG).exists():
        training_log.picture(training_log.read(log), args.docs / training_log.PICTURE)


if __name__ == "__main__":
    run(main)
