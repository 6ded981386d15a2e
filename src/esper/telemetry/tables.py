"""A run as flat tables, for spreadsheets and data frames.

    rounds    one row per round, every number under one name: `return_mean`, `op_shares/WAIT`, ...
    events    one row per event, its numbers as `numbers/contribution`, ...
    results   one row per controller and member
    curves    one row per epoch of an `esper.grow` and of what it is measured against

What was never measured is empty.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from esper.foundation.errors import require
from esper.telemetry.files import disk_errors, write_atomically
from esper.telemetry.run_folder import RunFolder
from esper.telemetry.schema import json_values

Row = Mapping[str, Any]


def export_run(folder: RunFolder, kind: str, out: Path) -> list[Path]:
    """Write the tables of a run into `out` as `kind`, csv or parquet, and return the files.

    A table without rows is left out. Raises `UserError` where the package for `kind` is missing, or where
    the run is damaged.
    """
    encode = _ENCODERS[kind]
    tables = {"rounds": _rounds(folder), "events": _events(folder), "results": _results(folder)}
    tables["curves"] = _curves(folder)
    files = {out / f"{name}.{kind}": encode(rows) for name, rows in tables.items() if rows}
    with disk_errors("create", out):
        out.mkdir(parents=True, exist_ok=True)
    for path, data in files.items():
        write_atomically(path, data)
    return list(files)


def _rounds(folder: RunFolder) -> list[Row]:
    return [{"round": summary.round} | summary.scalars() for summary in folder.metrics()]


def _events(folder: RunFolder) -> list[Row]:
    rows = []
    for event in folder.events():
        row = json_values(event)
        numbers = row.pop("numbers")
        rows.append(row | {f"numbers/{name}": value for name, value in numbers.items()})
    return rows


def _results(folder: RunFolder) -> list[Row]:
    results = folder.results()
    columns = ("test_accuracy", "parameters", "member_epochs", "flops", "potential")
    return [
        {"controller": controller.name, "member": member}
        | {name: json_values(values[i]) for name in columns if (values := getattr(controller, name))}
        for controller in (results.controllers if results is not None else ())
        for i, member in enumerate(controller.members)
    ]


def _curves(folder: RunFolder) -> list[Row]:
    growth = folder.growth()
    return [
        {
            "name": curve.name,
            "epoch": epoch,
            "score": json_values(score),
            "parameters": size,
            "flops": json_values(flops),
        }
        for curve in (growth.curves if growth is not None else ())
        for epoch, (score, size, flops) in enumerate(
            zip(curve.score, curve.parameters, curve.flops, strict=True)
        )
    ]


def _names(rows: Iterable[Row]) -> list[str]:
    """Every column that some row has, in the order in which they turn up."""
    return list(dict.fromkeys(name for row in rows for name in row))


def _as_csv(rows: Sequence[Row]) -> bytes:
    text = io.StringIO()
    writer = csv.DictWriter(text, _names(rows), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


def _as_parquet(rows: Sequence[Row]) -> bytes:
    modules = ("pyarrow", "pyarrow.parquet")
    arrow, parquet = (require(module, "parquet", "Parquet, unlike --csv,") for module in modules)
    table = arrow.table({name: [row.get(name) for row in rows] for name in _names(rows)})
    data = io.BytesIO()
    parquet.write_table(table, data)
    return data.getvalue()


_ENCODERS: dict[str, Callable[[Sequence[Row]], bytes]] = {"csv": _as_csv, "parquet": _as_parquet}
