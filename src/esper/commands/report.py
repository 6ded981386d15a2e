"""`esper report`: the page of a run, made anew from its folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from esper.commands.options import print_line


def report(run: Annotated[Path, typer.Argument(help="the folder of the run")]) -> None:
    """Write report.html of a run, finished or not, into its folder."""
    from esper.runs.report import write_report
    from esper.runs.run_folder import RunFolder

    print_line(f"wrote {write_report(RunFolder.read(run))}")
