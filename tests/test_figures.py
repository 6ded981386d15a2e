"""The tables of the performance page are those of the committed result files."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
PERFORMANCE = (ROOT / "docs/performance.md").read_text(encoding="utf-8")
MEASURED = ROOT / "benchmarks/results"


def lines(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (MEASURED / name).read_text().splitlines()]


def agrees(text: str, value: float | str | None) -> bool:
    """Whether a cell shows a value, rounded to the digits that it has; None is a dash or not in the file."""
    if not isinstance(value, float | int):
        return NAMED.get(text, text) == value if value else True
    digits = len(text.rstrip("×").partition(".")[2])
    return abs(float(text.rstrip("×")) - value) <= 0.5001 * 10**-digits


def section(page: str, heading: str) -> str:
    return re.split(r"^## ", page.split(f"## {heading}\n")[1], flags=re.M)[0]


def rows(text: str) -> list[list[str]]:
    """The cells of every table row, without thousands' commas."""
    found = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip().replace(",", "") for cell in line.strip("|").split("|")] for line in found]


NAMED = {"training step": "train step", "with seeds and shadows": "train step with seeds"}


@pytest.mark.parametrize(
    ("heading", "file", "keys"),
    [
        (
            "The population on an H200",
            "h200-population.jsonl",
            ("work", "precision", "n", "baseline_ms", "ours_ms", "ratio", "member_epochs_per_s"),
        ),
        (
            "Larger members",
            "h200-members.jsonl",
            ("host", "n", "population_ms", "compiled_loop_ms", "vmap_ms", "grouped_ms", "tflops", "share"),
        ),
        (
            "The whole loop",
            "h200-loop.jsonl",
            ("work", "n", "steps", "", "member_steps_per_s", "step_ms", "host_ms", "gpu_ms", "gpu_busy",
             "graphs_per_step", "seeds"),
        ),
    ],
)  # fmt: skip
def test_the_tables_of_the_performance_page_are_what_was_measured(
    heading: str, file: str, keys: tuple[str, ...]
) -> None:
    _, *shown = rows(section(PERFORMANCE, heading))
    measured = lines(file)
    assert len(shown) == len(measured)
    for cells in shown:
        assert any(all(map(agrees, cells, map(line.get, keys))) for line in measured), cells
