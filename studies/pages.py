"""Tables in pages: each stands between two marks and is what its files give."""

from __future__ import annotations

import re
from collections.abc import Mapping


def with_tables(page: str, tables: Mapping[str, str]) -> str:
    """The page with every table between its marks; raises ValueError where marks are missing.

    Marks are <!-- study:NAME --> and <!-- end:NAME -->, each on a line of its own.
    """
    for name, table in tables.items():
        marks = re.compile(rf"(<!-- study:{name} -->\n).*?(<!-- end:{name} -->)", re.DOTALL)
        page, found = marks.subn(lambda mark, table=table: f"{mark[1]}{table}\n{mark[2]}", page)
        if found != 1:
            raise ValueError(f"the page has {found} places for the table {name!r}, not one")
    return page
