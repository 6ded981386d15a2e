"""The tables of docs/equal_compute.md, from the files that the studies left.

python -m studies.equal_compute_page     writes them into the page
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from studies import gpt, resnet, widening
from studies.equal_compute import comparison, read
from studies.pages import with_tables

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "equal_compute.md"


def gpt_table() -> str:
    """Test losses of the GPT, at the budgets that have any."""
    found = {f"{name}FLOP": results for name, results in gpt.results_in(gpt.RESULTS).items()}
    tested = {name: results for name, results in found.items() if np.isfinite(results[0].test_loss).all()}
    return comparison(tested, "test_loss")


def widening_table() -> str:
    """Accuracies of the widened network."""
    found = read(widening.RESULTS / "widening.jsonl")
    return comparison({f"{found[0].flops / 1e9:g} GFLOP": found}, "test_accuracy")


def resnet_table() -> str:
    """Accuracies of the residual network at every budget."""
    return comparison(resnet.results_in(resnet.RESULTS, resnet.FULL), "test_accuracy")


TABLES: dict[str, Callable[[], str]] = {
    "gpt": gpt_table,
    "widening": widening_table,
    "resnet": resnet_table,
}


def page_with_tables(page: str) -> str:
    """The page with every table between its marks; raises ValueError where marks are missing."""
    return with_tables(page, {name: make() for name, make in TABLES.items()})


def main() -> None:
    """Write the tables into the page."""
    PAGE.write_text(page_with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"wrote the tables of {PAGE}")


if __name__ == "__main__":
    main()
