"""`esper export`: a run as tables for other tools."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from esper.foundation.errors import UserError


def export(
    run: Annotated[Path, typer.Argument(help="the folder of the run")],
    as_csv: Annotated[bool, typer.Option("--csv", help="comma-separated text (the default)")] = False,
    as_parquet: Annotated[bool, typer.Option("--parquet", help="Parquet; needs the package pyarrow")] = False,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="the folder to write; by default RUN/tables")
    ] = None,
) -> None:
    """Write the rounds, events and results of a run as tables: one file for each.

    Every number has a column of its own; what was never measured is empty.
    """
    from esper.telemetry.run_folder import RunFolder
    from esper.telemetry.tables import export_run

    kinds = [kind for kind, wanted in (("csv", as_csv), ("parquet", as_parquet)) if wanted] or ["csv"]
    folder = RunFolder.read(run)
    files = [file for kind in kinds for file in export_run(folder, kind, out or run / "tables")]
    if not files:
        raise UserError(f"{run} holds no rounds, events or results yet; nothing was written")
    for file in files:
        print(f"wrote {file}")
