"""`python -m benchmarks.hot_paths [work ...]`: the hot paths against the shapes that they replace.

A work is a `Work` in the tuple `WORKS` of any module of this folder: write one, and it can be named here.
"""

from __future__ import annotations

import argparse
import importlib
import pkgutil

import benchmarks
from benchmarks.common import MEMBERS, SLOTS, Work, measure, print_json, print_table


def find_works() -> dict[str, Work]:
    """Every work of every module of this folder, by name."""
    works: dict[str, Work] = {}
    for module in pkgutil.iter_modules(benchmarks.__path__, "benchmarks."):
        if module.name != __spec__.name:
            found = getattr(importlib.import_module(module.name), "WORKS", ())
            works.update({work.name: work for work in found if isinstance(work, Work)})
    return works


def main(arguments: list[str] | None = None) -> None:
    works = find_works()
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hot_paths", description=__doc__)
    parser.add_argument(
        "works", nargs="*", metavar="work", help=f"any of {', '.join(works)}; all if none is named"
    )
    parser.add_argument("--json", action="store_true", help="one object per row instead of a table")
    parser.add_argument("--members", type=int, nargs="+", help=f"numbers of members, default {MEMBERS}")
    parser.add_argument("--slots", type=int, nargs="+", help=f"numbers of slots, default {SLOTS}")
    parser.add_argument("--seconds", type=float, default=1.0, help="CPU seconds for each row")
    given = parser.parse_args(arguments)
    unknown = [name for name in given.works if name not in works]
    if unknown:
        parser.error(f"unknown work {', '.join(unknown)}; there are {', '.join(works)}")
    for name in given.works or works:
        work = works[name]
        rows = measure(work, given.members or work.members, given.slots or work.slots, given.seconds)
        print_json(rows) if given.json else print_table(work, rows)


if __name__ == "__main__":
    main()
