"""`esper runs`: the runs in a folder, what became of each, and its last figures."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from esper.commands.options import console, print_line

TITLES = ("run", "kind", "task", "state", "figures")


def runs(
    folder: Annotated[Path, typer.Argument(help="where to look")] = Path("runs"),
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object per run on stdout")] = False,
) -> None:
    """List the runs in a folder: what each is, how far it came, and what came out."""
    from rich.markup import escape
    from rich.table import Table

    from esper.telemetry.run_list import list_runs
    from esper.telemetry.schema import to_json

    found = list_runs(folder)
    if as_json:
        for run in found:
            print(to_json(run))
        return
    if not found:
        print_line(f"there are no runs in {folder}; begin one with 'esper train' or 'esper demo'")
        return
    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in TITLES:
        table.add_column(title, overflow="fold")
    for run in found:
        figures = ", ".join(f"{name} {value:.4g}" for name, value in run.figures.items())
        cells = (Path(run.path).name, run.kind, run.task, run.state, figures)
        table.add_row(*(escape(cell) for cell in cells))
    console().print(table)
