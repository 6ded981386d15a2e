"""`esper runs`: the runs in a folder, what became of each, and its last figures."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from esper.commands.options import print_line, print_table

TITLES = ("run", "kind", "task", "state", "figures")


def runs(
    folder: Annotated[Path, typer.Argument(help="where to look")] = Path("runs"),
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object per run on stdout")] = False,
) -> None:
    """List the runs in a folder: what each is, how far it came, and what came out."""
    from esper.runs.run_list import list_runs
    from esper.runs.schema import to_json

    found = list_runs(folder)
    if as_json:
        for run in found:
            print(to_json(run))
        return
    if not found:
        print_line(f"there are no runs in {folder}; begin one with 'esper train' or 'esper demo'")
        return
    rows = []
    for run in found:
        figures = ", ".join(f"{name} {value:.4g}" for name, value in run.figures.items())
        rows.append((Path(run.path).name, run.kind, run.task, run.state, figures))
    print_table(TITLES, rows)
